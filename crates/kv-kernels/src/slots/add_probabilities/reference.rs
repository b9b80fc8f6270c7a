//! `add_probabilities` in plain loops: the CPU path, and the oracle of the kernels' tests.

use super::GroupReduction;

/// One call's arguments, as slices in row-major order.
pub(crate) struct Probabilities<'a> {
    /// `[S, G]`
    pub(crate) logits: &'a [f32],
    /// `[total_kv_heads, G]`
    pub(crate) log_sum_exp: &'a [f32],
    /// `[total_kv_heads]`
    pub(crate) offsets: &'a [i32],
    /// `[total_kv_heads]`
    pub(crate) lengths: &'a [i32],
    pub(crate) reduction: GroupReduction,
}

impl Probabilities<'_> {
    /// Calls `take` for every live slot, with its probability and whether it is its range's last
    /// slot.
    pub(crate) fn each(&self, mut take: impl FnMut(usize, f32, bool)) {
        let group = self.log_sum_exp.len() / self.offsets.len();
        for (kv_head, (&offset, &length)) in self.offsets.iter().zip(self.lengths).enumerate() {
            let totals = &self.log_sum_exp[kv_head * group..][..group];
            let end = (offset + length) as usize;
            for slot in offset as usize..end {
                let own = self.logits[slot * group..][..group].iter().zip(totals);
                // A head that attends to nothing has a log-sum-exp of −∞.
                let own =
                    own.map(
                        |(logit, total)| {
                            if *total == f32::NEG_INFINITY { 0.0 } else { (logit - total).exp() }
                        },
                    );
                let reduced = match self.reduction {
                    GroupReduction::Mean => own.sum::<f32>() / group as f32,
                    GroupReduction::Max => own.fold(0.0, f32::max),
                    GroupReduction::Sum => own.sum(),
                };
                take(slot, reduced, slot + 1 == end);
            }
        }
    }
}
