//! Attention over slots and sketched tokens in plain loops: the CPU path, and the oracle of the
//! kernels' tests.

use crate::sketch::count_sketch::reference::HostSketch;

/// One call's arguments, in row-major order, widened to f32.
pub(crate) struct Problem<'a> {
    /// `[B, Hq, D]`
    pub(crate) query: &'a [f32],
    /// Keys and values of slots, `[S, D]`.
    pub(crate) slots: [&'a [f32]; 2],
    /// Offsets and lengths of ranges, `[B, Hkv]`.
    pub(crate) ranges: [&'a [i32]; 2],
    pub(crate) sketch: HostSketch<'a>,
    /// Keys and values of entries, `[N, D]`.
    pub(crate) entries: [&'a [f32]; 2],
    /// `[T]`
    pub(crate) scores: &'a [f32],
    /// `[B]`
    pub(crate) newest: &'a [i32],
    pub(crate) scale: f32,
    /// Rounds to the cache's dtype.
    pub(crate) round: fn(f32) -> f32,
}

/// The results of a call, in f32.
pub(crate) struct Solution {
    /// `[B, Hq, D]`
    pub(crate) output: Vec<f32>,
    /// `[B, Hq]`
    pub(crate) log_sum_exp: Vec<f32>,
    /// `[S, G]`
    pub(crate) slot_logits: Vec<f32>,
    /// `[T, G]`
    pub(crate) token_logits: Vec<f32>,
}

/// Where a row's logits are written.
#[derive(Clone, Copy)]
enum Place {
    Slot(usize),
    Token(usize),
}

impl Problem<'_> {
    pub(crate) fn solve(&self) -> Solution {
        let head_dim = self.sketch.head_dim;
        let total_kv_heads = self.ranges[0].len();
        let group = self.query.len() / head_dim / total_kv_heads;
        let kv_heads = total_kv_heads / self.newest.len();
        let mut solution = Solution {
            output: vec![0.0; self.query.len()],
            log_sum_exp: vec![f32::NEG_INFINITY; total_kv_heads * group],
            slot_logits: vec![0.0; self.slots[0].len() / head_dim * group],
            token_logits: vec![0.0; self.scores.len() * group],
        };
        for kv_head in 0..total_kv_heads {
            let rows = self.rows(kv_head, self.newest[kv_head / kv_heads]);
            for g in 0..group {
                let head = kv_head * group + g;
                let query = &self.query[head * head_dim..][..head_dim];
                let logit = |key: &[f32]| -> f32 {
                    query.iter().zip(key).map(|(q, k)| q * k).sum::<f32>() * self.scale
                };
                let logits: Vec<f32> = rows.iter().map(|(_, [key, _])| logit(key)).collect();
                let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                if rows.is_empty() {
                    continue;
                }
                let sum: f32 = logits.iter().map(|logit| (logit - max).exp()).sum();
                solution.log_sum_exp[head] = max + sum.ln();
                let output = &mut solution.output[head * head_dim..][..head_dim];
                for ((place, [_, value]), logit) in rows.iter().zip(&logits) {
                    match *place {
                        Place::Slot(slot) => solution.slot_logits[slot * group + g] = *logit,
                        Place::Token(token) => solution.token_logits[token * group + g] = *logit,
                    }
                    let p = (logit - max).exp() / sum;
                    output.iter_mut().zip(value).for_each(|(o, v)| *o += p * v);
                }
            }
        }
        solution
    }

    /// The keys and values that a key-value head attends to.
    fn rows(&self, kv_head: usize, newest: i32) -> Vec<(Place, [Vec<f32>; 2])> {
        let head_dim = self.sketch.head_dim;
        let (offset, length) = (self.ranges[0][kv_head] as usize, self.ranges[1][kv_head] as usize);
        let slots = (offset..offset + length).map(|slot| {
            let row = |pool: &[f32]| pool[slot * head_dim..][..head_dim].to_vec();
            (Place::Slot(slot), self.slots.map(row))
        });
        let [_, entries, first_token, capacity, ..] = self.sketch.head(kv_head);
        let seen = usize::try_from(newest + 1).unwrap_or(0).min(capacity);
        let seen = if entries == 0 { 0 } else { seen };
        let tokens = (0..seen).filter(|token| self.scores[first_token + token] >= 0.0);
        let tokens = tokens.map(|token| {
            let estimated = self.sketch.query(self.entries, kv_head, token);
            let rounded = estimated.map(|row| row.into_iter().map(self.round).collect());
            (Place::Token(first_token + token), rounded)
        });
        slots.chain(tokens).collect()
    }
}
