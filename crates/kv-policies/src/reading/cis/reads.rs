//! Counts of the slots that steps have read by index sets, for reports.

use std::ops::Add;

use kv_core::LayerCache;
use kv_kernels::RangeSets;

use super::CisIndex;
use crate::policy::lists::SlotList;
use crate::{Reads, Result};

impl Reads {
    /// The reads that the index sets of a cache have counted, or the reads of the last step's list.
    /// Waits for the device.
    ///
    /// # Errors
    /// Where the device cannot be read.
    pub fn of_sets(cache: &LayerCache) -> Result<Option<Self>> {
        let Some(CisIndex(sets)) = cache.policy_state() else { return Self::of_list(cache) };
        let all = sets.read()?.into_iter().map(|own| {
            let RangeSets { steps, retrieved, tokens: slots, .. } = own;
            Self { steps, retrieved, slots }
        });
        Ok(Some(all.fold(Self::default(), Self::add)))
    }
}

/// Slots that the last step attended to, by its index sets or its list: of each range, counted from
/// its first slot. Waits for the device.
///
/// # Errors
/// Where the device cannot be read.
pub(super) fn attended_by_sets(cache: &LayerCache) -> Result<Option<Vec<Vec<usize>>>> {
    let Some(CisIndex(sets)) = cache.policy_state() else {
        return Ok(SlotList::read_last(cache)?);
    };
    let read = sets.read()?;
    let each = read.len() / cache.layout().head_ranges().max(1);
    let slots = read.iter().enumerate().map(|(range, own)| {
        let length = cache.layout().lengths()[range / each.max(1)];
        own.slots(length).collect()
    });
    Ok(Some(slots.collect()))
}
