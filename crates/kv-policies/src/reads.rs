//! What decode steps read of a cache that keeps more than they look at, for reports.

use std::iter::Sum;
use std::ops::{Add, AddAssign};

use kv_core::{LayerCache, RangeSets};

use crate::Result;
use crate::cis::CisIndex;
use crate::lists::SlotList;

/// What decode steps of some heads have read so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Reads {
    /// Steps of single heads.
    pub steps: u64,
    /// Those that looked for what to read, rather than sharing what others had found.
    pub retrieved: u64,
    /// Slots attended to.
    pub slots: u64,
}

impl Reads {
    /// `ρ̂`: retrievals a step and head.
    pub fn ratio(&self) -> f64 {
        self.retrieved as f64 / self.steps.max(1) as f64
    }

    /// Slots attended to, a step and head.
    pub fn slots_each(&self) -> f64 {
        self.slots as f64 / self.steps.max(1) as f64
    }

    /// What the last step has read by its list, which all of its heads looked for.
    fn of_list(cache: &LayerCache) -> Result<Option<Self>> {
        Ok(SlotList::read_last(cache)?.map(|rows| {
            let steps = rows.len() as u64;
            let slots = rows.iter().map(|row| row.len() as u64).sum();
            Self { steps, retrieved: steps, slots }
        }))
    }

    /// What the index sets of a cache have come to, or what the last step's list has. Waits for the
    /// device.
    ///
    /// # Errors
    /// Where the device gives nothing back.
    pub fn of_sets(cache: &LayerCache) -> Result<Option<Self>> {
        let Some(CisIndex(sets)) = cache.policy_state() else { return Self::of_list(cache) };
        let all = sets.read()?.into_iter().map(|own| {
            let RangeSets { steps, retrieved, tokens: slots, .. } = own;
            Self { steps, retrieved, slots }
        });
        Ok(Some(all.fold(Self::default(), Self::add)))
    }
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

/// Slots that the last step attended to, by its index sets or its list: of each range, counted from
/// its first.
pub(crate) fn attended_by_sets(cache: &LayerCache) -> Result<Option<Vec<Vec<usize>>>> {
    let Some(CisIndex(sets)) = cache.policy_state() else {
        return Ok(SlotList::read_last(cache)?);
    };
    let read = sets.read()?;
    let each = read.len() / cache.layout().pairs().max(1);
    let slots = read.iter().enumerate().map(|(range, own)| {
        let length = cache.layout().lengths()[range / each.max(1)];
        own.slots(length).collect()
    });
    Ok(Some(slots.collect()))
}
