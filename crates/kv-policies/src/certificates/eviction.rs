//! The changes that LongFlow's evictions make to attention, and bounds on them.

use burn::tensor::Tensor;
use kv_core::{LayerCache, read_f32, read_i32};

use crate::Result;
use crate::policy::write_slots::WriteSlots;

/// Bounds on the error of LongFlow's importance, beside the error itself, of one query head at one
/// step (section 3.3 and appendix D).
///
/// With `i` the slot that is to be overwritten, `q` the query that chose it and `q'` the next one:
/// the ideal measure is `‖o' − o'₋ᵢ‖²`, the practical one `‖α_i v_i‖²`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Certificate {
    /// `2 V α'_i / (1 − α'_i)`, `V = max ‖v_j‖` (equation 13); infinite where the slot has all of
    /// the attention.
    pub eviction_residual_bound: f64,
    /// The residual itself: `‖o' − o'₋ᵢ − α'_i v_i‖`.
    pub eviction_residual: f64,
    /// `‖q' − q‖ max ‖k_j‖ / √D`: for queries of length 1 this is
    /// `√(2 (1 − cos(q, q'))) max ‖k_j‖ / √D` (equation 15).
    pub logit_change_bound: f64,
    /// The largest change of a logit itself.
    pub logit_change: f64,
    /// The bound of the difference between the two measures of importance (equation 11).
    pub error_bound: f64,
    /// The difference between the two measures.
    pub error: f64,
}

/// Certificates of every query head whose key-value head is at its limit, in f64 on the host: the
/// next step will overwrite a slot that is chosen already. `chosen_by` and `next` are the queries,
/// `[B, Hq, D]`, of the step that chose it and of the next step.
///
/// There are none for a cache that is not held at its limits. Rows of the whole cache are read:
/// this is for studies, not for decoding.
///
/// # Errors
/// [`kv_core::Error::Read`].
pub fn certify(
    cache: &LayerCache,
    chosen_by: &Tensor<3>,
    next: &Tensor<3>,
) -> Result<Vec<Certificate>> {
    let layout = cache.layout();
    let (dim, total_kv_heads) = (cache.head_dim(), layout.head_ranges());
    let group = chosen_by.dims()[1] / layout.kv_heads();
    let places = match WriteSlots::next(cache) {
        Some(places) => read_i32("places", places.clone())?,
        None => return Ok(Vec::new()),
    };
    let wide = |values: Vec<f32>| values.into_iter().map(f64::from).collect::<Vec<f64>>();
    let keys = wide(read_f32("keys", cache.keys().clone())?);
    let values = wide(read_f32("values", cache.values().clone())?);
    let before = wide(read_f32("queries", chosen_by.clone())?);
    let after = wide(read_f32("queries", next.clone())?);
    let limits = cache.limits().unwrap_or_default();
    let mut certificates = Vec::new();
    for range in (0..total_kv_heads).filter(|&range| layout.lengths()[range] == limits[range]) {
        let rows = |all: &[f64]| -> Vec<Vec<f64>> {
            layout.live(range).map(|slot| all[slot * dim..][..dim].to_vec()).collect()
        };
        let head = Head { keys: rows(&keys), values: rows(&values) };
        for g in 0..group {
            let query = |all: &[f64]| all[(range * group + g) * dim..][..dim].to_vec();
            certificates.push(head.certify(
                &query(&before),
                &query(&after),
                places[range] as usize,
            ));
        }
    }
    Ok(certificates)
}

struct Head {
    keys: Vec<Vec<f64>>,
    values: Vec<Vec<f64>>,
}

impl Head {
    fn certify(&self, query: &[f64], next: &[f64], evicted: usize) -> Certificate {
        let scale = (query.len() as f64).sqrt();
        let logits = |query: &[f64]| -> Vec<f64> {
            self.keys.iter().map(|key| dot(query, key) / scale).collect()
        };
        let (old, new) = (logits(query), logits(next));
        let (shares, next_shares) = (softmax(&old), softmax(&new));
        let (share, next_share) = (shares[evicted], next_shares[evicted]);
        let value = &self.values[evicted];
        let output = self.output(&next_shares, None);
        let without = self.output(&next_shares, Some(evicted));
        let change: Vec<f64> = output.iter().zip(&without).map(|(o, w)| o - w).collect();
        let eviction_residual: Vec<f64> =
            change.iter().zip(value).map(|(change, v)| change - next_share * v).collect();
        let longest = |rows: &[Vec<f64>]| rows.iter().map(|row| norm(row)).fold(0.0, f64::max);
        let size = norm(value);
        let rest = 1.0 - next_share;
        let eviction_residual_bound = 2.0 * longest(&self.values) * next_share / rest;
        let difference: Vec<f64> = next.iter().zip(query).map(|(a, b)| a - b).collect();
        let logit_change_bound = norm(&difference) * longest(&self.keys) / scale;
        let logit_change = old.iter().zip(&new).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        // |‖c' + R‖² − ‖c'‖²| and |‖c'‖² − ‖c‖²|, shares changing by no more than logits do.
        let moved = logit_change_bound.min(1.0);
        let error_bound = eviction_residual_bound
            * (eviction_residual_bound + 2.0 * next_share * size)
            + moved * (2.0 * share + moved) * size * size;
        let error = (norm(&change).powi(2) - (share * size).powi(2)).abs();
        let eviction_residual = norm(&eviction_residual);
        Certificate {
            eviction_residual_bound,
            eviction_residual,
            logit_change_bound,
            logit_change,
            error_bound,
            error,
        }
    }

    /// The attention output with these shares, without a slot if so asked, the others scaled up.
    fn output(&self, shares: &[f64], without: Option<usize>) -> Vec<f64> {
        let left: f64 = (0..shares.len()).filter(|i| Some(*i) != without).map(|i| shares[i]).sum();
        let mut output = vec![0.0; self.values[0].len()];
        for (i, value) in self.values.iter().enumerate().filter(|(i, _)| Some(*i) != without) {
            output.iter_mut().zip(value).for_each(|(o, v)| *o += shares[i] / left * v);
        }
        output
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn norm(row: &[f64]) -> f64 {
    dot(row, row).sqrt()
}

fn softmax(logits: &[f64]) -> Vec<f64> {
    let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = logits.iter().map(|logit| (logit - max).exp()).sum();
    logits.iter().map(|logit| (logit - max).exp() / sum).collect()
}
