//! The ops on heads in plain loops: the CPU path, and the oracle of the kernels' tests.

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
    /// Head `head` (counted over queries, keys, values) of token `token`, after norm and RoPE.
    pub(crate) fn head(&self, token: usize, head: usize) -> Vec<f32> {
        let heads = self.query_heads + 2 * self.kv_heads;
        let at = (token * heads + head) * self.head_dim;
        let mut row = self.projected[at..][..self.head_dim].to_vec();
        if head >= self.query_heads + self.kv_heads {
            return row;
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
        row
    }

    /// The `count` heads from `first` on of all sequences, of `tokens` tokens each, `[B, count,
    /// tokens, D]`.
    pub(crate) fn heads(&self, first: usize, count: usize, tokens: usize) -> Vec<f32> {
        let all = self.positions.len();
        let mut out = Vec::with_capacity(all * count * self.head_dim);
        for start in (0..all).step_by(tokens.max(1)) {
            for head in first..first + count {
                for token in start..start + tokens {
                    out.extend(self.head(token, head));
                }
            }
        }
        out
    }
}
