//! `window_starts` in plain loops: the CPU path, and the oracle of the kernel's tests.

use crate::Share;

/// The window starts of all ranges, `[B, Hkv]`.
pub(crate) fn starts(
    positions: &[i32],
    offsets: &[i32],
    lengths: &[i32],
    newest: &[i32],
    share: Share,
) -> Vec<i32> {
    let kv_heads = offsets.len() / newest.len();
    let ranges = offsets.iter().zip(lengths).enumerate();
    let starts = ranges.map(|(kv_head, (&offset, &length))| {
        let newest = usize::try_from(newest[kv_head / kv_heads]).unwrap_or(0);
        let first = share.first_seen(newest);
        let own = &positions[offset as usize..][..length as usize];
        own.partition_point(|&position| (position as usize) < first) as i32
    });
    starts.collect()
}
