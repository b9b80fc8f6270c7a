//! KVMerger: neighbours of similar keys become one slot each.

mod merge;
mod sets;

use std::sync::Arc;

use burn::tensor::{DType, Tensor};
use kv_core::{Budget, CacheOptions, LayerCache, Room, Selection, read_f32};
use kv_kernels::GroupReduction;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::policy::check::Check;
use crate::policy::config::{Config, config_of, invalid};
use crate::{
    Capabilities, LayerContext, Needs, Observation, Plan, Policy, PolicyError, Reduction, Result,
    StepAttention, StepPlan, StepUpdate,
};
use sets::Sets;

const NAME: &str = "kvmerger";
/// Track of each slot's attention, the group's mean, summed since the prompt's first query; a
/// merged slot has the sum of its tokens' attention.
const ATTENTION: &str = "attention";

/// KVMerger (Wang et al., 2024): consecutive tokens whose neighbouring keys have a cosine above `ε`
/// form a set. The most recent tokens and the tokens of most attention stay as they are.
/// A set becomes one slot in the place of its pivot, the token of most attention: key and value are
/// averages with the weights `exp(−‖k_p − k_i‖² / 2σ²)`, where `σ` is the mean distance from the
/// pivot. A merged slot counts as one in attention.
///
/// The paper fixes `ε`, from which the number of slots follows. Here each head joins its most
/// similar neighbours until the budget is met, as if it searched for its own `ε`. Below `threshold`
/// it joins no further, and drops the sets of least attention instead.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KvMerger {
    /// Slots per key-value head, protected ones included.
    pub budget: Budget,
    /// Cosine that neighbours must exceed: the least `ε`.
    pub threshold: f32,
    /// Share of the budget for the last tokens.
    pub recent_share: f64,
    /// Share of the budget for the tokens of most attention among the others.
    pub heavy_share: f64,
    /// Whether a set's value is multiplied by the number of its slots.
    pub set_size: bool,
    /// Decode steps between merges; the cache holds up to `interval` slots more in between.
    pub interval: usize,
    /// Whether decoded tokens are merged too; without, they accumulate.
    pub decode: bool,
}

impl KvMerger {
    /// The paper's threshold under a budget.
    pub fn new(budget: Budget) -> Self {
        Self {
            budget,
            threshold: 0.75,
            // Ours, as the interval.
            recent_share: 0.25,
            heavy_share: 0.25,
            set_size: false,
            interval: 64,
            decode: true,
        }
    }

    pub(crate) fn validate(&self) -> Result<()> {
        let Self { threshold, recent_share, heavy_share, interval, .. } = *self;
        self.budget.validate()?;
        let check = Check(NAME);
        check.that("threshold", threshold, (-1.0..=1.0).contains(&threshold), "-1 to 1")?;
        check.share("recent_share", recent_share)?;
        check.share("heavy_share", heavy_share)?;
        if recent_share + heavy_share > 1.0 {
            let reason = format!(
                "`recent_share` {recent_share} and `heavy_share` {heavy_share} exceed 1 together"
            );
            return Err(invalid(NAME, reason));
        }
        check.positive("interval", interval)
    }

    /// The attention that each token of a prompt has had, `[B * Hkv * T]`.
    fn prompt_attention(observation: &Observation<'_>) -> Result<Vec<f32>> {
        let sums = observation.attention_sums(NAME)?;
        Ok(read_f32("attention", Reduction::Mean.groups(sums, observation.dims()[1]))?)
    }

    fn prompt_sets(&self, observation: &Observation<'_>, attention: &[f32]) -> Result<Sets> {
        let [batch, kv_heads, tokens, head_dim] = observation.dims();
        let total_kv_heads = batch * kv_heads;
        let keys = observation.keys.clone().reshape([total_kv_heads * tokens, head_dim]);
        let lines: Vec<Vec<f32>> = attention.chunks(tokens).map(<[f32]>::to_vec).collect();
        self.sets(keys, &lines, &vec![self.budget.resolve(tokens); total_kv_heads])
    }

    /// The policy from its configuration.
    pub(crate) fn from_config(config: &mut Config) -> Result<Arc<dyn Policy>> {
        let policy = config.take_budgeted(NAME, Self::new)?;
        policy.validate()?;
        Ok(Arc::new(policy))
    }
}

impl Policy for KvMerger {
    fn name(&self) -> &'static str {
        NAME
    }

    fn config(&self) -> Value {
        config_of(NAME, self)
    }

    fn budget(&self) -> Option<Budget> {
        Some(self.budget)
    }

    fn needs(&self) -> Needs {
        Needs { column_sums: true, ..Needs::default() }
    }

    /// The pivots, and the tokens of no set.
    fn select(&self, observation: &Observation<'_>) -> Result<Plan> {
        let sets = self.prompt_sets(observation, &Self::prompt_attention(observation)?)?;
        Ok(Selection::new(sets.kept())?.into())
    }

    fn init_cache(
        &self,
        cache: &mut LayerCache,
        observation: &Observation<'_>,
        selection: &Selection,
    ) -> Result<()> {
        let attention = Self::prompt_attention(observation)?;
        self.init_cache_with(cache, observation.tokens(), selection, &attention)
    }

    fn prefill(
        &self,
        observation: &Observation<'_>,
        new_tokens: usize,
        options: CacheOptions,
    ) -> Result<LayerCache> {
        let mut attention = Self::prompt_attention(observation)?;
        let sets = self.prompt_sets(observation, &attention)?;
        let selection = Selection::new(sets.kept())?;
        let room = self.room(observation, new_tokens)?;
        let mut cache = observation.cache(&selection, room, options)?;
        let [batch, kv_heads, tokens, head_dim] = observation.dims();
        let rows = [batch * kv_heads * tokens, head_dim];
        let flat = |tensor: &Tensor<4>| tensor.clone().reshape(rows).cast(cache.options().dtype);
        let (keys, values) = (flat(observation.keys), flat(observation.values));
        let orders = vec![(0..tokens as u32).collect(); batch * kv_heads];
        self.merge(&mut cache, Some([&keys, &values]), &sets, &orders)?;
        for (set, attention) in sets.pivots.iter().zip(attention.chunks_mut(tokens)) {
            sets::add_up(set, attention);
        }
        self.init_cache_with(&mut cache, tokens, &selection, &attention)?;
        Ok(cache)
    }

    fn room(&self, observation: &Observation<'_>, new_tokens: usize) -> Result<Room> {
        if !self.decode {
            return Ok(Room::Extra(new_tokens));
        }
        let limit = self.budget.behind(observation.tokens());
        Ok(Room::Limited { limit, over: self.interval, new_tokens })
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { changes_decode: self.decode, ..Capabilities::default() }
    }

    /// Steps are recordable but for the ones that merge, which the host decides.
    fn plan(&self, _layer: LayerContext, cache: &LayerCache) -> Result<StepPlan<'_>> {
        if !self.decode {
            return Ok(StepPlan::append());
        }
        Ok(StepPlan {
            attention: StepAttention::Live { probabilities: false, logits: true },
            update: Some(StepUpdate::Own(Box::new(|cache, _, output| {
                let (logits, log_sum_exp) = output.logits()?;
                cache.add_probabilities(ATTENTION, logits, log_sum_exp, GroupReduction::Mean)?;
                self.shrink(cache)
            }))),
            recordable: self.budgets_behind(cache, 1).is_none(),
            ..StepPlan::append()
        })
    }
}

impl KvMerger {
    /// Sets the limits and the track of attention. `attention` is `[B * Hkv * T]`.
    fn init_cache_with(
        &self,
        cache: &mut LayerCache,
        tokens: usize,
        selection: &Selection,
        attention: &[f32],
    ) -> Result<()> {
        if !self.decode {
            return Ok(());
        }
        let limit = self.budget.behind(tokens);
        cache.set_limits(selection.lengths().iter().map(|&kept| kept.max(limit)).collect())?;
        let device = &cache.options().device;
        let attention = Tensor::<1>::from_data(attention, (device, DType::F32));
        let attention = attention.reshape([selection.head_ranges(), tokens]);
        Ok(cache.set_kept_track(ATTENTION, attention, selection, 0.0)?)
    }

    /// The slots that each head keeps once it holds `more` of them more; `None` where no head is
    /// `interval` over its limit then.
    fn budgets_behind(&self, cache: &LayerCache, more: usize) -> Option<Vec<usize>> {
        let heads = cache.layout().lengths().iter().zip(cache.limits()?);
        let due = |length: usize, limit: usize| length >= limit.saturating_add(self.interval);
        let any = heads.clone().any(|(&length, &limit)| due(length + more, limit));
        let budgets =
            heads.map(|(&length, &limit)| if due(length, limit) { limit } else { length });
        any.then(|| budgets.collect())
    }

    /// Merges the slots of heads that are `interval` over their limits, on the host.
    fn shrink(&self, cache: &mut LayerCache) -> Result<()> {
        let Some(budgets) = self.budgets_behind(cache, 0) else { return Ok(()) };
        let lengths = cache.layout().lengths();
        let positions = cache.read_positions()?;
        let missing = PolicyError::MissingObservation { policy: NAME, what: "a prompt" };
        let track = read_f32("attention", cache.track(ATTENTION).ok_or(missing)?.clone())?;
        // Each head's slots in the order of their positions.
        let orders: Vec<Vec<u32>> = (0..lengths.len())
            .map(|range| {
                let live = cache.layout().live(range);
                let mut order: Vec<u32> = (0..live.len() as u32).collect();
                order.sort_by_key(|&at| positions[live.start + at as usize]);
                order
            })
            .collect();
        let offsets = cache.layout().offsets();
        let rows = orders.iter().zip(offsets).flat_map(|(order, &offset)| {
            order.iter().map(move |&at| (offset + at as usize) as i32)
        });
        let rows: Vec<i32> = rows.collect();
        let mut lines: Vec<Vec<f32>> = Vec::with_capacity(orders.len());
        for (order, &offset) in orders.iter().zip(offsets) {
            lines.push(order.iter().map(|&at| track[offset + at as usize]).collect());
        }
        let device = cache.options().device.clone();
        let rows = Tensor::from_data(rows.as_slice(), (&device, DType::I32));
        let keys = cache.keys().clone().select(0, rows);
        let sets = self.sets(keys, &lines, &budgets)?;
        self.merge(cache, None, &sets, &orders)?;
        let mut live = Vec::with_capacity(track.len());
        for ((line, pivots), order) in lines.iter_mut().zip(&sets.pivots).zip(&orders) {
            sets::add_up(pivots, line);
            let mut own = vec![0.0; order.len()];
            order.iter().zip(line).for_each(|(&at, sum)| own[at as usize] = *sum);
            live.extend(own);
        }
        cache.set_live_track(ATTENTION, &live, 0.0)?;
        let kept = sets.kept().into_iter().zip(&orders);
        let kept = kept.map(|(kept, order)| kept.iter().map(|&at| order[at as usize]).collect());
        Ok(cache.retain(&Selection::new(kept.collect())?)?)
    }
}
