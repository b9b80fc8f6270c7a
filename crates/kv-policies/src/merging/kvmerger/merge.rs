//! Similarities and distances of neighbours, and the merge itself.

use burn::tensor::{DType, Int, Tensor};
use kv_core::{LayerCache, Selection, read_f32};
use kv_kernels::{KeyRule, MergeOptions, VOTES_RADIX};
use rayon::prelude::*;

use super::KvMerger;
use super::sets::{Rules, Sets};
use crate::Result;
use crate::merging::merge_groups::{Groups, Merged};

impl KvMerger {
    /// The sets of heads whose `keys`, `[N, D]`, follow each other in the order of positions, with
    /// the attention that each token has had, and the slots that each head may keep.
    pub(super) fn sets(
        &self,
        keys: Tensor<2>,
        attention: &[Vec<f32>],
        budgets: &[usize],
    ) -> Result<Sets> {
        let tokens = keys.dims()[0];
        let keys = keys.cast(DType::F32);
        let mut cosines = match tokens {
            0 | 1 => Vec::new(),
            _ => read_f32("cosines", neighbours(&keys))?,
        };
        cosines.resize(tokens, 0.0);
        let firsts: Vec<usize> = attention
            .iter()
            .scan(0, |end, own| {
                let first = *end;
                *end += own.len();
                Some(first)
            })
            .collect();
        let heads = attention.par_iter().zip(budgets).zip(&firsts);
        let pivots: Vec<Vec<Option<usize>>> = heads
            .map(|((own, &budget), &first)| {
                let share = |share: f64| (budget as f64 * share) as usize;
                let (recents, heavy) = (share(self.recent_share), share(self.heavy_share));
                let rules = Rules { budget, recents, heavy, threshold: self.threshold };
                rules.pivots(own, &cosines[first..first + own.len()])
            })
            .collect();
        let log_weights = log_weights(&keys, &pivots, &firsts)?;
        Ok(Sets { pivots, log_weights })
    }

    /// Merges sets into their pivots' slots: rows of `from`, or of the cache. `orders` are the
    /// places of each head's tokens among its rows.
    pub(super) fn merge(
        &self,
        cache: &mut LayerCache,
        from: Option<[&Tensor<2>; 2]>,
        sets: &Sets,
        orders: &[Vec<u32>],
    ) -> Result<()> {
        let lengths: Vec<usize> = orders.iter().map(Vec::len).collect();
        let heads = || sets.pivots.iter().zip(orders);
        let mut kept: Vec<Vec<u32>> = sets.kept();
        for (kept, order) in kept.iter_mut().zip(orders) {
            kept.iter_mut().for_each(|at| *at = order[*at as usize]);
            kept.sort_unstable();
        }
        let device = cache.options().device.clone();
        let (firsts, rows): (Vec<usize>, usize) = match from {
            Some([keys, _]) => {
                let [rows, _] = keys.dims();
                ((0..orders.len()).map(|range| range * (rows / orders.len())).collect(), rows)
            }
            None => (cache.layout().offsets().to_vec(), cache.positions().dims()[0]),
        };
        let selection = Selection::new(kept)?;
        let groups = Groups::new(&selection, &lengths, &firsts, &device)?;
        if groups.is_empty() {
            return Ok(());
        }
        // `goes` has the token that each token goes into, `weights` a token's weights by its row.
        let mut goes: Vec<Vec<Option<u32>>> = Vec::with_capacity(orders.len());
        let mut weights = [0.0, 0.0, 1.0, 0.0].repeat(rows);
        for (((pivots, order), own), first) in heads().zip(&sets.log_weights).zip(&firsts) {
            let mut to = vec![None; order.len()];
            for (at, &place) in order.iter().enumerate() {
                to[place as usize] = pivots[at].map(|pivot| order[pivot]);
                weights[4 * (first + place as usize) + 1] = own[at];
            }
            goes.push(to);
        }
        let (kept, victims) = (selection.kept()?, groups.victims()?);
        let width = victims.iter().map(Vec::len).max().unwrap_or_default().max(1);
        let mut targets = vec![-1; victims.len() * width];
        for (range, (to, victims)) in targets.chunks_mut(width).zip(victims).enumerate() {
            for (to, &victim) in to.iter_mut().zip(victims) {
                let pivot = goes[range][victim as usize];
                let target = pivot.and_then(|pivot| kept[range].binary_search(&pivot).ok());
                *to = target.map_or(-1, |target| target as i32);
            }
        }
        let targets = Tensor::<1, Int>::from_data(targets.as_slice(), (&device, DType::I32));
        let targets = targets.reshape([victims.len(), width]);
        let weights = Tensor::<1>::from_data(weights.as_slice(), (&device, DType::F32));
        let weights = groups.weights(&weights.reshape([rows, 4]));
        let options = MergeOptions { rule: KeyRule::Mean, ..Default::default() };
        let merged = groups.merge(cache, from, targets, weights, options)?;
        if self.set_size { grow(cache, merged) } else { Ok(()) }
    }
}

/// Multiplies merged values by the sizes of their sets: the votes of all but the pivot.
fn grow(cache: &mut LayerCache, merged: Merged) -> Result<()> {
    let slots = merged.slots();
    let votes = |at: usize| merged.weights.clone().narrow(1, at, 1);
    let more = (votes(2) + votes(3).mul_scalar(VOTES_RADIX)).sub_scalar(1.0);
    let rows = cache.values().clone().select(0, slots.clone().clamp_min(0)).cast(DType::F32);
    let [count, head_dim] = rows.dims();
    Ok(cache.add_values(&slots, rows * more.expand([count, head_dim]))?)
}

/// Cosines of each row and the next, `[N - 1]`; 0 where a row is 0.
fn neighbours(keys: &Tensor<2>) -> Tensor<1> {
    let count = keys.dims()[0];
    let (one, next) = (keys.clone().narrow(0, 0, count - 1), keys.clone().narrow(0, 1, count - 1));
    let dots = (one * next).sum_dim(1).squeeze_dim::<1>(1);
    let norms = keys.clone().powi_scalar(2).sum_dim(1).squeeze_dim::<1>(1).sqrt();
    let both = norms.clone().narrow(0, 0, count - 1) * norms.narrow(0, 1, count - 1);
    dots / both.clamp_min(f32::MIN_POSITIVE)
}

/// The log-weights of tokens in their sets: `−‖k_p − k_i‖² / 2σ²`, where `σ` is the mean distance
/// of the other tokens from the pivot; 0 where all keys are equal.
fn log_weights(
    keys: &Tensor<2>,
    pivots: &[Vec<Option<usize>>],
    firsts: &[usize],
) -> Result<Vec<Vec<f32>>> {
    let mut log_weights: Vec<Vec<f32>> = pivots.iter().map(|own| vec![0.0; own.len()]).collect();
    let (mut rows, mut centres) = (Vec::new(), Vec::new());
    let merged =
        |(range, at): &(usize, usize)| pivots[*range][*at].is_some_and(|pivot| pivot != *at);
    let all = pivots
        .iter()
        .enumerate()
        .flat_map(|(range, own)| (0..own.len()).map(move |at| (range, at)));
    let members: Vec<(usize, usize)> = all.filter(merged).collect();
    for &(range, at) in &members {
        if let Some(pivot) = pivots[range][at] {
            rows.push((firsts[range] + at) as i32);
            centres.push((firsts[range] + pivot) as i32);
        }
    }
    if members.is_empty() {
        return Ok(log_weights);
    }
    let of = |rows: &[i32]| {
        let rows = Tensor::<1, Int>::from_data(rows, (&keys.device(), DType::I32));
        keys.clone().select(0, rows)
    };
    let squares = (of(&rows) - of(&centres)).powi_scalar(2).sum_dim(1);
    let squares = read_f32("distances", squares)?;
    let mut sums: std::collections::BTreeMap<i32, (f64, f64)> = std::collections::BTreeMap::new();
    for (centre, square) in centres.iter().zip(&squares) {
        let (sum, count) = sums.entry(*centre).or_default();
        *sum += f64::from(*square).sqrt();
        *count += 1.0;
    }
    for ((&(range, at), centre), square) in members.iter().zip(&centres).zip(&squares) {
        let (sum, count) = sums[centre];
        let sigma = sum / count;
        if sigma > 0.0 {
            log_weights[range][at] = (-f64::from(*square) / (2.0 * sigma * sigma)) as f32;
        }
    }
    Ok(log_weights)
}
