//! What decode steps read of a cache that keeps more than they look at, for reports.

use std::iter::Sum;
use std::ops::{Add, AddAssign};

use kv_core::LayerCache;

use crate::Result;
use crate::policy::lists::SlotList;

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

    /// The reads of the last step by its list, which all of its heads retrieved; `None` without a
    /// list. Waits for the device.
    ///
    /// # Errors
    /// Where the device cannot be read.
    pub(crate) fn of_list(cache: &LayerCache) -> Result<Option<Self>> {
        Ok(SlotList::read_last(cache)?.map(|rows| {
            let steps = rows.len() as u64;
            let slots = rows.iter().map(|row| row.len() as u64).sum();
            Self { steps, retrieved: steps, slots }
        }))
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
