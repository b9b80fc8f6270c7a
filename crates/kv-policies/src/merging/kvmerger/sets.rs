//! The choice of neighbours that become one slot.

use kv_core::{rank, top};

/// What becomes of each head's tokens, in the order of their positions.
pub(super) struct Sets {
    /// The pivot that a token goes into: the token itself where it stays, `None` where it is
    /// dropped.
    pub(super) pivots: Vec<Vec<Option<usize>>>,
    /// The logarithm of a token's weight in its set.
    pub(super) log_weights: Vec<Vec<f32>>,
}

impl Sets {
    /// The tokens that stay.
    pub(super) fn kept(&self) -> Vec<Vec<u32>> {
        let own = |(at, pivot): (usize, &Option<usize>)| (*pivot == Some(at)).then_some(at as u32);
        let heads = self.pivots.iter();
        heads.map(|pivots| pivots.iter().enumerate().filter_map(own).collect()).collect()
    }
}

/// Gives pivots the sums over all tokens of their sets.
pub(super) fn add_up(pivots: &[Option<usize>], values: &mut [f32]) {
    for (at, pivot) in pivots.iter().enumerate() {
        if let Some(pivot) = pivot.filter(|&pivot| pivot != at) {
            values[pivot] += values[at];
        }
    }
}

/// How one head's tokens become `budget` slots.
pub(super) struct Rules {
    pub(super) budget: usize,
    /// Last tokens, and tokens of most attention, that stay as they are.
    pub(super) recents: usize,
    pub(super) heavy: usize,
    /// Cosine that neighbours must exceed.
    pub(super) threshold: f32,
}

impl Rules {
    /// The pivot of each token. `cosines[t]` is the cosine of the keys of tokens `t` and `t + 1`.
    pub(super) fn pivots(&self, attention: &[f32], cosines: &[f32]) -> Vec<Option<usize>> {
        let tokens = attention.len();
        if tokens <= self.budget {
            return (0..tokens).map(Some).collect();
        }
        let old = tokens - self.recents;
        let mut stays = vec![false; tokens];
        stays[old..].fill(true);
        top(&attention[..old], self.heavy).into_iter().for_each(|at| stays[at as usize] = true);

        // The most similar neighbours join first: the last one's cosine is the head's ε.
        let mut joined = vec![false; tokens];
        let mut missing = tokens - self.budget;
        for at in rank(&cosines[..tokens - 1]).into_iter().map(|at| at as usize) {
            // False for a NaN, too.
            let similar = cosines[at] > self.threshold;
            if missing == 0 || !similar {
                break;
            }
            if !stays[at] && !stays[at + 1] {
                joined[at] = true;
                missing -= 1;
            }
        }
        let mut pivots = vec![None; tokens];
        let mut sets: Vec<(usize, f32)> = Vec::new();
        let mut start = 0;
        for (at, &joins) in joined.iter().enumerate() {
            if joins {
                continue;
            }
            let own = start..at + 1;
            let pivot = own.clone().rev().max_by(|&a, &b| attention[a].total_cmp(&attention[b]));
            let sum = own.clone().map(|at| attention[at]).sum();
            if let Some(pivot) = pivot {
                pivots[own].fill(Some(pivot));
                if !stays[pivot] {
                    sets.push((pivot, sum));
                }
            }
            start = at + 1;
        }
        // Where too few are similar, the sets of least attention go, the later ones among equals.
        sets.sort_by(|a, b| a.1.total_cmp(&b.1).then(b.0.cmp(&a.0)));
        let mut dropped = vec![false; tokens];
        sets.into_iter().take(missing).for_each(|(pivot, _)| dropped[pivot] = true);
        for pivot in &mut pivots {
            *pivot = pivot.filter(|&pivot| !dropped[pivot]);
        }
        pivots
    }
}
