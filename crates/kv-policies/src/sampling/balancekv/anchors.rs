//! Tokens that the augmented form keeps exactly, outside the walk.

use std::ops::Range;

use burn::tensor::{DType, Device, Int, Tensor};
use kv_core::{Selection, read_f32};
use serde::{Deserialize, Serialize};

use super::gram::{Groups, turns};
use crate::{KeyDiff, Observation, Result, Scorer};

/// Which tokens' keys stand apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AnchorRule {
    /// The lowest cosines to the mean direction of the layer's keys, as [`KeyDiff`] scores them:
    /// each layer's own, and as many as there are slots for. Ours.
    #[default]
    KeyDiff,
    /// The highest leverage: `|K_ii| / Σ_j |K_ij|` over the tokens `j` of the token's block, with
    /// the walk's kernel `K`. Each layer's own, and as many as there are slots for. Ours.
    Leverage,
    /// Keys whose mean inner product with the keys of their block is not above 0, and the 25 tokens
    /// on each side of them: the authors' code, which finds them in the second layer and keeps them
    /// in all layers behind it. There may be none.
    BlockMean,
}

/// The layer, counted from 0, whose anchors all layers behind it take.
pub(super) const LAYER: usize = 1;
/// Tokens on each side of an anchor that are anchors, too.
const REACH: usize = 25;
/// What the authors' code adds to every inner product.
const OFFSET: f32 = 1e-8;

/// The keys and values that anchors are chosen from, `[B, Hkv, n, D]`.
pub(super) struct Candidates {
    keys: Tensor<4>,
    values: Tensor<4>,
}

impl Candidates {
    /// Those of the tokens of `middle`.
    pub(super) fn of(observation: &Observation<'_>, middle: &Range<usize>) -> Self {
        let part = |tensor: &Tensor<4>| tensor.clone().narrow(2, middle.start, middle.len());
        Self { keys: part(observation.keys), values: part(observation.values) }
    }

    /// The `count` tokens, counted from the first of `middle`, of the highest scores. With spans of
    /// several tokens the spans of the highest scores within, as many whole ones as `count` has
    /// room for, which must be one at least.
    pub(super) fn highest(scores: Tensor<3>, count: usize, span: usize) -> Result<Selection> {
        let [batch, kv_heads, tokens] = scores.dims();
        if span == 1 {
            return Ok(Selection::highest(scores, count)?);
        }
        let groups = tokens / span;
        let spans = scores.narrow(2, 0, groups * span).reshape([batch, kv_heads, groups, span]);
        let best = Selection::highest(spans.max_dim(3).squeeze_dim(3), count / span)?;
        let heads = best.kept()?.iter().map(|spans| {
            let tokens = |at: &u32| at * span as u32..(at + 1) * span as u32;
            spans.iter().flat_map(tokens).collect()
        });
        Ok(Selection::new(heads.collect())?)
    }

    /// Scores of [`AnchorRule::KeyDiff`], `[B, Hkv, n]`.
    pub(super) fn key_diff(&self, observation: &Observation<'_>) -> Result<Tensor<3>> {
        let (keys, values) = (&self.keys, &self.values);
        KeyDiff {}.prefill(&Observation { keys, values, ..observation.clone() }, 0)
    }

    /// Scores of [`AnchorRule::Leverage`], `[B, Hkv, n]`: `|K_ii| / Σ_j |K_ij|` over the tokens `j`
    /// of the token's block, with the kernel of [`super::gram`]. It is 1 for a token that no other
    /// one of its block can stand for, and `1 / b` for one of `b` alike. Values' products may be
    /// negative, and so may their sum be: absolute values keep the share within 0 and 1. A row is
    /// divided by its largest exponential first.
    pub(super) fn leverage(&self, block: usize, centred: bool, offset: f32) -> Tensor<3> {
        let [batch, kv_heads, tokens, head_dim] = self.keys.dims();
        let total_kv_heads = batch * kv_heads;
        let blocks = tokens.div_ceil(block);
        let device = self.keys.device();
        let filled = |rows: Tensor<3>| {
            let width = rows.dims()[2];
            let places = blocks * block - tokens;
            let zeros = || {
                let shape = [total_kv_heads, places, width];
                Tensor::<3>::zeros(shape, (&device, DType::F32))
            };
            let rows = if places > 0 { Tensor::cat(vec![rows, zeros()], 1) } else { rows };
            rows.reshape([total_kv_heads * blocks, block, width])
        };
        let rows = |tensor: &Tensor<4>| {
            tensor.clone().cast(DType::F32).reshape([total_kv_heads, tokens, head_dim])
        };
        let mut keys = rows(&self.keys);
        if centred {
            keys = keys.clone() - keys.mean_dim(1);
        }
        let live = Tensor::<3>::ones([total_kv_heads, tokens, 1], (&device, DType::F32));
        let groups = Groups {
            keys: filled(keys.div_scalar((head_dim as f32).sqrt().sqrt())),
            values: filled(rows(&self.values)),
            live: filled(live).squeeze_dim(2),
        };
        let shares = turns(groups.len(), block * block).map(|turn| {
            let own = groups.part(&turn);
            let logits = own.logits(&own);
            let top = logits.clone().max_dim(2);
            let kernel = (logits - top.clone()).exp() * own.likeness(&own, offset).abs();
            let [logit, likeness] = own.own(offset);
            let diagonal = (logit - top).exp() * likeness;
            diagonal / kernel.sum_dim(2).clamp_min(f32::MIN_POSITIVE)
        });
        let shares = Tensor::cat(shares.collect(), 0).reshape([batch, kv_heads, blocks * block]);
        shares.narrow(2, 0, tokens)
    }
}

/// The tokens of `middle`, counted from its first, that stand apart from their block, at most
/// `most` a head, for every sequence. All heads of a sequence have equally many: a head with fewer
/// takes the tokens of the next lowest inner products.
pub(super) fn by_block_mean(
    observation: &Observation<'_>,
    middle: &Range<usize>,
    block: usize,
    most: usize,
) -> Result<Vec<Selection>> {
    let [batch, kv_heads, _, head_dim] = observation.dims();
    let (total_kv_heads, count) = (batch * kv_heads, middle.len());
    let keys = observation.keys.clone().narrow(2, middle.start, count).cast(DType::F32);
    let mut keys = keys.reshape([total_kv_heads, count, head_dim]);
    let blocks = count.div_ceil(block);
    let padding = blocks * block - count;
    if padding > 0 {
        let zeros =
            Tensor::zeros([total_kv_heads, padding, head_dim], (&keys.device(), DType::F32));
        keys = Tensor::cat(vec![keys, zeros], 1);
    }
    let keys = keys.reshape([total_kv_heads, blocks, block, head_dim]);
    let sums = keys.clone().sum_dim(2);
    let products = (keys * sums).sum_dim(3).reshape([total_kv_heads, blocks * block]);
    let products = read_f32("inner products", products.narrow(1, 0, count))?;
    let heads: Vec<&[f32]> = products.chunks(count.max(1)).collect();
    let rows = heads.chunks(kv_heads).map(|heads| {
        let offset = OFFSET * block as f32;
        let marked: Vec<Vec<u32>> = heads
            .iter()
            .map(|products| spans(products.iter().map(|product| product + offset <= 0.0)))
            .collect();
        let each = marked.iter().map(Vec::len).max().unwrap_or_default().min(most);
        let kept =
            heads.iter().zip(marked).map(|(products, marked)| filled(products, marked, each));
        Ok(Selection::new(kept.collect())?)
    });
    rows.collect()
}

/// The indices within [`REACH`] of a marked one, ascending.
fn spans(marks: impl Iterator<Item = bool>) -> Vec<u32> {
    let marks: Vec<bool> = marks.collect();
    let near = |at: usize| {
        let reach = at.saturating_sub(REACH)..marks.len().min(at + REACH + 1);
        marks[reach].contains(&true)
    };
    (0..marks.len()).filter(|at| near(*at)).map(|at| at as u32).collect()
}

/// The first `count` marked indices; where fewer are marked, the indices of the lowest products
/// too. Ascending.
fn filled(products: &[f32], mut marked: Vec<u32>, count: usize) -> Vec<u32> {
    marked.truncate(count);
    if marked.len() < count {
        let mut others: Vec<u32> =
            (0..products.len() as u32).filter(|at| marked.binary_search(at).is_err()).collect();
        others.sort_by(|a, b| products[*a as usize].total_cmp(&products[*b as usize]));
        marked.extend(others.into_iter().take(count - marked.len()));
        marked.sort_unstable();
    }
    marked
}

/// The tokens of `middle` that are no anchors, `[P, n]`. Anchors count from the first of `middle`.
/// At least one token must be left.
pub(super) fn without(
    anchors: &Selection,
    middle: &Range<usize>,
    device: &Device,
) -> Result<Tensor<2, Int>> {
    let total_kv_heads = anchors.head_ranges();
    let rest = anchors.others(&vec![middle.len(); total_kv_heads])?;
    Ok(rest.lists(&vec![middle.start; total_kv_heads], device)?.slots)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_reach_25_tokens_each_way() {
        let marks = (0..200).map(|at| at == 3 || at == 100);
        let expected: Vec<u32> = (0..29).chain(75..126).collect();
        assert_eq!(spans(marks), expected);
        assert_eq!(spans([true].into_iter()), [0]);
        assert!(spans([false; 60].into_iter()).is_empty());
    }

    #[test]
    fn heads_with_fewer_anchors_take_the_next_lowest() {
        let products = [3.0, -1.0, 2.0, 0.5, 9.0];
        assert_eq!(filled(&products, vec![1], 3), [1, 2, 3]);
        assert_eq!(filled(&products, vec![0, 1, 4], 2), [0, 1]);
    }
}
