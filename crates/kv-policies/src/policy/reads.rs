//! What decode steps read of a cache that keeps more than they look at, for reports. The cache's
//! own state tells: index sets count, as HShare's lists do; of other lists, the last one is known.

use std::iter::Sum;
use std::ops::{Add, AddAssign};

use kv_core::LayerCache;
use kv_kernels::RangeSets;

use crate::policy::lists::SlotList;
use crate::{CisIndex, HShare, Result};

/// What decode steps of some heads have read so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Reads {
    /// Steps of single heads.
    pub steps: u64,
    /// Steps that retrieved the tokens to read, rather than sharing an earlier choice.
    pub retrieved: u64,
    /// Slots attended to.
    pub slots: u64,
}

impl Reads {
    /// `ρ̂`: the share of heads and steps that retrieve.
    pub fn ratio(&self) -> f64 {
        self.retrieved as f64 / self.steps.max(1) as f64
    }

    /// The mean number of slots that a head attends to in a step.
    pub fn slots_each(&self) -> f64 {
        self.slots as f64 / self.steps.max(1) as f64
    }

    /// The reads of a cache's decode steps, or of the last one where nothing counts them: all of
    /// its heads have retrieved then. `None` where steps read all slots. Waits for the device.
    ///
    /// # Errors
    /// Where the device cannot be read.
    pub fn of(cache: &LayerCache) -> Result<Option<Self>> {
        if let Some(index) = cache.policy_state::<CisIndex>() {
            let all = index.sets().read()?.into_iter().map(|own| {
                let RangeSets { steps, retrieved, tokens: slots, .. } = own;
                Self { steps, retrieved, slots }
            });
            return Ok(Some(all.sum()));
        }
        let Some(rows) = SlotList::read_last(cache)? else { return Ok(None) };
        if let Some(counted) = HShare::reads(cache, &rows)? {
            return Ok(Some(counted));
        }
        let steps = rows.len() as u64;
        let slots = rows.iter().map(|row| row.len() as u64).sum();
        Ok(Some(Self { steps, retrieved: steps, slots }))
    }
}

/// Slots that the last step attended to by its index sets or its list, as
/// [`crate::Policy::last_attended`] returns them.
///
/// # Errors
/// Where the device cannot be read.
pub(super) fn last_attended(cache: &LayerCache) -> Result<Option<Vec<Vec<usize>>>> {
    let Some(index) = cache.policy_state::<CisIndex>() else {
        return Ok(SlotList::read_last(cache)?);
    };
    let read = index.sets().read()?;
    let each = read.len() / cache.layout().head_ranges().max(1);
    let slots = read.iter().enumerate().map(|(range, own)| {
        let length = cache.layout().lengths()[range / each.max(1)];
        own.slots(length).collect()
    });
    Ok(Some(slots.collect()))
}

impl Add for Reads {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            steps: self.steps + other.steps,
            retrieved: self.retrieved + other.retrieved,
            slots: self.slots + other.slots,
        }
    }
}

impl AddAssign for Reads {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl Sum for Reads {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), Self::add)
    }
}
