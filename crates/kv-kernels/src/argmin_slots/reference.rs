//! Argmin in plain loops.

/// The slot of each range's lowest score; `-1` for an empty range.
pub(crate) fn argmin(scores: &[f32], offsets: &[i32], lengths: &[i32]) -> Vec<i32> {
    offsets
        .iter()
        .zip(lengths)
        .map(|(&offset, &length)| {
            let mut best: Option<i32> = None;
            for slot in offset..offset + length {
                if best.is_none_or(|best| scores[slot as usize] < scores[best as usize]) {
                    best = Some(slot);
                }
            }
            best.unwrap_or(-1)
        })
        .collect()
}
