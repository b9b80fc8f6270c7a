//! Moves between slots in plain loops.

/// Row `rows[n]` of `from` to row `slots[n]` of `to`; negative slots are skipped.
pub(crate) fn copy<E: Copy>(from: &[E], rows: &[i32], to: &mut [E], slots: &[i32], width: usize) {
    for (&row, &slot) in rows.iter().zip(slots) {
        if let Ok(slot) = usize::try_from(slot) {
            to[slot * width..][..width].copy_from_slice(&from[row as usize * width..][..width]);
        }
    }
}

/// The kept rows of each range, whose indices ascend, to its beginning; the lists are offsets, kept
/// indices, starts and counts.
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

/// The last row of each range to its victim's place, where one goes; the lists are offsets,
/// lengths, victims, and whether one goes.
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
