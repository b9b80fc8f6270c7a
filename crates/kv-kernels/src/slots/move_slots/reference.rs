//! The ops that move slots in plain loops: the CPU path, and the oracle of the kernels' tests.

/// Copies row `rows[n]` of `from` to row `slots[n]` of `to`. Negative slots are skipped.
pub(crate) fn copy<E: Copy>(from: &[E], rows: &[i32], to: &mut [E], slots: &[i32], width: usize) {
    for (&row, &slot) in rows.iter().zip(slots) {
        if let Ok(slot) = usize::try_from(slot) {
            to[slot * width..][..width].copy_from_slice(&from[row as usize * width..][..width]);
        }
    }
}

/// Moves the kept rows of each range to its beginning. The lists are offsets, kept indices, starts
/// and counts; kept indices ascend.
pub(crate) fn compact<E: Copy>(
    pool: &mut [E],
    [offsets, kept, starts, counts]: [&[i32]; 4],
    width: usize,
) {
    for ((&offset, &start), &count) in offsets.iter().zip(starts).zip(counts) {
        let kept = &kept[start as usize..][..count as usize];
        for (to, &from) in kept.iter().enumerate() {
            let (to, from) = (offset as usize + to, (offset + from) as usize);
            pool.copy_within(from * width..(from + 1) * width, to * width);
        }
    }
}

/// Moves the last row of each range to its victim's place, where the range drops one. The lists are
/// offsets, lengths, victims, and whether a range drops its victim.
pub(crate) fn drop_rows<E: Copy>(
    pool: &mut [E],
    [offsets, lengths, victims, goes]: [&[i32]; 4],
    width: usize,
) {
    for (kv_head, &victim) in victims.iter().enumerate() {
        if goes[kv_head] == 0 || victim < 0 || lengths[kv_head] == 0 {
            continue;
        }
        let last = (offsets[kv_head] + lengths[kv_head] - 1) as usize;
        pool.copy_within(last * width..(last + 1) * width, victim as usize * width);
    }
}
