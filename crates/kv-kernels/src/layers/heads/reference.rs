//! The ops on heads in plain loops, over rows on all cores: the CPU path, and the oracle of the
//! kernels' tests.

use rayon::prelude::*;

/// Numbers that a core writes at a time, as waking it takes some 10 µs.
const PART: usize = 1 << 14;

/// The arguments of a call, as f32. The caller rounds the results.
pub(crate) struct Tokens<'a> {
    /// `[N, (Hq + 2 Hkv) D]`
    pub(crate) projected: &'a [f32],
    /// `[N]`
    pub(crate) positions: &'a [i32],
    /// Cosines and sines, `[P, D / 2]`, where heads are rotated.
    pub(crate) rotation: Option<[&'a [f32]; 2]>,
    /// Norm weights of queries and keys, `[D]`, and epsilon.
    pub(crate) norms: Option<([&'a [f32]; 2], f32)>,
    pub(crate) query_heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    /// Rounds to the dtype.
    pub(crate) round: fn(f32) -> f32,
}

impl Tokens<'_> {
    /// Writes head `head` (counted over queries, keys, values) of token `token` to `row`, after
    /// norm and RoPE.
    fn write_head(&self, token: usize, head: usize, row: &mut [f32]) {
        let heads = self.query_heads + 2 * self.kv_heads;
        let at = (token * heads + head) * self.head_dim;
        row.copy_from_slice(&self.projected[at..][..self.head_dim]);
        if head >= self.query_heads + self.kv_heads {
            return;
        }
        if let Some((weights, epsilon)) = self.norms {
            let weight = weights[usize::from(head >= self.query_heads)];
            let mean = row.iter().map(|x| x * x).sum::<f32>() / self.head_dim as f32;
            let root = (mean + epsilon).sqrt();
            // Rounded to the dtype before and after the multiplication by the weight, as in the
            // models' own code.
            for (x, weight) in row.iter_mut().zip(weight) {
                *x = (self.round)((self.round)(*x / root) * weight);
            }
        }
        if let Some([cos, sin]) = self.rotation {
            let half = self.head_dim / 2;
            let angle = self.positions[token] as usize * half;
            for i in 0..half {
                let (first, second) = (row[i], row[i + half]);
                let (cos, sin) = (cos[angle + i], sin[angle + i]);
                row[i] = first * cos - second * sin;
                row[i + half] = second * cos + first * sin;
            }
        }
    }

    /// The `count` heads from `first` on of all sequences, of `tokens` tokens each, `[B, count,
    /// tokens, D]`.
    pub(crate) fn heads(&self, first: usize, count: usize, tokens: usize) -> Vec<f32> {
        let mut out = vec![0.0; self.positions.len() * count * self.head_dim];
        let rows = out.par_chunks_mut(self.head_dim).with_min_len(PART.div_ceil(self.head_dim));
        rows.enumerate().for_each(|(row, to)| {
            let (sequence, head, token) =
                (row / (count * tokens), row / tokens % count, row % tokens);
            self.write_head(sequence * tokens + token, first + head, to);
        });
        out
    }
}
