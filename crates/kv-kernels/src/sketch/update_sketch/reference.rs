//! `update_sketch` in plain loops: the CPU path, and the oracle of the kernels' tests.

use super::{ABSENT, SketchUpdateOptions};
use crate::sketch::count_sketch::reference::HostSketch;

/// One call's arguments, in row-major order; keys and values widened to f32.
pub(crate) struct Host<'a> {
    pub(crate) sketch: HostSketch<'a>,
    /// Keys and values of entries, `[N, D]`.
    pub(crate) entries: [&'a mut [f32]; 2],
    /// Keys and values of slots, `[S, D]`.
    pub(crate) slots: [&'a mut [f32]; 2],
    /// `[S]`
    pub(crate) positions: &'a mut [i32],
    /// `[B, Hkv]`
    pub(crate) offsets: &'a [i32],
    /// `[B, Hkv]`
    pub(crate) lengths: &'a mut [i32],
    /// `[S]`
    pub(crate) slot_scores: &'a mut [f32],
    /// `[T]`
    pub(crate) token_scores: &'a mut [f32],
    /// `[P, 2]`
    pub(crate) moved: &'a mut [i32],
    /// Rounds to the slots' dtype.
    pub(crate) round: fn(f32) -> f32,
}

/// A step's logits.
pub(crate) struct HostLogits<'a> {
    /// `[S, G]`; `None` where they lie among the tokens' logits.
    pub(crate) slots: Option<&'a [f32]>,
    /// `[T, G]`
    pub(crate) tokens: &'a [f32],
    /// `[B, Hq]`
    pub(crate) log_sum_exp: &'a [f32],
}

impl Host<'_> {
    pub(crate) fn update(
        &mut self,
        logits: &HostLogits<'_>,
        newest: &[i32],
        options: SketchUpdateOptions,
    ) {
        let total_kv_heads = self.offsets.len();
        for kv_head in 0..total_kv_heads {
            let newest = newest[kv_head * newest.len() / total_kv_heads];
            self.accumulate(kv_head, logits, newest);
            self.evict(kv_head, newest, options.slack);
            self.swap(kv_head, newest, options.replace_rate);
        }
    }

    fn accumulate(&mut self, kv_head: usize, logits: &HostLogits<'_>, newest: i32) {
        let group = logits.tokens.len() / self.token_scores.len();
        let totals = &logits.log_sum_exp[kv_head * group..][..group];
        let mass = |own: &[f32]| -> f32 {
            let sum: f32 = own.iter().zip(totals).map(|(logit, total)| (logit - total).exp()).sum();
            // NaN counts as 0: a token with a NaN score would be found in no part.
            if sum >= 0.0 { sum } else { 0.0 }
        };
        let [_, _, first_token, ..] = self.sketch.head(kv_head);
        for slot in self.live(kv_head) {
            let own = match logits.slots {
                Some(slots) => &slots[slot * group..][..group],
                None => {
                    let token = first_token + self.positions[slot] as usize;
                    &logits.tokens[token * group..][..group]
                }
            };
            // A new token's score begins with this step.
            let before = if self.positions[slot] == newest { 0.0 } else { self.slot_scores[slot] };
            self.slot_scores[slot] = before + mass(own);
        }
        for token in self.tokens(kv_head, newest) {
            if self.token_scores[token] >= 0.0 {
                self.token_scores[token] += mass(&logits.tokens[token * group..][..group]);
            }
        }
    }

    /// Slots of a key-value head.
    fn live(&self, kv_head: usize) -> std::ops::Range<usize> {
        let start = self.offsets[kv_head] as usize;
        start..start + self.lengths[kv_head] as usize
    }

    /// Tokens of a key-value head so far.
    fn tokens(&self, kv_head: usize, newest: i32) -> std::ops::Range<usize> {
        let [_, _, first, capacity, ..] = self.sketch.head(kv_head);
        first..first + usize::try_from(newest + 1).unwrap_or(0).min(capacity)
    }

    /// The slot of the lowest score among slots whose tokens are before `bound`.
    fn lowest(&self, kv_head: usize, bound: i32) -> Option<usize> {
        let slots = self.live(kv_head).filter(|&slot| self.positions[slot] < bound);
        slots.min_by(|&a, &b| self.slot_scores[a].total_cmp(&self.slot_scores[b]))
    }

    fn evict(&mut self, kv_head: usize, newest: i32, slack: usize) {
        let [_, entries, _, _, limit, recents] = self.sketch.head(kv_head);
        let length = self.lengths[kv_head] as usize;
        if entries == 0 || length <= limit + slack {
            return;
        }
        for _ in 0..length - limit {
            let Some(victim) = self.lowest(kv_head, newest + 1 - recents as i32) else {
                // All slots are recent, as in a sequence that has ended and stays at its position.
                // The last slots are dropped, and not added to the sketch.
                self.lengths[kv_head] = limit as i32;
                return;
            };
            self.put(kv_head, victim);
            let last = self.live(kv_head).end - 1;
            self.copy(last, victim);
            self.lengths[kv_head] -= 1;
            self.moved[2 * kv_head] += 1;
        }
    }

    fn swap(&mut self, kv_head: usize, newest: i32, rate: f32) {
        let [_, entries, first_token, _, limit, recents] = self.sketch.head(kv_head);
        if entries == 0 {
            return;
        }
        let recent = (self.lengths[kv_head] - (limit as i32 - recents as i32)).max(0);
        let bound = newest + 1 - recent;
        while let Some(slot) = self.lowest(kv_head, bound) {
            let tokens = self.tokens(kv_head, newest).filter(|&at| self.token_scores[at] >= 0.0);
            let best = tokens.max_by(|&a, &b| {
                // The first of equal tokens.
                self.token_scores[a].total_cmp(&self.token_scores[b]).then(b.cmp(&a))
            });
            let Some(best) = best else { return };
            // NaN exchanges nothing.
            let swaps = self.slot_scores[slot] * rate < self.token_scores[best];
            if !swaps {
                return;
            }
            let token = best - first_token;
            let entries = [&*self.entries[0], &*self.entries[1]];
            let [key, value] = self.sketch.query(entries, kv_head, token);
            let revived =
                [key, value].map(|row| row.into_iter().map(self.round).collect::<Vec<_>>());
            let [keys, values] = &mut self.entries;
            self.sketch.add([keys, values], [kv_head, token], [&revived[0], &revived[1]], -1.0);
            self.put(kv_head, slot);
            let head_dim = self.sketch.head_dim;
            for (pool, row) in self.slots.iter_mut().zip(&revived) {
                pool[slot * head_dim..][..head_dim].copy_from_slice(row);
            }
            self.positions[slot] = token as i32;
            self.slot_scores[slot] = std::mem::replace(&mut self.token_scores[best], ABSENT);
            self.moved[2 * kv_head + 1] += 1;
        }
    }

    /// Puts a slot's token into the sketch.
    fn put(&mut self, kv_head: usize, slot: usize) {
        let head_dim = self.sketch.head_dim;
        let token = self.positions[slot] as usize;
        let [_, _, first_token, ..] = self.sketch.head(kv_head);
        let [keys, values] = &mut self.entries;
        let row = |pool: &[f32]| pool[slot * head_dim..][..head_dim].to_vec();
        let [key, value] = [row(self.slots[0]), row(self.slots[1])];
        self.sketch.add([keys, values], [kv_head, token], [&key, &value], 1.0);
        self.token_scores[first_token + token] = self.slot_scores[slot];
    }

    fn copy(&mut self, from: usize, to: usize) {
        let head_dim = self.sketch.head_dim;
        for pool in &mut self.slots {
            pool.copy_within(from * head_dim..(from + 1) * head_dim, to * head_dim);
        }
        self.positions[to] = self.positions[from];
        self.slot_scores[to] = self.slot_scores[from];
    }
}
