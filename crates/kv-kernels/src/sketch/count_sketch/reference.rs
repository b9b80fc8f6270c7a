//! The ops on count-sketches in plain loops: the CPU path, and the oracle of the kernels' tests.

use super::hash::hashed;
use super::{HEAD_FIELDS, MAX_BUCKETS, SketchConfig};

/// The heads and hashes of sketches, on the host.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HostSketch<'a> {
    /// `[P, 6]`
    pub(crate) heads: &'a [i32],
    /// `[P, r, 4]`, or a table `[r, T]`.
    pub(crate) hashes: &'a [i32],
    pub(crate) config: SketchConfig,
    /// `D`
    pub(crate) head_dim: usize,
}

impl HostSketch<'_> {
    /// The six numbers of a range.
    pub(crate) fn head(&self, range: usize) -> [usize; HEAD_FIELDS] {
        std::array::from_fn(|field| self.heads[range * HEAD_FIELDS + field] as usize)
    }

    /// A token's index, if it is not negative and its range has a sketch.
    pub(crate) fn sketched(&self, range: usize, token: i32) -> Option<usize> {
        let [_, entries, ..] = self.head(range);
        usize::try_from(token).ok().filter(|_| entries > 0)
    }

    /// A token's entries and signs, one of each for every bucket.
    pub(crate) fn places(
        &self,
        range: usize,
        token: usize,
    ) -> impl Iterator<Item = (usize, f32)> + '_ {
        let [first, entries, ..] = self.head(range);
        let buckets = self.config.buckets;
        (0..buckets).map(move |bucket| {
            let (within, negative) = if let Some(tokens) = self.config.tabled {
                let place = self.hashes[bucket * tokens + token] as u32;
                (place / 2, place % 2 == 1)
            } else {
                let words = &self.hashes[(range * buckets + bucket) * 4..][..4];
                hashed(words, token as u32, entries as u32)
            };
            let sign = if negative { -1.0 } else { 1.0 };
            (first + bucket * entries + within as usize, sign)
        })
    }

    /// Adds `weight` times a token's key and value.
    pub(crate) fn add(
        &self,
        [keys, values]: [&mut [f32]; 2],
        [range, token]: [usize; 2],
        [key, value]: [&[f32]; 2],
        weight: f32,
    ) {
        for (entry, sign) in self.places(range, token) {
            let key_sign = if self.config.signed_keys { sign } else { 1.0 };
            for (entries, row, sign) in [(&mut *keys, key, key_sign), (&mut *values, value, sign)] {
                let entry = &mut entries[entry * self.head_dim..][..self.head_dim];
                entry.iter_mut().zip(row).for_each(|(sum, x)| *sum += x * (sign * weight));
            }
        }
    }

    /// A token's estimated key and value.
    pub(crate) fn query(
        &self,
        [keys, values]: [&[f32]; 2],
        range: usize,
        token: usize,
    ) -> [Vec<f32>; 2] {
        let buckets = self.config.buckets;
        let mut places = [(0, 0.0); MAX_BUCKETS];
        places.iter_mut().zip(self.places(range, token)).for_each(|(own, place)| *own = place);
        let estimate = |entries: &[f32], signed: bool| -> Vec<f32> {
            let columns = (0..self.head_dim).map(|column| {
                let mut parts = [0.0; MAX_BUCKETS];
                for (part, (entry, sign)) in parts.iter_mut().zip(&places[..buckets]) {
                    *part =
                        entries[entry * self.head_dim + column] * if signed { *sign } else { 1.0 };
                }
                median(&mut parts[..buckets])
            });
            columns.collect()
        };
        [estimate(keys, self.config.signed_keys), estimate(values, true)]
    }
}

fn median(parts: &mut [f32]) -> f32 {
    if let [a, b, c] = *parts {
        return a.min(b).max(a.max(b).min(c));
    }
    parts.sort_unstable_by(f32::total_cmp);
    let half = parts.len() / 2;
    if parts.len().is_multiple_of(2) { (parts[half - 1] + parts[half]) * 0.5 } else { parts[half] }
}
