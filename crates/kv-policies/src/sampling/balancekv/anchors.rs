//! Tokens that the augmented form keeps exactly, outside the walk.

use std::ops::Range;

use burn::tensor::{DType, Device, Int, Tensor};
use kv_core::{Selection, read_f32};
use serde::{Deserialize, Serialize};

use crate::{KeyDiff, Observation, Result, Scorer};

/// Which tokens' keys stand apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AnchorRule {
    /// The lowest cosines to the mean direction of the layer's keys, as [`KeyDiff`] scores them:
    /// each layer's own, and as many as there are slots for. Ours.
    #[default]
    KeyDiff,
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

/// The `count` tokens of `middle`, counted from its first, whose keys have the lowest cosines to
/// the mean direction.
pub(super) fn by_key_diff(
    observation: &Observation<'_>,
    middle: &Range<usize>,
    count: usize,
) -> Result<Selection> {
    let [batch, kv_heads, ..] = observation.dims();
    if count == 0 {
        return Ok(Selection::new(vec![Vec::new(); batch * kv_heads])?);
    }
    let part = |tensor: &Tensor<4>| tensor.clone().narrow(2, middle.start, middle.len());
    let (keys, values) = (part(observation.keys), part(observation.values));
    let scores = KeyDiff {}
        .prefill(&Observation { keys: &keys, values: &values, ..observation.clone() }, count)?;
    Ok(Selection::highest(scores, count)?)
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
