//! The ops that write rows in plain loops: the CPU path, and the oracle of the kernels' tests.

/// Copies row `n` of `rows` to row `slots[n]` of `pool`. Negative slots are skipped.
pub(crate) fn scatter<E: Copy>(pool: &mut [E], slots: &[i32], rows: &[E], width: usize) {
    for (slot, row) in slots.iter().zip(rows.chunks_exact(width)) {
        if let Ok(slot) = usize::try_from(*slot) {
            pool[slot * width..][..width].copy_from_slice(row);
        }
    }
}
