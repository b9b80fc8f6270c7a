//! The same in plain loops.

use super::GroupReduction;

/// Adds probabilities of `logits` `[S, G]` to `sums` `[S]`; `log_sum_exp` is `[pairs, G]`.
pub(crate) fn add(
    sums: &mut [f32],
    logits: &[f32],
    log_sum_exp: &[f32],
    [offsets, lengths]: [&[i32]; 2],
    reduction: GroupReduction,
) {
    let group = logits.len() / sums.len();
    for (pair, (&offset, &length)) in offsets.iter().zip(lengths).enumerate() {
        let totals = &log_sum_exp[pair * group..][..group];
        for slot in offset as usize..(offset + length) as usize {
            let own = logits[slot * group..][..group].iter().zip(totals);
            // Where nothing was attended to, its total is −∞.
            let own =
                own.map(
                    |(logit, total)| {
                        if *total == f32::NEG_INFINITY { 0.0 } else { (logit - total).exp() }
                    },
                );
            sums[slot] += match reduction {
                GroupReduction::Mean => own.sum::<f32>() / group as f32,
                GroupReduction::Max => own.fold(0.0, f32::max),
                GroupReduction::Sum => own.sum(),
            };
        }
    }
}
