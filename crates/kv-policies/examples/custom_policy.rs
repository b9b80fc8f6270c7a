//! A policy of one's own, with private state on the device.
//!
//! First in, first out: each head gives up the token that came first, behind a few sinks. The
//! policy keeps
//!
//! * a *track*, one number a slot: when the slot's token arrived. The cache moves it with the
//!   slots.
//! * a *state* of its own type with an integer tensor: the number that the next token of each head
//!   gets. The cache copies, moves, joins, saves and loads it through the trait [`PolicyState`].
//!
//! Nothing in the cache's or the kernels' crate knows of either.
//!
//! ```sh
//! cargo run --release -p kv-policies --example custom_policy
//! ```

use burn::tensor::{DType, Device, Int, Tensor};
use kv_core::{
    CacheOptions, DeviceChoice, Error, HostState, KvCache, LayerCache, LoadState, Origin,
    PolicyState, Room, SavedState, Selection, StateBytes, read_f32, select_device, states_of,
};
use kv_policies::{
    Capabilities, EvictionRule, LayerContext, Observation, Plan, Policy, Result, Step, StepPlan,
    StepUpdate,
};
use serde_json::{Value, json};

/// The track of arrivals.
const ARRIVAL: &str = "arrival";

/// The policy: configuration only.
#[derive(Debug)]
pub(crate) struct FirstInFirstOut {
    /// Slots of each head.
    budget: usize,
    /// First tokens that stay.
    sinks: usize,
}

/// The number that each head's next token gets, `[B, Hkv]`, 32-bit.
#[derive(Debug)]
pub(crate) struct Arrivals(Tensor<2, Int>);

impl PolicyState for Arrivals {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn copied(&self) -> Option<Box<dyn PolicyState>> {
        Some(Box::new(Self(self.0.clone().add_scalar(0))))
    }

    fn to_device(&self, device: &Device) -> Option<Box<dyn PolicyState>> {
        Some(Box::new(Self(self.0.clone().to_device(device))))
    }

    fn joined(&self, others: &[&dyn PolicyState]) -> kv_core::Result<Box<dyn PolicyState>> {
        let parts = states_of::<Self>(self, others)?;
        let parts = parts.into_iter().map(|part| part.0.clone()).collect();
        Ok(Box::new(Self(Tensor::cat(parts, 0))))
    }

    fn to_host(&self) -> kv_core::Result<Option<HostState>> {
        let read = || [("next", self.0.clone().try_into_data())];
        HostState::saved(self, "arrivals", true, read).map(Some)
    }

    fn bytes(&self, _cache: &LayerCache) -> StateBytes {
        let device = self.0.dims().iter().product::<usize>() * size_of::<i32>();
        StateBytes { device, ..StateBytes::default() }
    }
}

impl LoadState for Arrivals {
    const NAME: &'static str = "arrivals";

    fn load(mut saved: SavedState, cache: &LayerCache, _seen: &[usize]) -> kv_core::Result<Self> {
        let layout = cache.layout();
        let next = saved.take("next", DType::I32, &[layout.batch(), layout.kv_heads()])?;
        Ok(Self(Tensor::from_data(next, (&cache.options().device, DType::I32))))
    }
}

impl Policy for FirstInFirstOut {
    fn name(&self) -> &'static str {
        "first-in-first-out"
    }

    fn config(&self) -> Value {
        json!({"policy": self.name(), "budget": self.budget, "sinks": self.sinks})
    }

    /// The sinks and the last tokens.
    fn select(&self, observation: &Observation<'_>) -> Result<Plan> {
        let [batch, kv_heads, tokens, _] = observation.dims();
        let last = tokens - (self.budget - self.sinks).min(tokens);
        let kept: Vec<u32> =
            (0..tokens).filter(|&at| at < self.sinks || at >= last).map(|at| at as u32).collect();
        Ok(Selection::new(vec![kept; batch * kv_heads])?.into())
    }

    /// Gives the kept tokens their numbers; sinks get none that is ever the least.
    fn init_cache(
        &self,
        cache: &mut LayerCache,
        observation: &Observation<'_>,
        selection: &Selection,
    ) -> Result<()> {
        let [batch, kv_heads, tokens, _] = observation.dims();
        cache.set_limits(vec![self.budget; batch * kv_heads])?;
        let number = |at: u32| if (at as usize) < self.sinks { f32::MAX } else { at as f32 };
        let live: Vec<f32> =
            selection.kept()?.iter().flatten().map(|&token| number(token)).collect();
        cache.set_live_track(ARRIVAL, &live, 0.0)?;
        let device = &cache.options().device;
        let next = Tensor::full([batch, kv_heads], tokens as i32, (device, DType::I32));
        cache.insert_policy_state(Arrivals(next));
        Ok(())
    }

    fn restore(&self, cache: &mut LayerCache) -> Result<()> {
        Ok(cache.restore_state::<Arrivals>()?)
    }

    /// A step appends before it evicts: room for one slot more than the budget.
    fn room(&self, _observation: &Observation<'_>, new_tokens: usize) -> Result<Room> {
        Ok(Room::Limited { limit: self.budget, over: 1, new_tokens })
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { changes_decode: true, ..Capabilities::default() }
    }

    /// A step appends, attends, numbers the new slots, and evicts each head's oldest number. The
    /// next numbers are a new tensor in every step, so that a recording of one step is not the next
    /// one.
    fn plan(&self, _layer: LayerContext, _cache: &LayerCache) -> Result<StepPlan<'_>> {
        let rule = EvictionRule {
            before_attention: false,
            interval: 1,
            keeps_order: false,
            protected: Box::new(|_| Ok([0, 0])),
            scores: Box::new(|view| view.track(ARRIVAL)),
        };
        Ok(StepPlan {
            update: Some(StepUpdate::Own(Box::new(|cache, _, _| number_newest(cache)))),
            eviction: Some(rule),
            recordable: false,
            ..StepPlan::append()
        })
    }
}

/// Gives each head's newest slot the head's next number.
fn number_newest(cache: &mut LayerCache) -> Result<()> {
    let ranges = cache.ranges();
    let newest = (ranges.offsets.clone() + ranges.lengths.clone()).sub_scalar(1);
    let heads = cache.layout().head_ranges();
    let missing = || Error::InvalidPlan { what: "step", reason: "no arrivals".into() };
    let arrivals = cache.policy_state_mut::<Arrivals>().ok_or_else(missing)?;
    let numbers = arrivals.0.clone().float().cast(DType::F32).reshape([heads]);
    arrivals.0 = arrivals.0.clone().add_scalar(1);
    Ok(cache.write_track(ARRIVAL, &newest.reshape([heads]), numbers)?)
}

const HEADS: usize = 2;
const DIM: usize = 16;

/// Rows that look random, the same for a seed.
fn rows<const D: usize>(shape: [usize; D], seed: f32, device: &Device) -> Tensor<D> {
    let count = shape.iter().product::<usize>();
    let values: Vec<f32> = (0..count).map(|at| (seed + at as f32 * 0.37).sin()).collect();
    Tensor::<1>::from_data(values.as_slice(), (device, DType::F32)).reshape(shape)
}

fn prompt(policy: &dyn Policy, tokens: usize, seed: f32, device: &Device) -> Result<LayerCache> {
    let shape = [1, HEADS, tokens, DIM];
    let (keys, values) = (rows(shape, seed, device), rows(shape, seed + 1.0, device));
    let positions = Tensor::<1, Int>::arange(0..tokens as i64, (device, DType::I32)).unsqueeze();
    let observation = Observation::new(&keys, &values, &positions);
    policy.prefill(&observation, 32, CacheOptions::new(device, DType::F32))
}

/// Decodes some steps; returns the outputs and the positions that are held in the end.
fn decode(
    policy: &dyn Policy,
    cache: &mut LayerCache,
    steps: std::ops::Range<usize>,
) -> Result<(Vec<f32>, Vec<i32>)> {
    let (batch, device) = (cache.layout().batch(), cache.options().device.clone());
    let mut outputs = Vec::new();
    for step in steps {
        let seed = step as f32 * 3.1;
        // Every sequence of a batch decodes the same tokens.
        let token = |more: f32| rows([1, HEADS, DIM], seed + more, &device).repeat_dim(0, batch);
        let position = Tensor::full([batch], 100 + step as i32, (&device, DType::I32));
        let step = Step::new(token(0.0), token(1.0), token(2.0), position);
        let output = policy.step(LayerContext { index: 0, count: 1 }, cache, step)?;
        outputs.extend(read_f32("output", output)?);
    }
    let positions = cache.read_positions()?;
    let live = cache.layout().live_slots().map(|slot| positions[slot]);
    Ok((outputs, live.collect()))
}

/// Copies, moves, saves, loads and joins a cache in the midst of decoding: each goes on as the
/// original does.
///
/// # Errors
/// Where one of them cannot be had.
pub(crate) fn survive(device: &Device) -> Result<()> {
    let policy = FirstInFirstOut { budget: 12, sinks: 2 };
    let mut cache = prompt(&policy, 30, 0.5, device)?;
    decode(&policy, &mut cache, 0..5)?;
    let mut copy = cache.clone();
    let mut moved = cache.clone().to_device(device);
    let whole = KvCache { layers: vec![cache.clone()], seen: vec![35], origin: Origin::default() };
    let path = std::env::temp_dir().join(format!("custom-policy-{}.cache", std::process::id()));
    whole.save(&path)?;
    let loaded = KvCache::load(&path, device);
    std::fs::remove_file(&path).ok();
    let mut loaded = loaded?.layers.remove(0);
    policy.restore(&mut loaded)?;
    let other = prompt(&policy, 21, 7.0, device)?;
    let mut joined = LayerCache::concat(vec![cache.clone(), other])?;

    let expected = decode(&policy, &mut cache, 5..20)?;
    for (name, other) in [("copy", &mut copy), ("moved", &mut moved), ("loaded", &mut loaded)] {
        assert_eq!(decode(&policy, other, 5..20)?, expected, "{name}");
        assert_eq!(other.memory(), cache.memory(), "{name}");
    }
    // The first sequence of the batch goes on as it does alone.
    let (_, positions) = decode(&policy, &mut joined, 5..20)?;
    assert_eq!(positions[..expected.1.len()], expected.1, "joined");
    Ok(())
}

#[cfg_attr(test, allow(dead_code))]
fn main() -> Result<()> {
    survive(&select_device(DeviceChoice::Auto)?)?;
    println!("copies, moved, loaded and joined caches go on as the original does");
    Ok(())
}
