//! `argmin_slots` in plain loops: the CPU path, and the oracle of the kernel's tests.

use super::Protection;
use crate::components::sentinels::NO_SLOT;

/// The slot of each range's lowest score; a protected slot only if all are protected; `-1` for an
/// empty range.
pub(crate) fn argmin(
    scores: &[f32],
    [offsets, lengths]: [&[i32]; 2],
    [positions, newest]: [&[i32]; 2],
    protection: Option<Protection>,
) -> Vec<i32> {
    let kv_heads = offsets.len() / newest.len().max(1);
    let ranges = offsets.iter().zip(lengths).enumerate();
    ranges
        .map(|(kv_head, (&offset, &length))| {
            let rank = |slot: i32| {
                let protected = protection.is_some_and(|Protection { sinks, recents }| {
                    let position = positions[slot as usize];
                    position < sinks || position > newest[kv_head / kv_heads.max(1)] - recents
                });
                (protected, scores[slot as usize])
            };
            let mut best: Option<i32> = None;
            for slot in offset..offset + length {
                if best.is_none_or(|best| rank(slot) < rank(best)) {
                    best = Some(slot);
                }
            }
            best.unwrap_or(NO_SLOT)
        })
        .collect()
}
