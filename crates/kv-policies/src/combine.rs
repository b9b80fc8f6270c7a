//! One policy for prompts and another one for decode steps, as one policy: [`Combine::new`] says
//! which pairs fit together.

use std::sync::Arc;

use crate::policy::config::{Config, invalid};
use crate::policy::forward::forward;
use crate::{Capabilities, Composition, LayerContext, Needs, Policy, Result};

/// The registry's name.
pub(crate) const COMBINE: &str = "combine";

/// One policy for the prompt and another for decoding: `{"policy": "combine", "prefill": {...},
/// "decode": {...}}`, such as SnapKV's choice kept within its budget by H2O. A name stands for a
/// policy without options.
#[derive(Debug, Clone)]
pub struct Combine {
    prefill: Arc<dyn Policy>,
    decode: Arc<dyn Policy>,
}

impl Combine {
    /// `prefill` chooses from the prompt, `decode` does the rest, merging and renumbering included.
    ///
    /// # Errors
    /// [`crate::PolicyError::InvalidConfig`] where only `prefill` renumbers: decode steps would not
    /// go on with it; and for policies that cannot be halved ([`Capabilities::combines`]).
    pub fn new(prefill: Arc<dyn Policy>, decode: Arc<dyn Policy>) -> Result<Self> {
        for (part, policy) in [("prefill", &prefill), ("decode", &decode)] {
            if !policy.capabilities().combines {
                let reason = format!(
                    "`{part}` is `{}`, whose prompt and decode steps belong together",
                    policy.name()
                );
                return Err(invalid(COMBINE, reason));
            }
        }
        if prefill.capabilities().renumbers && !decode.capabilities().renumbers {
            let reason = "`rerotate` of `prefill` alone does not hold while decoding, expected it \
                          in `decode`";
            return Err(invalid(COMBINE, reason.into()));
        }
        Ok(Self { prefill, decode })
    }

    /// The policy from the configurations of its parts.
    pub(crate) fn from_config(config: &mut Config) -> Result<Arc<dyn Policy>> {
        let mut part = |name: &str| match config.take_part(name, None) {
            Some(part) if part.is_object() => config.build(&part),
            Some(part) => {
                let reason = "expected a policy's name, or an object with a `policy`";
                Err(invalid(COMBINE, format!("`{name}`: {reason}, found {part}")))
            }
            None => Err(invalid(COMBINE, format!("`{name}` is missing"))),
        };
        Ok(Arc::new(Self::new(part("prefill")?, part("decode")?)?))
    }
}

impl Policy for Combine {
    forward!(prefill: select, prune, visible_window, frozen_tokens);
    forward!(decode: budget, init_cache, room, restore, plan, last_attended);

    fn name(&self) -> &'static str {
        COMBINE
    }

    fn config(&self) -> serde_json::Value {
        serde_json::json!({
            "policy": COMBINE,
            "prefill": self.prefill.config(),
            "decode": self.decode.config(),
        })
    }

    fn warnings(&self, layers: usize) -> Vec<String> {
        [self.prefill.warnings(layers), self.decode.warnings(layers)].concat()
    }

    fn composition(&self) -> Composition<'_> {
        Composition::Combined { prefill: &*self.prefill, decode: &*self.decode }
    }

    fn most_kept(&self, layer: LayerContext, tokens: usize) -> usize {
        self.prefill.most_kept(layer, tokens)
    }

    fn least_kept(&self, tokens: usize) -> usize {
        let kept = self.prefill.least_kept(tokens);
        match self.decode.capabilities().changes_decode {
            // It may drop slots of the prompt before the first step.
            true => kept.min(self.decode.least_kept(tokens)),
            false => kept,
        }
    }

    fn needs(&self) -> Needs {
        self.prefill.needs().union(self.decode.needs())
    }

    fn capabilities(&self) -> Capabilities {
        let (prefill, decode) = (self.prefill.capabilities(), self.decode.capabilities());
        Capabilities {
            changes_prefill: prefill.changes_prefill,
            changes_decode: decode.changes_decode,
            reads_other_layers: prefill.reads_other_layers || decode.reads_other_layers,
            compares_heads: prefill.compares_heads || decode.compares_heads,
            compares_hidden: decode.compares_hidden,
            renumbers: decode.renumbers,
            draws: prefill.draws || decode.draws,
            weights: prefill.weights.union(decode.weights),
            target: decode.target,
            block_of_sums: decode.block_of_sums,
            ..Capabilities::default()
        }
    }
}
