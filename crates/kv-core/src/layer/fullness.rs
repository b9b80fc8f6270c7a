//! Dropping slots of full head ranges together, without the host: every call launches the same
//! kernels, whichever ranges are full, so that a step can be recorded.

use burn::tensor::{DType, Device, Int, Tensor};
use kv_kernels::{
    Choice, KeepLists, NO_SLOT, assign_int_rows, assign_ints, compact_slots, scatter_scalars,
    top_slots,
};

use super::expect_shape;
use crate::tensors::{columns, ints, listed, listed_by};
use crate::{Error, LayerCache, Result};

/// When a head range is full, and how many slots leave it then.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FullRange {
    /// The length from which on the range is full.
    pub at: usize,
    /// How many slots leave, at most `at`.
    pub leave: usize,
}

impl FullRange {
    /// The number of slots that leave a range of `length` slots.
    pub fn leaving(self, length: usize) -> usize {
        if length >= self.at { self.leave } else { 0 }
    }
}

/// When the head ranges of a cache are full, on the host and on the device.
#[derive(Debug, Clone)]
pub struct Fullness {
    ranges: Vec<FullRange>,
    /// The most slots that leave a range, now and in later sequences of a row: lists of leaving
    /// slots have this length, also in recorded steps.
    most: usize,
    /// `[B * Hkv]`
    at: Tensor<1, Int>,
    /// `[B * Hkv]`
    leave: Tensor<1, Int>,
}

/// The slots that leave full ranges.
#[derive(Debug, Clone)]
pub struct LeavingSlots {
    /// `[B * Hkv, most]`, 32-bit, −1 behind a range's last one.
    pub slots: Tensor<2, Int>,
    /// 1 for full ranges, 0 for others, `[B * Hkv]`, 32-bit.
    pub full: Tensor<1, Int>,
    /// The slots that stay, counted from their range's first one, `[B * Hkv, capacity]`.
    stay: Tensor<2, Int>,
    /// How many stay, `[B * Hkv]`.
    counts: Tensor<1, Int>,
    /// The ranges' lengths at the time, and how many slots leave them, as the host knows them.
    lengths: Vec<usize>,
    leaving: Vec<usize>,
}

/// Where the slots of each head range are. The numbers are uploaded once, since a step that uploads
/// cannot be recorded.
#[derive(Debug, Clone)]
pub(crate) struct RangeSlots {
    /// Every slot of each range, `[B * Hkv, most capacity]`, −1 behind its last one.
    slots: Tensor<2, Int>,
    /// 0, 1, 2 and so on in every row of `slots`.
    columns: Tensor<2, Int>,
    /// The first element of each row of `slots`, `[B * Hkv]`.
    starts: Tensor<1, Int>,
}

impl Fullness {
    /// The bounds of head ranges, `[B * Hkv]`.
    ///
    /// # Errors
    /// [`Error::InvalidPlan`] where more slots leave a range than it has when it is full.
    pub fn new(ranges: Vec<FullRange>, device: &Device) -> Result<Self> {
        if let Some(range) = ranges.iter().find(|range| range.leave > range.at) {
            let FullRange { at, leave } = range;
            let reason = format!("{leave} slots leave a range that is full at {at}");
            return Err(Error::InvalidPlan { what: "full range", reason });
        }
        let most = ranges.iter().map(|range| range.leave).max().unwrap_or_default().max(1);
        Ok(Self::of(ranges, most, device))
    }

    fn of(ranges: Vec<FullRange>, most: usize, device: &Device) -> Self {
        let upload = |of: fn(&FullRange) -> usize| {
            let values = ranges.iter().map(|range| of(range) as i32).collect();
            ints(values, [ranges.len()], device)
        };
        Self { at: upload(|range| range.at), leave: upload(|range| range.leave), most, ranges }
    }

    /// A copy in new tensors: [`Self::replace`] writes in place, and must not change the copy.
    pub fn copied(&self, device: &Device) -> Self {
        Self::of(self.ranges.clone(), self.most, device)
    }

    /// Lets [`Self::accepts`] take all bounds that `like` takes: the most slots that leave a range
    /// together are then the larger number of the two.
    pub fn widen(&mut self, like: &Self) {
        self.most = self.most.max(like.most);
    }

    /// Whether [`Self::replace`] can write these bounds: at most as many slots leave as before.
    pub fn accepts(&self, from: &Self) -> bool {
        from.ranges.len() <= self.ranges.len() && from.most <= self.most
    }

    /// Writes new bounds for the ranges from `first` on. The tensors stay: recorded steps read
    /// them.
    ///
    /// # Errors
    /// [`Error::InvalidPlan`] for bounds that [`Self::accepts`] refuses, and [`Error::Kernel`] for
    /// ranges that are not there.
    pub fn replace(&mut self, first: usize, from: &Self) -> Result<()> {
        if !self.accepts(from) {
            let (own, other) = (self.most, from.most);
            let reason = format!("{other} slots leave at most, expected up to {own}");
            return Err(Error::InvalidPlan { what: "full range", reason });
        }
        assign_int_rows(&mut self.at, first, from.at.clone())?;
        assign_int_rows(&mut self.leave, first, from.leave.clone())?;
        self.ranges[first..first + from.ranges.len()].copy_from_slice(&from.ranges);
        Ok(())
    }

    /// The bounds as the host knows them.
    pub fn ranges(&self) -> &[FullRange] {
        &self.ranges
    }

    /// Bytes on the device.
    pub fn bytes(&self) -> usize {
        2 * self.ranges.len() * size_of::<i32>()
    }
}

impl LayerCache {
    /// The live slots of the lowest scores of full ranges; among equal scores the higher slot
    /// leaves, and NaN is lower than all. Scores of slots that are not live are ignored. Does not
    /// wait for the device.
    ///
    /// # Shapes
    /// `scores` `[S]`, f32; `fullness` of `B * Hkv` ranges.
    ///
    /// # Errors
    /// [`Error::Shape`] for other numbers of scores or ranges, [`Error::Kernel`].
    pub fn leaving(&self, scores: Tensor<1>, fullness: &Fullness) -> Result<LeavingSlots> {
        let (ranges, width) = (self.layout.head_ranges(), self.layout.most_capacity());
        expect_shape("scores", &scores.dims(), &[self.slots()])?;
        expect_shape("ranges that may be full", &[fullness.ranges.len()], &[ranges])?;
        let device = &self.options.device;
        let lengths = self.ranges.lengths.clone().reshape([ranges]);
        let full = lengths.clone().greater_equal(fullness.at.clone()).int().cast(DType::I32);
        let gone = full.clone() * fullness.leave.clone();
        let counts = lengths.clone() - gone.clone();
        let RangeSlots { slots, columns, starts } = self.range_slots().clone();
        let rows = match self.layout.uniform_capacity() {
            Some(_) => scores.reshape([ranges, width]),
            None => scores.select(0, slots.clamp_min(0).flatten(0, 1)).reshape([ranges, width]),
        };
        let top = |rows, counts: Tensor<1, Int>, most| {
            top_slots(rows, Some(lengths.clone()), Choice::Top(counts), most)
        };
        let stay = top(rows, counts.clone(), width)?.indices;
        // Of each range's live slots, the ones that do not stay.
        let kept = listed_by(columns.clone(), stay.clone(), starts, counts.clone());
        let mut goes = Tensor::<1>::ones([ranges * width], (device, DType::F32));
        let none = Tensor::zeros([ranges * width], (device, DType::F32));
        scatter_scalars(&mut goes, kept.flatten(0, 1), none)?;
        let others = top(goes.reshape([ranges, width]), gone.clone(), fullness.most)?.indices;
        let firsts = self.ranges.offsets.clone().reshape([ranges]);
        let heads = self.layout.lengths().iter().zip(&fullness.ranges);
        Ok(LeavingSlots {
            slots: listed_by(columns, others, firsts, gone),
            full,
            stay,
            counts,
            lengths: self.layout.lengths().to_vec(),
            leaving: heads.map(|(&length, range)| range.leaving(length)).collect(),
        })
    }

    /// Drops the slots that [`Self::leaving`] has chosen, in place; the others keep their order.
    ///
    /// # Errors
    /// [`Error::InvalidPlan`] where lengths have changed since the slots were chosen,
    /// [`Error::Kernel`].
    pub fn drop_leaving(&mut self, leaving: LeavingSlots) -> Result<()> {
        let (ranges, width) = (self.layout.head_ranges(), self.layout.most_capacity());
        let shape = [self.layout.batch(), self.layout.kv_heads()];
        let LeavingSlots { stay, counts, lengths, leaving, .. } = leaving;
        if self.layout.lengths() != lengths {
            let now = self.layout.lengths();
            let reason = format!("slots were chosen of lengths {lengths:?}, which are {now:?}");
            return Err(Error::InvalidPlan { what: "eviction", reason });
        }
        let RangeSlots { slots, columns, starts } = self.range_slots().clone();
        if !self.tracks.is_empty() {
            let firsts = self.ranges.offsets.clone().reshape([ranges]);
            let from = listed_by(columns.clone(), stay.clone(), firsts, counts.clone());
            let wide = counts.clone().unsqueeze_dim::<2>(1).expand([ranges, width]);
            let to = slots.mask_fill(columns.greater_equal(wide), NO_SLOT);
            self.move_tracks(from.flatten(0, 1), to.flatten(0, 1))?;
        }
        let counts = counts.reshape(shape);
        let lists = KeepLists {
            kept: stay.flatten(0, 1),
            starts: starts.reshape(shape),
            counts: counts.clone(),
            most: width,
        };
        let (pool, held) = self.pool();
        compact_slots(pool, &held.offsets, &lists)?;
        assign_ints(&mut held.lengths, counts)?;
        self.states.drop_void();
        for (length, leaving) in self.layout.lengths_mut().iter_mut().zip(leaving) {
            *length -= leaving;
        }
        Ok(())
    }

    /// Uploads what [`Self::leaving`] needs, so that no later step grows the cache.
    pub fn prepare_leaving(&self) {
        self.slot_ranges();
        self.range_slots();
    }

    /// Bytes of the numbers about ranges that have been asked for.
    pub(super) fn range_bytes(&self) -> usize {
        let of_slots = self.slot_ranges.get().map_or(0, |_| self.slots());
        let grid = self.layout.head_ranges() * self.layout.most_capacity();
        let of_ranges = self.range_slots.get().map_or(0, |_| 2 * grid + self.layout.head_ranges());
        (of_slots + of_ranges) * size_of::<i32>()
    }

    fn range_slots(&self) -> &RangeSlots {
        self.range_slots.get_or_init(|| {
            let (ranges, width) = (self.layout.head_ranges(), self.layout.most_capacity());
            let device = &self.options.device;
            let columns = columns(ranges, width, device);
            let firsts = self.ranges.offsets.clone().reshape([ranges]);
            let capacities = self.upload(self.layout.capacities().iter().copied());
            let starts = (0..ranges).map(|range| (range * width) as i32).collect();
            RangeSlots {
                slots: listed(columns.clone(), firsts, capacities),
                columns,
                starts: ints(starts, [ranges], device),
            }
        })
    }
}
