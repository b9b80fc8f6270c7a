//! CPE (PrHS, section IV-D): CIS within PSAW's windows, with ETF in prefill. Its steps are
//! [`Cis`]'s ([`super::cis`]); [`Psaw`] and [`Etf`] say what windows hide and which tokens freeze.

use std::sync::Arc;

use kv_core::{LayerCache, Selection};
use kv_kernels::Share;

use crate::policy::config::{Config, invalid};
use crate::policy::forward::forward;
use crate::{
    Capabilities, Cis, CisOptions, Etf, LayerContext, Observation, Policy, Psaw, Result, StepPlan,
};

const NAME: &str = "cpe";

/// CPE, PrHS's three selectors together (section IV-D): steps share index sets (CIS) of tokens in
/// their layer's window (PSAW). In prefill the window holds, too, and deep layers freeze early
/// tokens (ETF).
///
/// The window is known before the step: what it hides is neither scored nor read.
#[derive(Debug, Clone)]
pub struct Cpe {
    cis: Cis,
    psaw: Psaw,
    etf: Etf,
}

impl Cpe {
    /// # Errors
    /// [`crate::PolicyError::InvalidConfig`], [`crate::PolicyError::ProtectedOverBudget`].
    pub fn new(cis: CisOptions, psaw: Psaw, etf: Etf) -> Result<Self> {
        let cis = Cis::named(NAME, cis, false)?;
        psaw.validate(NAME)?;
        etf.validate(NAME)?;
        if psaw.free {
            let reason =
                "`free` of `psaw` is true, expected false: sets name tokens by their slots";
            return Err(invalid(NAME, reason.into()));
        }
        Ok(Self { cis, psaw, etf })
    }

    /// The policy from its configuration.
    pub(crate) fn from_config(config: &mut Config) -> Result<Arc<dyn Policy>> {
        let mut part = |name: &str| config.take(name).unwrap_or(serde_json::json!({}));
        let (psaw, etf) = (part("psaw"), part("etf"));
        let wrong = |error: serde_json::Error| invalid(NAME, error.to_string());
        let psaw: Psaw = serde_json::from_value(psaw).map_err(wrong)?;
        let etf: Etf = serde_json::from_value(etf).map_err(wrong)?;
        config.set_defaults_by("budget", CisOptions::new);
        let cis = config.take_beside::<CisOptions>(NAME, "`psaw` and `etf` with their own")?;
        Ok(Arc::new(Self::new(cis, psaw, etf)?))
    }
}

impl Policy for Cpe {
    forward!(cis: budget, needs, select, restore);
    forward!(psaw: visible_window);
    forward!(etf: frozen_tokens);

    fn name(&self) -> &'static str {
        NAME
    }

    fn config(&self) -> serde_json::Value {
        let mut config = self.cis.config();
        config["psaw"] = serde_json::json!(self.psaw);
        config["etf"] = serde_json::json!(self.etf);
        config
    }

    fn least_kept(&self, tokens: usize) -> usize {
        self.cis.least_kept(tokens)
    }

    fn warnings(&self, layers: usize) -> Vec<String> {
        [self.psaw.warnings(layers), self.etf.warnings(layers)].concat()
    }

    fn init_cache(
        &self,
        cache: &mut LayerCache,
        observation: &Observation<'_>,
        selection: &Selection,
    ) -> Result<()> {
        let share = self.psaw.share(observation.layer);
        let tokens = observation.prompt_tokens;
        let options = self.cis.options();
        let sinks = options.parts(NAME, options.budget.behind(tokens))?.sinks;
        let whole = |kept: &Vec<u32>| in_sight_whole(kept, tokens, share, sinks);
        if !share.is_zero() && !selection.kept()?.iter().all(whole) {
            let layer = observation.layer.index;
            let reason = format!(
                "its windows count tokens, and layer {layer} keeps {} of {tokens} for a head, not \
                 all that is in sight: expected a prompt kept whole, or `phi` of 1 in `psaw`",
                selection.lengths().iter().min().copied().unwrap_or_default()
            );
            return Err(invalid(NAME, reason));
        }
        self.cis.init_cache(cache, observation, selection)
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { changes_prefill: true, reads_other_layers: true, ..self.cis.capabilities() }
    }

    fn plan(&self, layer: LayerContext, cache: &LayerCache) -> Result<StepPlan<'_>> {
        let hidden = self.psaw.share(layer);
        Ok(self.cis.plan_within(hidden, cache))
    }
}

/// Whether `kept` has all of `tokens` tokens, except a gap behind the sinks that the next step's
/// window hides: a token's slot then follows from the number of missing tokens.
fn in_sight_whole(kept: &[u32], tokens: usize, hidden: Share, sinks: usize) -> bool {
    let gap = kept.iter().zip(0..).take_while(|(token, at)| **token == *at).count();
    let freed = tokens - kept.len().min(tokens);
    let rest = kept[gap..].iter().zip(gap + freed..);
    let ends = gap >= sinks && gap + freed < hidden.of(tokens + 1);
    freed == 0 || ends && rest.into_iter().all(|(token, at)| *token as usize == at)
}
