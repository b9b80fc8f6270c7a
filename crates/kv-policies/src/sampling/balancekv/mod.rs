//! BalanceKV (<https://arxiv.org/abs/2502.07861>) on prompts: blocks of tokens are halved so that
//! both halves attend alike.
//!
//! * [`walk`]: the halving itself; [`official`]: the walk as in the authors' code; [`compressed`]:
//!   the tokens that a walk leaves; [`fitted`]: weights of these that are ours; [`gram`]: the walk's
//!   kernel as matrices.
//! * [`anchors`], [`augmented`]: `balancekv-augmented`, whose tokens that stand apart stay exact.
//! * [`merge_reduce`], [`stream`]: `balancekv-stream`, which works in levels and while decoding.

mod anchors;
mod augmented;
mod compressed;
mod fitted;
mod gram;
mod merge_reduce;
mod official;
mod stream;
mod walk;

use std::f32::consts::LN_2;
use std::ops::Range;
use std::sync::Arc;

use burn::tensor::Tensor;
use kv_core::{Budget, CacheOptions, LayerCache, Selection};
use rand::Rng;
use serde::{Deserialize, Serialize};

use crate::policy::check::Check;
use crate::policy::config::{Config, config_of, invalid};
use crate::policy::fill;
use crate::policy::generator::generator;
use crate::sampling::exact_ends::exact_ends;
use crate::{Capabilities, Observation, OwnedObservation, Plan, Policy, Result, SlotWeights};

pub use anchors::AnchorRule;
use anchors::{Candidates, by_block_mean, without};
use augmented::NAME as AUGMENTED;
use compressed::{Compressed, Kept};
pub use fitted::SurvivorWeights;
pub use official::{OfficialList, OfficialWalk};
pub use stream::BalanceKvStream;
pub use walk::Centring;
use walk::{Form, Walk};

const NAME: &str = "balancekv";
/// The authors' `γ`.
const GAMMA: f64 = 4.0;
/// The authors' offset of values' products.
const VALUE_OFFSET: f32 = 0.025;

/// BalanceKV (<https://arxiv.org/abs/2502.07861>) in its block-parallel form (appendix B): of the
/// tokens between sinks and recents, a self-balancing walk ([`kv_kernels::balance`], Algorithm 2)
/// halves every block of 256 so that both halves attend alike, for every query; survivors carry
/// twice the weight. Rounds follow one another until the budget is met. Prefill only, as in the
/// paper's end-to-end experiments.
///
/// Any budget is met exactly: all `n` tokens take `T` rounds, as many as leave `n / 2^T` at or
/// above the budget. The oldest tokens that are left take one round more, the paper's form for low
/// compression (section 4.5).
///
/// Where the paper leaves it open: each half has exactly half of its block (when a class is full,
/// the rest joins the other), keys are centred by the mean of all tokens that are compressed, and
/// the first and last 256 tokens that the paper keeps exactly are cut to a quarter of the budget
/// each.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BalanceKv {
    /// Slots per key-value head, exact ones included.
    pub budget: Budget,
    /// First tokens kept exactly; the paper's 256 by default, a quarter of the budget at most.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sinks: Option<usize>,
    /// Last tokens kept exactly; the paper's 256 by default, a quarter of the budget at most.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub recents: Option<usize>,
    /// Tokens that are balanced against each other: even, 2 to 256.
    pub block: usize,
    /// Adjacent tokens that get one sign, so that they stay or go together; 1 in the paper. A
    /// divisor of half a block. See [`kv_kernels::balance`] for blocks that are no multiple of it.
    pub span: usize,
    /// The practical walk: probabilities `1/2 − γ Σ`. The authors' code has `γ = 4`, which decides
    /// nearly every token by the sum's sign.
    pub gamma: f64,
    /// `δ`, the probability that Algorithm 2 fails. Where given, probabilities are Algorithm 2's,
    /// `1/2 − Σ / (2 c R²)`, with `c = 30 ln(n / δ)` for blocks of `n` and `R` from the tokens'
    /// norms. A failure is logged, and the token takes the likelier sign. At the norms of real
    /// keys, probabilities are within 1e-6 of 1/2.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub delta: Option<f64>,
    /// Added to the values' products, so that denominators are balanced too: 0.025 in the authors'
    /// code, nothing in the paper.
    pub value_offset: f32,
    /// What keys are centred by.
    pub centring: Centring,
    /// The weights of the tokens that the walk leaves.
    pub weights: SurvivorWeights,
    /// Share of the slots between the ends for tokens that are kept exactly, as their keys stand
    /// apart: the augmented form for retrieval (section 4.3, "a small set of tokens whose key
    /// embeddings are strongly anti-correlated with the rest"; the paper names no number).
    pub anchors: f64,
    /// Which tokens stand apart.
    pub anchors_by: AnchorRule,
    /// Adjacent tokens that are anchors together, from the first token between the ends on; 1 keeps
    /// single tokens. [`AnchorRule::BlockMean`] has spans of its own.
    pub anchor_span: usize,
    /// The authors' code to the letter instead, see [`OfficialWalk`]: it takes whole rounds only,
    /// so that less than the budget may be kept.
    pub official: bool,
}

impl BalanceKv {
    /// The paper's defaults.
    pub fn new(budget: Budget) -> Self {
        Self {
            budget,
            sinks: None,
            recents: None,
            block: 256,
            span: 1,
            gamma: GAMMA,
            delta: None,
            value_offset: VALUE_OFFSET,
            centring: Centring::default(),
            weights: SurvivorWeights::default(),
            anchors: 0.0,
            anchors_by: AnchorRule::default(),
            anchor_span: 1,
            official: false,
        }
    }

    /// # Errors
    /// [`crate::PolicyError::InvalidConfig`].
    pub fn validate(&self) -> Result<()> {
        self.validate_as(self.name())
    }

    /// Validates what a user has written under the name `policy`, which errors give.
    fn validate_as(&self, policy: &'static str) -> Result<()> {
        self.budget.validate()?;
        let invalid = |reason| invalid(policy, reason);
        Check(policy).share("anchors", self.anchors)?;
        Check(policy).positive("anchor_span", self.anchor_span)?;
        let others = [
            ("anchors", self.anchors > 0.0),
            ("delta", self.delta.is_some()),
            ("span", self.span != 1),
            ("weights", self.weights != SurvivorWeights::default()),
        ];
        if self.official
            && let Some((other, _)) = others.iter().find(|(_, given)| *given)
        {
            return Err(invalid(format!("`official` does not go with `{other}`")));
        }
        if self.anchors_by == AnchorRule::BlockMean && self.anchor_span != 1 {
            return Err(invalid("`anchor_span` does not go with `block-mean`".into()));
        }
        self.walk().validate().map_err(invalid)
    }

    fn walk(&self) -> Walk {
        let Self { block, span, gamma, delta, value_offset, centring, weights, .. } = *self;
        let form = delta.map_or(Form::Practical { gamma }, |delta| Form::Exact { delta });
        Walk { block, span, form, value_offset, centring, weights }
    }

    /// The policy from its configuration.
    pub(crate) fn from_config(config: &mut Config) -> Result<Arc<dyn Policy>> {
        let policy = config.take_budgeted(NAME, Self::new)?;
        policy.validate_as(NAME)?;
        let augments = policy.anchors > 0.0 || policy.anchor_span != 1;
        if augments || policy.anchors_by != AnchorRule::default() {
            let reason = "`anchors`, `anchors_by` and `anchor_span` are of `balancekv-augmented`";
            return Err(invalid(NAME, reason.into()));
        }
        Ok(Arc::new(policy))
    }
}

impl Policy for BalanceKv {
    fn name(&self) -> &'static str {
        if self.anchors > 0.0 { AUGMENTED } else { NAME }
    }

    fn config(&self) -> serde_json::Value {
        config_of(self.name(), self)
    }

    fn budget(&self) -> Option<Budget> {
        Some(self.budget)
    }

    fn select(&self, observation: &Observation<'_>) -> Result<Plan> {
        self.plan(observation, None)
    }

    /// The authors' anchors come from one layer, and all layers behind it keep them.
    fn capabilities(&self) -> Capabilities {
        let by_blocks = self.anchors > 0.0 && self.anchors_by == AnchorRule::BlockMean;
        Capabilities {
            needs_all_layers: by_blocks,
            compares_heads: by_blocks,
            draws: true,
            weights: SlotWeights { weighted: true, numerators: self.official },
            ..Capabilities::default()
        }
    }

    fn prefill_layers(
        &self,
        layers: &[OwnedObservation],
        new_tokens: usize,
        options: CacheOptions,
    ) -> Result<Vec<LayerCache>> {
        let shared = match layers.get(anchors::LAYER) {
            Some(layer) if self.capabilities().needs_all_layers => {
                self.block_anchors(&layer.view())?
            }
            _ => None,
        };
        let plain = BalanceKv { anchors: 0.0, ..self.clone() };
        let each = layers.iter().enumerate().map(|(index, layer)| {
            let observation = layer.view();
            let plan = match index < anchors::LAYER {
                true => plain.plan(&observation, None)?,
                false => self.plan(&observation, shared.as_deref())?,
            };
            fill(self, plan, &observation, new_tokens, options.clone())
        });
        each.collect()
    }
}

/// A prompt's tokens, as a budget divides them.
struct Parts {
    /// First and last tokens that are kept exactly.
    ends: [usize; 2],
    /// The tokens between them.
    middle: Range<usize>,
    /// The number of tokens between them that are kept.
    target: usize,
    /// The most of these that may be anchors.
    anchors: usize,
}

impl BalanceKv {
    /// The parts of a prompt; `None` where all of it stays.
    fn parts(&self, tokens: usize) -> Result<Option<Parts>> {
        let slots = self.budget.resolve(tokens);
        if slots >= tokens {
            return Ok(None);
        }
        let ends = exact_ends(self.name(), [self.sinks, self.recents], self.budget, slots)?;
        let [sinks, recents] = ends;
        let target = slots - sinks - recents;
        let anchors = (target as f64 * self.anchors) as usize;
        Ok(Some(Parts { ends, middle: sinks..tokens - recents, target, anchors }))
    }

    /// A layer's anchors by the authors' rule, of each sequence; `None` where all of the prompt
    /// stays.
    fn block_anchors(&self, observation: &Observation<'_>) -> Result<Option<Vec<Selection>>> {
        let parts = self.parts(observation.tokens())?;
        let of =
            |parts: Parts| by_block_mean(observation, &parts.middle, self.block, parts.anchors);
        parts.map(of).transpose()
    }

    /// A layer's own anchors, at most `count` a head, counted from the first of `middle`.
    fn own_anchors(
        &self,
        observation: &Observation<'_>,
        middle: &Range<usize>,
        count: usize,
    ) -> Result<Selection> {
        let [batch, kv_heads, ..] = observation.dims();
        let none = || Ok(Selection::new(vec![Vec::new(); batch * kv_heads])?);
        if count < self.anchor_span {
            return none();
        }
        let candidates = Candidates::of(observation, middle);
        let scores = match self.anchors_by {
            AnchorRule::Leverage => {
                let centred = self.centring == Centring::List;
                candidates.leverage(self.block, centred, self.value_offset)
            }
            AnchorRule::KeyDiff => candidates.key_diff(observation)?,
            // These are one layer's, and are shared.
            AnchorRule::BlockMean => return none(),
        };
        Candidates::highest(scores, count, self.anchor_span)
    }

    /// The plan of a prompt. `shared` has another layer's anchors by the authors' rule; else the
    /// layer chooses its own.
    fn plan(&self, observation: &Observation<'_>, shared: Option<&[Selection]>) -> Result<Plan> {
        let [batch, kv_heads, tokens, _] = observation.dims();
        let Some(Parts { ends, middle, target, anchors }) = self.parts(tokens)? else {
            return Ok(Plan::whole(observation));
        };
        if self.official {
            return self.official(observation, middle, target)?.plan(ends, tokens);
        }
        if !self.capabilities().needs_all_layers {
            let anchors = self.own_anchors(observation, &middle, anchors)?;
            return self.beside(observation, &middle, target, &anchors)?.plan(ends, tokens);
        }
        let own;
        let shared = match shared {
            Some(shared) => shared,
            None => {
                own = by_block_mean(observation, &middle, self.block, anchors)?;
                &own
            }
        };
        // Sequences may have different numbers of anchors, so that each is walked by itself.
        let mut kept = Vec::with_capacity(batch * kv_heads);
        for (row, anchors) in shared.iter().enumerate() {
            let part = |tensor: &Tensor<4>| tensor.clone().narrow(0, row, 1);
            let (keys, values) = (part(observation.keys), part(observation.values));
            let positions = observation.positions.clone().narrow(0, row, 1);
            let seeds = observation.seeds.get(row..row + 1).unwrap_or_default();
            let own = Observation {
                keys: &keys,
                values: &values,
                positions: &positions,
                seeds,
                ..observation.clone()
            };
            kept.extend(self.beside(&own, &middle, target, anchors)?.kept);
        }
        Compressed { kept, separate: false }.plan(ends, tokens)
    }

    /// Anchors, equally many a head, and the tokens that the walk leaves of the rest of `middle`:
    /// `target` tokens together.
    fn beside(
        &self,
        observation: &Observation<'_>,
        middle: &Range<usize>,
        target: usize,
        anchors: &Selection,
    ) -> Result<Compressed> {
        let lists = without(anchors, middle, &observation.keys.device())?;
        let own = target - anchors.total() / anchors.head_ranges().max(1);
        let mut compressed = self.walk().compress(observation, lists, own)?;
        for (kept, anchors) in compressed.kept.iter_mut().zip(anchors.kept()?) {
            let tokens = anchors.iter().map(|at| middle.start as u32 + at);
            kept.extend(tokens.map(Kept::exact));
        }
        Ok(compressed)
    }
}

impl BalanceKv {
    /// Whole rounds of the authors' walk.
    fn official(
        &self,
        observation: &Observation<'_>,
        middle: Range<usize>,
        target: usize,
    ) -> Result<Compressed> {
        let [batch, kv_heads, _, head_dim] = observation.dims();
        let mut rounds = 0;
        while middle.len() >> rounds > target {
            rounds += 1;
        }
        let part = |tensor: &Tensor<4>| {
            let part = tensor.clone().narrow(2, middle.start, middle.len());
            part.reshape([batch * kv_heads, middle.len(), head_dim])
        };
        let walk = OfficialWalk {
            block: self.block,
            rounds,
            gamma: self.gamma,
            temperature: 1.0,
            beta: 0.0,
            value_offset: self.value_offset,
        };
        let (keys, values) = (part(observation.keys), part(observation.values));
        let mut draws: Vec<_> = (0..batch * kv_heads)
            .map(|range| generator(observation, range / kv_heads, range % kv_heads))
            .collect();
        let lists = walk.run(&keys, Some(&values), |_, range, _| draws[range].random())?;
        let log_weight = rounds as f32 * LN_2;
        let kept = lists.into_iter().map(|list| {
            let tokens = list.kept.into_iter().zip(list.weights);
            tokens
                .map(|(at, numerator)| Kept {
                    token: middle.start as u32 + at,
                    log_weight,
                    numerator,
                })
                .collect()
        });
        Ok(Compressed { kept: kept.collect(), separate: true })
    }
}
