//! Caches of a fixed size, in which a new token takes a slot that the step before has chosen: the
//! one behind the live slots, or the one that mattered least.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use kv_core::{
    Error, HostState, LayerCache, LoadState, NUMERATORS, PolicyState, Result, SavedState,
    StateBytes, StepLengths, counted, expect_shape, state_of, states_of,
};
use kv_kernels::{
    EvictingOutput, EvictionOptions, HeadLayout, HeldSlots, Memory, NO_RECORD, Placement,
    assign_int_rows, assign_ints, evicting_attention, log_norms, write_heads,
};

use crate::policy::step_plan::VictimChoice;

/// The track of `ln ‖v‖₁`.
const LOG_NORMS: &str = "value_log_norm";
/// The track of [`kv_kernels::Memory::records`].
pub(crate) const RECORDS: &str = "importance_record";

/// The slots that the next tokens are written to, in a cache whose heads are held at their limits
/// ([`LayerCache::limits`]): a head below its limit grows by a slot in each step, a head at its
/// limit overwrites one. Both are one step on the device.
///
/// A token that is appended, a slot that is dropped and other limits end this state
/// ([`PolicyState::is_void_once_slots_change`]).
#[derive(Debug)]
pub struct WriteSlots {
    /// Counted from each head's first slot, `[B, Hkv]`.
    slots: Tensor<2, Int>,
    /// The cache's limits on the device, `[B, Hkv]`.
    limits_on_device: Tensor<2, Int>,
    /// The cache's limits, `[B * Hkv]`.
    limits: Vec<usize>,
    /// The counters of heads that have arrived in a step, 0 between steps:
    /// `[B, HeldSlots::ARRIVALS]`.
    arrivals: Tensor<2, Int>,
    /// Whether tokens were counted as seen, so that slots have to be chosen anew.
    assumed: bool,
}

impl WriteSlots {
    /// Holds every head at its limit from now on: a new token takes the slot that
    /// [`Self::attend_and_choose_victim`] or [`Self::advance`] has chosen before. Until then each
    /// head's last slot counts as its newest token.
    ///
    /// # Errors
    /// [`Error::InvalidPlan`] without limits ([`LayerCache::set_limits`]), where a limit is 0 or
    /// below what its head holds, or for numerator weights, which these steps do not read.
    pub fn enable(cache: &mut LayerCache) -> Result<()> {
        if cache.track(NUMERATORS).is_some() {
            return Err(Error::InvalidPlan {
                what: "limits",
                reason: "numerators have weights of their own, expected one weight a slot".into(),
            });
        }
        let limits = checked_limits(cache)?.to_vec();
        let slots = last_slots(cache);
        let norms = log_norms(cache.values().clone());
        cache.set_track(LOG_NORMS, norms, 0.0)?;
        let state = Self::new(slots, limits);
        cache.insert_policy_state(state);
        Ok(())
    }

    /// Whether new tokens of this cache take slots that were chosen before.
    pub fn are_held(cache: &LayerCache) -> bool {
        cache.policy_state::<Self>().is_some()
    }

    /// Where each head's next token goes, counted from its first slot, `[B, Hkv]`.
    pub fn next(cache: &LayerCache) -> Option<&Tensor<2, Int>> {
        cache.policy_state::<Self>().map(|own| &own.slots)
    }

    /// `ln ‖v‖₁` of every slot's value, `[S]`, where the cache keeps them.
    pub fn value_log_norms(cache: &LayerCache) -> Option<&Tensor<1>> {
        cache.track(LOG_NORMS)
    }

    /// Writes one token of every head of every sequence to its slot, without waiting for the
    /// device.
    ///
    /// # Shapes
    /// `keys`, `values` `[B, Hkv, D]`; `positions` `[B]`.
    ///
    /// # Errors
    /// [`Error::CapacityExhausted`] where a head below its limit is full, [`Error::Shape`].
    pub fn write(
        cache: &mut LayerCache,
        keys: Tensor<3>,
        values: Tensor<3>,
        positions: Tensor<1, Int>,
    ) -> Result<()> {
        let lengths = lengths_after_step(cache)?;
        let within = Self::of(cache)?.slots.clone();
        let total_kv_heads = cache.layout().head_ranges();
        let ranges = cache.ranges();
        let appended = within.clone().equal(ranges.lengths.clone()).int().cast(DType::I32);
        let slots = (ranges.offsets.clone() + within).reshape([total_kv_heads]);
        let norms = values.clone().cast(cache.options().dtype);
        let norms = log_norms(norms.reshape([total_kv_heads, cache.head_dim()]));
        cache.write_tokens(&slots, keys, values, positions)?;
        cache.write_track(LOG_NORMS, &slots, norms)?;
        cache.change_slots([], |_, ranges, []| {
            let lengths = ranges.lengths.clone() + appended;
            Ok(assign_ints(&mut ranges.lengths, lengths)?)
        })?;
        cache.set_host_lengths(&lengths)
    }

    /// [`Self::write`] for tokens as a layer projects them, in one launch; returns their queries,
    /// `[B, Hq, D]`.
    ///
    /// # Shapes
    /// The shapes of [`LayerCache::append_projected`].
    ///
    /// # Errors
    /// The errors of [`Self::write`] and of [`write_heads`].
    pub fn write_projected(
        cache: &mut LayerCache,
        projected: Tensor<2>,
        positions: Tensor<1, Int>,
        heads: &HeadLayout,
    ) -> Result<Tensor<3>> {
        expect_shape("kv heads", &[heads.kv_heads], &[cache.layout().kv_heads()])?;
        expect_shape("positions", &positions.dims(), &[cache.layout().batch()])?;
        let lengths = lengths_after_step(cache)?;
        let places = Self::of(cache)?.slots.clone();
        cache.reset_tracks(|cache| {
            let slots = cache.ranges().offsets.clone() + places.clone();
            slots.reshape([cache.layout().head_ranges()])
        })?;
        let mut query = None;
        cache.change_slots([LOG_NORMS], |pool, ranges, [log_norms]| {
            let placement = Placement::Next { ranges, places: &places, log_norms };
            query = Some(write_heads(projected, positions, heads, pool, placement)?);
            Ok(())
        })?;
        cache.set_host_lengths(&lengths)?;
        query.ok_or_else(not_held)
    }

    /// Attention of one query per sequence over its live slots, which chooses the slots of the next
    /// tokens too.
    ///
    /// # Shapes
    /// `query` `[B, Hq, D]`; `position`, of the newest tokens, `[B]`.
    ///
    /// # Errors
    /// The errors of [`evicting_attention`]; [`Error::InvalidPlan`] for a cache that is not held at
    /// its limits.
    pub fn attend_and_choose_victim(
        cache: &mut LayerCache,
        query: Tensor<3>,
        position: &Tensor<1, Int>,
        choice: VictimChoice,
    ) -> Result<EvictingOutput> {
        let longest = Some(cache.layout().most_capacity());
        let options = EvictionOptions { longest, ..choice.options(cache, position) };
        let log_norms = Self::value_log_norms(cache).cloned().ok_or_else(not_held)?;
        let Some(decay) = choice.memory else {
            let ranges = cache.ranges().clone();
            let (pool, weights) = pool_of(cache);
            let held = Self::of_mut(cache)?.held(log_norms, None);
            return Ok(evicting_attention(query, pool, weights, &ranges, held, options)?);
        };
        if cache.track(RECORDS).is_none() {
            cache.set_track(RECORDS, log_norms.full_like(NO_RECORD), NO_RECORD)?;
        }
        let (pool, weights) = pool_of(cache);
        let mut own = cache.take_policy_state::<Self>().ok_or_else(not_held)?;
        let mut output = None;
        let attended = cache.change_slots([RECORDS], |_, ranges, [records]| {
            let memory = Memory { records, now: position.clone(), decay };
            let held = own.held(log_norms, Some(memory));
            output = Some(evicting_attention(query, pool, weights, ranges, held, options)?);
            Ok(())
        });
        cache.insert_policy_state(own);
        attended?;
        output.ok_or_else(not_held)
    }

    /// The state as the op takes it.
    fn held<'a>(&'a mut self, log_norms: Tensor<1>, memory: Option<Memory<'a>>) -> HeldSlots<'a> {
        HeldSlots {
            log_norms,
            limits: self.limits_on_device.clone(),
            places: &mut self.slots,
            arrivals: &mut self.arrivals,
            memory,
        }
    }

    /// Advances each head's next slot by one, in place: to the slot behind the live ones or, at the
    /// limit, back to the slot `first` `[B, Hkv]`, 32-bit. Full heads so overwrite their oldest
    /// slot behind the first ones.
    ///
    /// # Errors
    /// [`Error::InvalidPlan`] for a cache that is not held at its limits, [`Error::Shape`].
    pub fn advance(cache: &mut LayerCache, first: Tensor<2, Int>) -> Result<()> {
        let shape = [cache.layout().batch(), cache.layout().kv_heads()];
        expect_shape("first", &first.dims(), &shape)?;
        let own = cache.policy_state_mut::<Self>().ok_or_else(not_held)?;
        let moved = own.slots.clone().add_scalar(1);
        let round = moved.clone().greater_equal(own.limits_on_device.clone());
        Ok(assign_ints(&mut own.slots, moved.mask_where(round, first))?)
    }

    /// The state of heads with these limits, `[B * Hkv]`.
    fn new(slots: Tensor<2, Int>, limits: Vec<usize>) -> Self {
        let (shape, device) = (slots.dims(), slots.device());
        let numbers = limits.iter().map(|&limit| i32::try_from(limit).unwrap_or(i32::MAX));
        Self {
            limits_on_device: ints(numbers.collect(), shape, &device),
            arrivals: no_arrivals(shape[0], &device),
            slots,
            limits,
            assumed: false,
        }
    }

    fn of(cache: &LayerCache) -> Result<&Self> {
        cache.policy_state().ok_or_else(not_held)
    }

    fn of_mut(cache: &mut LayerCache) -> Result<&mut Self> {
        cache.policy_state_mut().ok_or_else(not_held)
    }
}

impl PolicyState for WriteSlots {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn copied(&self) -> Option<Box<dyn PolicyState>> {
        let slots = self.slots.clone().add_scalar(0);
        Some(Box::new(Self { assumed: self.assumed, ..Self::new(slots, self.limits.clone()) }))
    }

    fn to_device(&self, device: &Device) -> Option<Box<dyn PolicyState>> {
        let slots = self.slots.clone().to_device(device);
        Some(Box::new(Self { assumed: self.assumed, ..Self::new(slots, self.limits.clone()) }))
    }

    fn joined(&self, others: &[&dyn PolicyState]) -> Result<Box<dyn PolicyState>> {
        let parts = states_of::<Self>(self, others)?;
        let slots = parts.iter().map(|part| part.slots.clone()).collect();
        let limits = parts.iter().flat_map(|part| part.limits.iter().copied()).collect();
        Ok(Box::new(Self::new(Tensor::cat(slots, 0), limits)))
    }

    fn accepts(&self, from: &dyn PolicyState) -> bool {
        let [_, heads] = self.slots.dims();
        state_of::<Self>(from).is_ok_and(|from| from.slots.dims() == [1, heads])
    }

    fn replace_row(&mut self, row: usize, from: &dyn PolicyState) -> Result<()> {
        let [_, heads] = self.slots.dims();
        let from = state_of::<Self>(from)?;
        expect_shape("slots", &from.slots.dims(), &[1, heads])?;
        assign_int_rows(&mut self.slots, row, from.slots.clone())?;
        assign_int_rows(&mut self.limits_on_device, row, from.limits_on_device.clone())?;
        self.limits[row * heads..(row + 1) * heads].copy_from_slice(&from.limits);
        Ok(())
    }

    fn to_host(&self) -> Result<Option<HostState>> {
        let read = || [("slots", self.slots.clone().try_into_data())];
        HostState::saved(self, "write slots", true, read).map(Some)
    }

    fn bytes(&self, _cache: &LayerCache) -> StateBytes {
        let tensors = [&self.slots, &self.limits_on_device, &self.arrivals];
        let numbers = tensors.map(|tensor| tensor.dims().iter().product::<usize>());
        let device = numbers.iter().sum::<usize>() * size_of::<i32>();
        StateBytes { device, ..StateBytes::default() }
    }

    /// After tokens were counted as seen, each head's last slot counts as its newest token.
    fn slots_moved(&mut self, cache: &LayerCache) -> Result<()> {
        if self.assumed {
            self.slots = last_slots(cache);
            self.assumed = false;
        }
        Ok(())
    }

    fn assume(&mut self, _tokens: usize) -> Result<()> {
        self.assumed = true;
        Ok(())
    }

    fn lengths_of_step(&self, head: usize, before: usize) -> Option<StepLengths> {
        let behind = self.limits[head].min(before + 1);
        Some(StepLengths { within: behind, behind })
    }

    fn is_void_once_slots_change(&self) -> bool {
        true
    }

    fn sets_track(&self, track: &str) -> bool {
        // The newest token's slot has no record, whatever stands there.
        track == LOG_NORMS || track == RECORDS
    }
}

impl LoadState for WriteSlots {
    const NAME: &'static str = "write_slots";

    fn load(mut saved: SavedState, cache: &LayerCache, _seen: &[usize]) -> Result<Self> {
        let invalid = |reason: String| Error::InvalidPlan { what: "write slots", reason };
        let shape = [cache.layout().batch(), cache.layout().kv_heads()];
        let slots = saved.take("slots", DType::I32, &shape)?;
        let limits = checked_limits(cache)?.to_vec();
        if cache.track(LOG_NORMS).is_none() {
            return Err(invalid(format!("there is no track `{LOG_NORMS}`")));
        }
        // The device does not check where it writes.
        let numbers = slots.as_slice::<i32>().map_err(|error| invalid(error.to_string()))?;
        let heads = numbers.iter().zip(cache.layout().lengths()).zip(&limits).enumerate();
        for (head, ((&slot, &length), &limit)) in heads {
            let within = usize::try_from(slot)
                .is_ok_and(|slot| slot < length || (slot == length && length < limit));
            if !within {
                let reason = format!("slot {slot} of head {head}, which holds {length} of {limit}");
                return Err(invalid(reason));
            }
        }
        let device = &cache.options().device;
        Ok(Self::new(Tensor::from_data(slots, (device, DType::I32)), limits))
    }
}

/// Keys and values, and the slots' weights.
fn pool_of(cache: &LayerCache) -> ([Tensor<2>; 2], Option<Tensor<1>>) {
    ([cache.keys().clone(), cache.values().clone()], cache.log_weights().cloned())
}

/// The limits, each at least what its head holds.
fn checked_limits(cache: &LayerCache) -> Result<&[usize]> {
    let invalid = |reason: String| Error::InvalidPlan { what: "limits", reason };
    let limits = cache.limits().ok_or_else(|| invalid("there are none".into()))?;
    let mut heads = limits.iter().zip(cache.layout().lengths()).enumerate();
    match heads.find(|(_, (limit, length))| limit < length || **limit == 0) {
        Some((head, (limit, length))) => Err(invalid(format!(
            "that of head {head} is {}, expected at least {}",
            counted(*limit, "slot"),
            length.max(&1)
        ))),
        None => Ok(limits),
    }
}

/// The lengths after another token; heads below their limits must have room for it.
fn lengths_after_step(cache: &mut LayerCache) -> Result<Vec<usize>> {
    let limits = &WriteSlots::of(cache)?.limits;
    let heads = cache.layout().lengths().iter().zip(limits);
    let lengths: Vec<usize> = heads.map(|(&length, &limit)| limit.min(length + 1)).collect();
    cache.fit(&lengths)?;
    Ok(lengths)
}

/// Each head's last live slot, counted from its first, `[B, Hkv]`; 0 for empty heads.
fn last_slots(cache: &LayerCache) -> Tensor<2, Int> {
    let layout = cache.layout();
    let slots = layout.lengths().iter().map(|length| length.saturating_sub(1) as i32);
    ints(slots.collect(), [layout.batch(), layout.kv_heads()], &cache.options().device)
}

/// Counters of `batch` sequences before a step.
fn no_arrivals(batch: usize, device: &Device) -> Tensor<2, Int> {
    Tensor::zeros([batch, HeldSlots::ARRIVALS], (device, DType::I32))
}

fn ints(values: Vec<i32>, shape: [usize; 2], device: &Device) -> Tensor<2, Int> {
    Tensor::from_data(TensorData::new(values, shape), (device, DType::I32))
}

fn not_held() -> Error {
    Error::InvalidPlan { what: "step", reason: "the cache is not held at its limits".into() }
}
