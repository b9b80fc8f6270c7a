//! DuoAttention (<https://arxiv.org/abs/2410.10819>): some heads keep everything, the others first
//! and recent tokens. [`gates`] tells the heads apart; [`Policy::plan`] is the step, whose slots
//! [`crate::WriteSlots`] writes.

mod gates;

use std::sync::Arc;

use kv_core::{Budget, CacheOptions, LayerCache, Selection, counted};
use serde::{Deserialize, Serialize};

use crate::policy::check::Check;
use crate::policy::config::{Config, config_of, invalid};
use crate::policy::state_tensors::{int_numbers, int_state};
use crate::policy::write_slots::WriteSlots;
use crate::{
    Capabilities, HeadPart, LayerContext, Observation, Plan, Policy, Result, StepPlan, StepUpdate,
    TokenSlot,
};

pub use gates::Gates;

const NAME: &str = "duo-attention";
/// State of each head's first slot that new tokens may overwrite, `[B, Hkv, 1]`.
const FIRST: &str = "first";
/// Slots of a head that keeps everything.
const ENDLESS: usize = i32::MAX as usize;

/// DuoAttention (Xiao et al., 2024, section 2): retrieval heads keep everything, streaming heads
/// the first tokens and the most recent ones, which the incoming token joins before the attention.
/// Trained gates, one for each key-value head, say which heads are retrieval heads.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DuoAttention {
    /// The gates.
    pub alpha: Gates,
    /// Share of all heads that stream: the heads of the lowest gates.
    pub sparsity: f64,
    /// First tokens that streaming heads keep.
    pub sinks: usize,
    /// Most recent tokens that streaming heads keep.
    pub recents: usize,
    /// Mean slots per head behind the prompt; as many heads stream as this mean needs, whatever
    /// `sparsity` is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub budget: Option<Budget>,
}

/// The tokens that heads keep of a prompt.
#[derive(Debug, Clone, Copy)]
struct Split {
    /// Heads of all layers that stream.
    streaming: usize,
    sinks: usize,
    recents: usize,
}

impl DuoAttention {
    /// The window that the authors deploy (they train with 128 sinks), for half of the heads.
    pub fn new(alpha: Gates) -> Self {
        Self { alpha, sparsity: 0.5, sinks: 64, recents: 256, budget: None }
    }

    /// The policy with its gates read from their file.
    ///
    /// # Errors
    /// [`crate::PolicyError::InvalidConfig`].
    pub fn validated(self) -> Result<Self> {
        if let Some(budget) = self.budget {
            budget.validate()?;
        }
        Check(NAME).share("sparsity", self.sparsity)?;
        Check(NAME).positive("recents", self.recents)?;
        Ok(Self { alpha: self.alpha.read(NAME)?, ..self })
    }

    fn split(&self, observation: &Observation<'_>) -> Split {
        let heads = self.alpha.lists().iter().map(Vec::len).sum::<usize>();
        let Self { sinks, recents, .. } = *self;
        let Some(budget) = self.budget else {
            let streaming = (heads as f64 * self.sparsity).round() as usize;
            return Split { streaming, sinks, recents };
        };
        let (budget, tokens) = (budget.behind(observation.tokens()), observation.tokens());
        if budget >= tokens {
            return Split { streaming: 0, sinks, recents };
        }
        // A budget below the usual window leaves every head a smaller one.
        let (sinks, recents) = match sinks.saturating_add(recents) <= budget {
            true => (sinks, recents),
            false => (sinks.min(budget / 5), budget - sinks.min(budget / 5)),
        };
        let streaming = (heads * (tokens - budget)).div_ceil(tokens - sinks - recents);
        Split { streaming: streaming.min(heads), sinks, recents }
    }

    /// Which of a layer's heads stream.
    fn streams(&self, observation: &Observation<'_>, split: Split) -> Result<Vec<bool>> {
        let [_, kv_heads, ..] = observation.dims();
        let HeadPart { first, all } = observation.heads;
        let LayerContext { index, count } = observation.layer;
        let lists = self.alpha.lists();
        let own = lists.get(index).map_or(0, Vec::len);
        if lists.len() != count || own != all {
            let reason = format!(
                "`alpha` has {}, layer {index} has {}, expected {count} layers of {all}",
                counted(lists.len(), "layer"),
                counted(own, "head")
            );
            return Err(invalid(NAME, reason));
        }
        let streams = self.alpha.lowest(split.streaming).swap_remove(index);
        Ok(streams[first..first + kv_heads].to_vec())
    }

    /// The policy from its configuration.
    pub(crate) fn from_config(config: &mut Config) -> Result<Arc<dyn Policy>> {
        config.set_defaults_by("alpha", Self::new);
        let policy: Self = config.take_all(NAME)?;
        Ok(Arc::new(policy.validated()?))
    }
}

impl Policy for DuoAttention {
    fn name(&self) -> &'static str {
        NAME
    }

    fn config(&self) -> serde_json::Value {
        config_of(NAME, self)
    }

    fn budget(&self) -> Option<Budget> {
        self.budget
    }

    /// Whole heads are kept or not, so that fewer slots than the budget may be.
    fn least_kept(&self, _tokens: usize) -> usize {
        0
    }

    fn select(&self, observation: &Observation<'_>) -> Result<Plan> {
        let [batch, _, tokens, _] = observation.dims();
        let split = self.split(observation);
        let Split { sinks, recents, .. } = split;
        let kept = self.streams(observation, split)?.into_iter().map(|streams| {
            let tokens = tokens as u32;
            match streams && sinks.saturating_add(recents) < tokens as usize {
                true => (0..sinks as u32).chain(tokens - recents as u32..tokens).collect(),
                false => (0..tokens).collect::<Vec<u32>>(),
            }
        });
        let kept: Vec<Vec<u32>> = kept.collect();
        Ok(Selection::new(vec![kept; batch].concat())?.into())
    }

    fn init_cache(
        &self,
        cache: &mut LayerCache,
        observation: &Observation<'_>,
        selection: &Selection,
    ) -> Result<()> {
        let split = self.split(observation);
        let streams = self.streams(observation, split)?;
        let heads = selection.lengths().iter().zip(streams.iter().cycle());
        let window = split.sinks.saturating_add(split.recents);
        let limits =
            heads.map(|(&kept, &streams)| if streams { window.max(kept) } else { ENDLESS });
        cache.set_limits(limits.collect())?;
        WriteSlots::enable(cache)?;
        let (batch, kv_heads) = (cache.layout().batch(), cache.layout().kv_heads());
        let first = vec![split.sinks; batch * kv_heads];
        let first = int_numbers(first, [batch, kv_heads, 1], &cache.options().device);
        cache.set_int_state(FIRST, first);
        advance(cache)
    }

    fn prefill(
        &self,
        observation: &Observation<'_>,
        new_tokens: usize,
        options: CacheOptions,
    ) -> Result<LayerCache> {
        let selection = self.select(observation)?.selection;
        let split = self.split(observation);
        let streams = self.streams(observation, split)?;
        let window = split.sinks.saturating_add(split.recents);
        // Streaming heads never hold more than their window.
        let heads = selection.lengths().iter().zip(streams.iter().cycle());
        let capacities = heads.map(|(&kept, &streams)| {
            let all = kept + new_tokens;
            if streams { all.min(window.max(kept)) } else { all }
        });
        let mut cache = LayerCache::from_prefill_within(
            observation.keys,
            observation.values,
            observation.positions,
            &selection,
            capacities.collect(),
            options,
        )?;
        self.init_cache(&mut cache, observation, &selection)?;
        Ok(cache)
    }

    fn restore(&self, cache: &mut LayerCache) -> Result<()> {
        cache.states_to_ints(&[FIRST]);
        Ok(cache.restore_state::<WriteSlots>()?)
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { changes_decode: true, ..Capabilities::default() }
    }

    /// A step launches the same kernels whether heads fill up or overwrite.
    fn plan(&self, _layer: LayerContext, cache: &LayerCache) -> Result<StepPlan<'_>> {
        Ok(StepPlan {
            slot: TokenSlot::Overwrite,
            update: Some(StepUpdate::Own(Box::new(|cache, _, _| advance(cache)))),
            recordable: WriteSlots::are_held(cache),
            ..StepPlan::append()
        })
    }
}

/// Chooses the next tokens' places.
fn advance(cache: &mut LayerCache) -> Result<()> {
    let first = int_state(NAME, cache, FIRST)?.squeeze_dim::<2>(2);
    Ok(WriteSlots::advance(cache, first)?)
}
