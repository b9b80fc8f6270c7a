//! `nearest_slots` in plain loops: the CPU path, and the oracle of the kernels' tests.

use rayon::prelude::*;

use crate::components::sentinels::NO_COSINE;

/// The arguments of a call, with lists as in the public function.
#[derive(Debug)]
pub(crate) struct Pairing<'a> {
    /// `[S, D]`
    pub(crate) keys: &'a [f32],
    pub(crate) head_dim: usize,
    /// `[P, N]`
    pub(crate) of: &'a [i32],
    /// `[P]`
    pub(crate) of_counts: &'a [i32],
    /// `[P, M]`
    pub(crate) among: &'a [i32],
    /// `[P]`
    pub(crate) among_counts: &'a [i32],
    pub(crate) earlier: bool,
}

impl Pairing<'_> {
    /// Places and cosines, `[P, N]`.
    pub(crate) fn nearest(&self) -> (Vec<i32>, Vec<f32>) {
        let rows = self.of_counts.len();
        let (width, others) = (self.of.len() / rows, self.among.len() / rows);
        let found = (0..rows).into_par_iter().flat_map(|row| {
            let among = &self.among[row * others..][..self.among_counts[row] as usize];
            let units: Vec<_> = among.iter().map(|&slot| self.direction(slot)).collect();
            let of = &self.of[row * width..][..width];
            let count = self.of_counts[row] as usize;
            let total_kv_heads: Vec<(i32, f32)> = (0..width)
                .into_par_iter()
                .map(|index| {
                    if index >= count {
                        return (-1, NO_COSINE);
                    }
                    let own = self.direction(of[index]);
                    let seen = if self.earlier { index.min(among.len()) } else { among.len() };
                    let mut best = (-1, NO_COSINE);
                    for (other, unit) in units[..seen].iter().enumerate() {
                        let cosine: f32 = own.iter().zip(unit).map(|(a, b)| a * b).sum();
                        if among[other] != of[index] && cosine > best.1 {
                            best = (other as i32, cosine);
                        }
                    }
                    best
                })
                .collect();
            total_kv_heads
        });
        found.unzip()
    }

    /// A key divided by its norm, or 0.
    fn direction(&self, slot: i32) -> Vec<f32> {
        let key = &self.keys[slot as usize * self.head_dim..][..self.head_dim];
        let norm = key.iter().map(|x| x * x).sum::<f32>().sqrt();
        let factor = if norm > 0.0 { 1.0 / norm } else { 0.0 };
        key.iter().map(|x| x * factor).collect()
    }
}
