//! The choice of the evicted slot in plain loops: the CPU path, and the oracle of the kernels'
//! tests.

use crate::components::sentinels::{INFINITE_IMPORTANCE, WEIGHTLESS_LOGIT};

/// The arguments of a choice, after the attention, as slices in row-major order.
pub(crate) struct Decision<'a> {
    /// Weighted logits, `[S, G]`.
    pub(crate) logits: &'a [f32],
    /// `[B, Hq]`
    pub(crate) log_sum_exp: &'a [f32],
    /// `[S]`
    pub(crate) log_norms: &'a [f32],
    /// `[B, Hkv]`
    pub(crate) offsets: &'a [i32],
    /// `[B, Hkv]`
    pub(crate) lengths: &'a [i32],
    /// `[B, Hkv]`
    pub(crate) limits: &'a [i32],
    /// `[B, Hkv]`
    pub(crate) newest: &'a [i32],
    pub(crate) spares_newest: bool,
    pub(crate) guard: Option<HostGuard<'a>>,
    pub(crate) kv_heads: usize,
    pub(crate) group: usize,
    /// Whether all heads of a sequence evict one common slot.
    pub(crate) together: bool,
}

/// [`super::Guard`] on the host.
pub(crate) struct HostGuard<'a> {
    /// `[S]`
    pub(crate) positions: &'a [i32],
    /// `[B]`
    pub(crate) now: &'a [i32],
    pub(crate) sinks: i32,
    pub(crate) recents: i32,
}

impl Decision<'_> {
    /// Logarithms of importances, `[S]`.
    pub(crate) fn importance(&self) -> Vec<f32> {
        let mut importance = vec![INFINITE_IMPORTANCE; self.log_norms.len()];
        for kv_head in 0..self.offsets.len() {
            let sums = &self.log_sum_exp[kv_head * self.group..][..self.group];
            for slot in self.slots(kv_head) {
                let logits = &self.logits[slot * self.group..][..self.group];
                // A NaN logit gives a NaN importance.
                if logits[0] >= WEIGHTLESS_LOGIT || logits[0].is_nan() {
                    let shares = logits.iter().zip(sums).map(|(logit, sum)| logit - sum);
                    importance[slot] = log_sum_exp(shares) + self.log_norms[slot];
                }
            }
        }
        importance
    }

    /// The places of the next tokens, `[B, Hkv]`.
    pub(crate) fn next(&self, importance: &[f32]) -> Vec<i32> {
        let mut next = Vec::with_capacity(self.offsets.len());
        for sequence in 0..self.offsets.len() / self.kv_heads {
            let heads = sequence * self.kv_heads..(sequence + 1) * self.kv_heads;
            let common = self.together.then(|| {
                let slots_of_all =
                    heads.clone().map(|kv_head| self.lengths[kv_head]).min().unwrap_or(0);
                let all = |slot_in_head: usize| {
                    let own =
                        heads.clone().map(|kv_head| importance[self.slot(kv_head, slot_in_head)]);
                    let own: Vec<f32> =
                        own.filter(|importance| *importance != INFINITE_IMPORTANCE).collect();
                    if own.is_empty() { INFINITE_IMPORTANCE } else { log_sum_exp(own.into_iter()) }
                };
                self.argmin_importance(heads.start, (0..slots_of_all as usize).map(all))
            });
            for kv_head in heads {
                let own = || {
                    let slots = self.slots(kv_head);
                    self.argmin_importance(kv_head, slots.map(|slot| importance[slot]))
                };
                let full = self.lengths[kv_head] >= self.limits[kv_head];
                let argmin_importance = || common.unwrap_or_else(own);
                next.push(if full { argmin_importance() } else { self.lengths[kv_head] });
            }
        }
        next
    }

    /// The place of a head's least importance among the slots that may be evicted.
    fn argmin_importance(&self, kv_head: usize, importance: impl Iterator<Item = f32>) -> i32 {
        let newest = self.newest[kv_head];
        let mut best: Option<(i32, f32)> = None;
        for (slot_in_head, importance) in importance.enumerate() {
            let slot = self.slot(kv_head, slot_in_head);
            let slot_in_head = slot_in_head as i32;
            let stays = self.spares_newest && slot_in_head == newest
                || importance == INFINITE_IMPORTANCE
                || importance.is_nan()
                || self.guard.as_ref().is_some_and(|guard| {
                    let now = guard.now[kv_head / self.kv_heads];
                    let position = guard.positions[slot];
                    position < guard.sinks || position > now.saturating_sub(guard.recents)
                });
            if !stays && best.is_none_or(|(_, lowest)| importance < lowest) {
                best = Some((slot_in_head, importance));
            }
        }
        best.map_or(newest, |(slot_in_head, _)| slot_in_head)
    }

    fn slot(&self, kv_head: usize, slot_in_head: usize) -> usize {
        self.offsets[kv_head] as usize + slot_in_head
    }

    fn slots(&self, kv_head: usize) -> std::ops::Range<usize> {
        let start = self.offsets[kv_head] as usize;
        start..start + usize::try_from(self.lengths[kv_head]).unwrap_or(0)
    }
}

/// `ln Σ exp(x)`, with the maximum subtracted.
fn log_sum_exp(values: impl Iterator<Item = f32> + Clone) -> f32 {
    let max = values.clone().fold(f32::NEG_INFINITY, f32::max);
    max + values.map(|x| (x - max).exp()).sum::<f32>().ln()
}
