//! The choice of the evicted slot in plain loops: the CPU path, and the oracle of the kernels'
//! tests.

use crate::components::sentinels::{INFINITE_IMPORTANCE, NO_RECORD, WEIGHTLESS_LOGIT};

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
    /// `[S]`
    pub(crate) positions: Option<&'a [i32]>,
    pub(crate) guard: Option<HostGuard<'a>>,
    /// `1 / ln f`, where importances within a factor `f` are equal and the oldest of equal slots
    /// goes.
    pub(crate) levels: Option<f32>,
    pub(crate) kv_heads: usize,
    pub(crate) group: usize,
    /// Whether all heads of a sequence evict one common slot.
    pub(crate) together: bool,
}

/// [`super::Guard`] on the host.
pub(crate) struct HostGuard<'a> {
    /// `[B]`
    pub(crate) now: &'a [i32],
    pub(crate) sinks: i32,
    pub(crate) recents: i32,
}

/// [`super::Memory`] on the host.
pub(crate) struct HostRecords<'a> {
    /// `[S]`
    pub(crate) records: &'a mut [f32],
    /// `[B]`
    pub(crate) now: &'a [i32],
    /// `−ln γ`
    pub(crate) growth: f32,
}

impl HostRecords<'_> {
    /// Raises a slot's record to its importance, where that breaks it. Returns the record, or the
    /// importance of a slot that is no candidate.
    fn raise(&mut self, slot: usize, new: bool, importance: f32, growth: f32) -> f32 {
        let before = if new { NO_RECORD } else { self.records[slot] };
        let counts = !importance.is_nan() && importance < INFINITE_IMPORTANCE;
        let record = if counts { before.max(importance + growth) } else { before };
        self.records[slot] = record;
        if counts { record } else { importance }
    }
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

    /// The places of the next tokens, `[B, Hkv]`. Raises records, where there are some.
    pub(crate) fn next(
        &self,
        importance: &[f32],
        mut records: Option<HostRecords<'_>>,
    ) -> Vec<i32> {
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
                let sums = (0..slots_of_all as usize).map(all);
                self.argmin_importance(heads.start, sums, &mut records)
            });
            for kv_head in heads {
                let argmin = common.unwrap_or_else(|| {
                    let own = self.slots(kv_head).map(|slot| importance[slot]);
                    self.argmin_importance(kv_head, own, &mut records)
                });
                let full = self.lengths[kv_head] >= self.limits[kv_head];
                next.push(if full { argmin } else { self.lengths[kv_head] });
            }
        }
        next
    }

    /// The place of a head's least importance, or least record, among the slots that may be
    /// evicted.
    fn argmin_importance(
        &self,
        kv_head: usize,
        importance: impl Iterator<Item = f32>,
        records: &mut Option<HostRecords<'_>>,
    ) -> i32 {
        let newest = self.newest[kv_head];
        let sequence = kv_head / self.kv_heads;
        let growth = records.as_ref().map_or(0.0, |own| own.now[sequence] as f32 * own.growth);
        let mut best: Option<(i32, (f32, i32))> = None;
        for (slot_in_head, importance) in importance.enumerate() {
            let slot = self.slot(kv_head, slot_in_head);
            let slot_in_head = slot_in_head as i32;
            let importance = match records {
                Some(records) => records.raise(slot, slot_in_head == newest, importance, growth),
                None => importance,
            };
            let position = self.positions.map_or(0, |positions| positions[slot]);
            let stays = self.spares_newest && slot_in_head == newest
                || importance == INFINITE_IMPORTANCE
                || importance.is_nan()
                || self.guard.as_ref().is_some_and(|guard| {
                    let now = guard.now[sequence];
                    position < guard.sinks || position > now.saturating_sub(guard.recents)
                });
            let rank = match self.levels {
                Some(levels) => (((importance - growth) * levels).floor(), position),
                None => (importance, 0),
            };
            if !stays && best.is_none_or(|(_, lowest)| rank < lowest) {
                best = Some((slot_in_head, rank));
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
