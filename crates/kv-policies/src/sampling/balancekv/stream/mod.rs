//! BalanceKV as a stream (Algorithms 1 and 4): tokens wait in batches and move up through levels,
//! which are halved when they are full.
//!
//! * [`sizes`]: the sizes of batches and levels.
//! * [`waiting`]: a decode step's part; [`take`]: how a batch enters the levels.
//! * [`head`]: the state that a cache keeps of each head.

mod head;
mod sizes;
mod take;
mod waiting;

use std::sync::Arc;

use burn::tensor::{DType, Tensor};
use kv_core::{Budget, LayerCache, Room, Selection, read_f32, read_i32};
use rand::Rng;
use serde::{Deserialize, Serialize};

use super::merge_reduce::{Instances, Pool, Token};
use super::{GAMMA, VALUE_OFFSET};
use crate::policy::check::Check;
use crate::policy::config::{Config, config_of, invalid};
use crate::policy::generator::generator;
use crate::sampling::exact_ends::exact_ends;
use crate::{
    Capabilities, LayerContext, Observation, Plan, Policy, Result, SlotWeights, StepPlan,
    StepUpdate,
};
use head::Head;
use sizes::Sizes;
use take::weights;

const NAME: &str = "balancekv-stream";
/// The stream's length for which `batch` is chosen under a budget in slots, in tokens a slot.
const NOMINAL: usize = 16;

/// BalanceKV (<https://arxiv.org/abs/2502.07861>) as a stream: MergeAndReduce (Algorithm 4), whose
/// levels hold tokens with weights `2^l`. By default one instance serves numerator and denominator
/// ([`Self::joint`]). Algorithm 1 has one for the denominator and one for each power of two of the
/// values' norms; a slot is then kept while any of them holds its token, and attention takes
/// numerators and denominator by their own weights. It runs in prefill and while decoding. The
/// tokens that it keeps do not depend on where the prompt ends (for a budget that is a share of the
/// prompt, given `batch`, `sinks` and `recents`).
///
/// Tokens are taken in batches of `t`, which wait behind the last `recents`; a full level is halved
/// exactly, in blocks of 256 where it is longer. Steps that take a batch are decided by the host,
/// which also gives heads the slots that they need then; the steps in between can be recorded.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BalanceKvStream {
    /// Slots per key-value head, from which `batch` follows where it is not given.
    pub budget: Budget,
    /// `t`: even, at least 2. By default the largest whose levels fit the budget if all values are
    /// in one bucket: of the prompt where the budget is a share, else of `max_tokens`, or 16 times
    /// the budget. Each doubling of the stream adds up to half a batch an instance.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub batch: Option<usize>,
    /// First tokens kept exactly; 256 by default, a quarter of the budget at most.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sinks: Option<usize>,
    /// Last tokens kept exactly; 256 by default, a quarter of the budget at most.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub recents: Option<usize>,
    /// The stream's length `n`, which fixes the levels, `T = log₂(n / t)`: the last one grows
    /// without bound where the stream is longer. By default levels grow with the stream.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_tokens: Option<usize>,
    /// One instance for numerator and denominator, whose walk adds `value_offset` to the values'
    /// products: half as many slots, and errors of numerator and denominator that cancel. `false`
    /// is Algorithm 1 with its many instances, which needs keys and queries of small norms: at the
    /// norms of real keys its outputs are off by several times their own norm.
    pub joint: bool,
    /// See `joint`.
    pub value_offset: f32,
    /// `γ` of the practical walk.
    pub gamma: f64,
    /// Algorithm 2's probability of failure, for its own walk; needs `norm_bound`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub delta: Option<f64>,
    /// `r`, which bounds the norms of queries and keys. With it, buckets of small values are
    /// erased.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub norm_bound: Option<f64>,
    /// `ε`; the erased buckets may take half of it.
    pub epsilon: f64,
}

impl BalanceKvStream {
    /// The defaults.
    pub fn new(budget: Budget) -> Self {
        Self {
            budget,
            batch: None,
            sinks: None,
            recents: None,
            max_tokens: None,
            // Ours: Algorithm 1 needs keys and queries of small norms.
            joint: true,
            value_offset: VALUE_OFFSET,
            gamma: GAMMA,
            delta: None,
            norm_bound: None,
            epsilon: 0.1,
        }
    }

    /// # Errors
    /// [`crate::PolicyError::InvalidConfig`].
    pub fn validate(&self) -> Result<()> {
        self.budget.validate()?;
        let check = Check(NAME);
        let above_0 = |name, number: f64| {
            check.that(name, number, number > 0.0 && number.is_finite(), "above 0")
        };
        if let Some(batch) = self.batch {
            let holds = batch >= 2 && batch % 2 == 0;
            check.that("batch", batch, holds, "an even number from 2 on")?;
        }
        above_0("gamma", self.gamma)?;
        if let Some(delta) = self.delta {
            check.that("delta", delta, delta > 0.0 && delta < 1.0, "between 0 and 1")?;
            if self.joint {
                let reason =
                    "`delta` needs `joint` of false: its bounds are of the paper's instances";
                return Err(invalid(NAME, reason.into()));
            }
        }
        let offset = self.value_offset;
        check.that("value_offset", offset, offset >= 0.0 && offset.is_finite(), "at least 0")?;
        if self.delta.is_some() && self.norm_bound.is_none() {
            return Err(invalid(NAME, "`delta` needs `norm_bound`, which is missing".into()));
        }
        check.positive("max_tokens", self.max_tokens.unwrap_or(1))?;
        self.norm_bound.map_or(Ok(()), |bound| above_0("norm_bound", bound))?;
        above_0("epsilon", self.epsilon)
    }

    fn sizes(&self, tokens: usize) -> Result<Sizes> {
        // The sizes under a budget in slots must not depend on the prompt.
        let (budget, tokens) = match self.budget {
            Budget::Tokens(budget) => {
                (budget, self.max_tokens.unwrap_or(budget.saturating_mul(NOMINAL)))
            }
            Budget::Ratio(_) => (self.budget.resolve(tokens), tokens),
        };
        let [sinks, recents] = exact_ends(NAME, [self.sinks, self.recents], self.budget, budget)?;
        let instances = if self.joint { 1 } else { 2 };
        let sizes = |half: usize| Sizes { sinks, recents, batch: 2 * half, instances };
        if let Some(batch) = self.batch {
            return Ok(sizes(batch / 2));
        }
        let halves = (2..=budget / 2).rev();
        let half = halves.map(sizes).find(|sizes| sizes.slots(tokens) <= budget);
        Ok(half.unwrap_or(sizes(1)))
    }

    /// The policy from its configuration.
    pub(crate) fn from_config(config: &mut Config) -> Result<Arc<dyn Policy>> {
        let policy = config.take_budgeted(NAME, Self::new)?;
        policy.validate()?;
        Ok(Arc::new(policy))
    }
}

impl Policy for BalanceKvStream {
    fn name(&self) -> &'static str {
        NAME
    }

    fn config(&self) -> serde_json::Value {
        config_of(NAME, self)
    }

    fn budget(&self) -> Option<Budget> {
        Some(self.budget)
    }

    /// Batches are halved as a whole, so that fewer slots than the budget may be left.
    fn least_kept(&self, _tokens: usize) -> usize {
        0
    }

    fn select(&self, observation: &Observation<'_>) -> Result<Plan> {
        let [batch, kv_heads, tokens, head_dim] = observation.dims();
        let total_kv_heads = batch * kv_heads;
        let sizes = self.sizes(tokens)?;
        let taken = sizes.taken(tokens);
        let norms = read_f32("norms", norms(observation.values.clone()))?;
        let positions = read_i32("positions", observation.positions.clone())?;
        let rows = |tensor: &Tensor<4>| tensor.clone().reshape([total_kv_heads * tokens, head_dim]);
        let (keys, values) = (rows(observation.keys), rows(observation.values));
        let pool = Pool { keys: &keys, values: &values };
        let new: Vec<Vec<(Token, f32)>> = (0..total_kv_heads)
            .map(|range| {
                let own = sizes.sinks..taken;
                own.map(|at| {
                    let slot = (range * tokens + at) as u32;
                    let position = positions[range / kv_heads * tokens + at] as u32;
                    (Token { slot, position }, norms[range * tokens + at])
                })
                .collect()
            })
            .collect();
        let seeds = seeds(observation);
        let batch = sizes.batch;
        let instances =
            seeds.into_iter().map(|seed| Instances { batch, seed, ..Default::default() });
        let mut instances: Vec<Instances> = instances.collect();
        let mut longest = vec![0.0; total_kv_heads];
        self.take(&pool, &mut instances, &new, &mut longest)?;
        let mut kept = Vec::with_capacity(total_kv_heads);
        let (mut log_weights, mut numerators) = (Vec::new(), Vec::new());
        for (range, instances) in instances.iter().enumerate() {
            let exact = |token: usize| (token as u32, (1.0, 1.0));
            let own = weights(instances, self.joint).into_iter();
            let own = own.map(|(slot, weights)| (slot - (range * tokens) as u32, weights));
            let all: Vec<(u32, (f32, f32))> = (0..sizes.sinks.min(tokens))
                .map(exact)
                .chain(own)
                .chain((taken.min(tokens)..tokens).map(exact))
                .collect();
            log_weights.extend(all.iter().map(|(_, (_, denominator))| denominator.ln()));
            numerators.extend(all.iter().map(|(_, (numerator, _))| *numerator));
            kept.push(all.into_iter().map(|(token, _)| token).collect());
        }
        Ok(Plan {
            selection: Selection::new(kept)?,
            log_weights: Some(log_weights),
            numerators: (!self.joint).then_some(numerators),
        })
    }

    fn init_cache(
        &self,
        cache: &mut LayerCache,
        observation: &Observation<'_>,
        selection: &Selection,
    ) -> Result<()> {
        let [_, kv_heads, tokens, _] = observation.dims();
        let sizes = self.sizes(tokens)?;
        let taken = sizes.taken(tokens);
        let norms = read_f32("norms", norms(observation.values.clone()))?;
        let positions = read_i32("positions", observation.positions.clone())?;
        // Where tokens that are still to come will stand.
        let position = |row: usize, at: usize| match tokens.checked_sub(1) {
            Some(last) if at > last => positions[row * tokens + last] as usize + at - last,
            Some(_) => positions[row * tokens + at] as usize,
            None => at,
        };
        let heads = seeds(observation).into_iter().zip(norms.chunks(tokens.max(1))).enumerate();
        let heads = heads.map(|(range, (seed, norms))| {
            let row = range / kv_heads;
            let longest = norms.iter().take(taken).skip(sizes.sinks).copied();
            Head {
                sizes,
                stream: position(row, sizes.sinks),
                waiting: position(row, taken),
                longest: longest.fold(0.0, f32::max),
                seed,
            }
        });
        let heads: Vec<Head> = heads.collect();
        Head::store(&heads, cache);
        let waiting = tokens.saturating_sub(taken);
        let free = sizes.recents + sizes.batch - waiting.min(sizes.recents + sizes.batch);
        cache.set_limits(selection.lengths().iter().map(|kept| kept + free).collect())?;
        Ok(())
    }

    /// Slots until the next batch is taken.
    fn room(&self, observation: &Observation<'_>, new_tokens: usize) -> Result<Room> {
        let Sizes { recents, batch, .. } = self.sizes(observation.tokens())?;
        Ok(Room::Extra(new_tokens.min(recents + batch)))
    }

    fn restore(&self, cache: &mut LayerCache) -> Result<()> {
        Head::restore(cache);
        Ok(())
    }

    fn capabilities(&self) -> Capabilities {
        let weights = SlotWeights { weighted: true, numerators: !self.joint };
        Capabilities { changes_decode: true, draws: true, weights, ..Capabilities::default() }
    }

    /// Steps are recordable but for the ones that take a batch.
    fn plan(&self, _layer: LayerContext, cache: &LayerCache) -> Result<StepPlan<'_>> {
        Ok(StepPlan {
            update: Some(StepUpdate::Own(Box::new(|cache, _, _| {
                if fills(cache, 0) { self.take_waiting(cache) } else { Ok(()) }
            }))),
            recordable: !fills(cache, 1),
            ..StepPlan::append()
        })
    }
}

/// Whether some head has a whole batch that waits once it holds `more` slots more.
fn fills(cache: &LayerCache, more: usize) -> bool {
    let lengths = cache.layout().lengths().iter();
    let limits = cache.limits().unwrap_or_default();
    lengths.zip(limits).any(|(length, limit)| length + more >= *limit)
}

/// `‖v‖₂` of values `[.., D]`, f32.
fn norms(values: Tensor<4>) -> Tensor<3> {
    values.cast(DType::F32).square().sum_dim(3).sqrt().squeeze_dim(3)
}

/// A seed of 48 bits for every head range.
fn seeds(observation: &Observation<'_>) -> Vec<u64> {
    let [batch, kv_heads, ..] = observation.dims();
    let ranges = (0..batch).flat_map(|row| (0..kv_heads).map(move |head| (row, head)));
    ranges.map(|(row, head)| generator(observation, row, head).random::<u64>() >> 16).collect()
}
