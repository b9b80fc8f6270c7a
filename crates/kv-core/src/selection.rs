//! Which tokens stay.

use burn::tensor::{DType, Tensor};
use kv_kernels::{Choice, top_slots};

use crate::ranking::{descending, rank, top};
use crate::{Error, Result, read_i32};

/// Tokens (or live slots) to keep, per (sequence, key-value head), ascending. Heads may keep
/// different numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Selection {
    kept: Vec<Vec<u32>>,
}

impl Selection {
    /// A selection of `kept[b * Hkv + h]`, which is sorted here.
    ///
    /// # Errors
    /// [`Error::InvalidPlan`] where a token occurs twice in a head.
    pub fn new(mut kept: Vec<Vec<u32>>) -> Result<Self> {
        for (pair, tokens) in kept.iter_mut().enumerate() {
            tokens.sort_unstable();
            if let Some(twice) = tokens.windows(2).find(|pair| pair[0] == pair[1]) {
                return Err(Error::InvalidPlan {
                    what: "selection",
                    reason: format!("token {} is kept twice in head {pair}", twice[0]),
                });
            }
        }
        Ok(Self { kept })
    }

    /// Keeps all of `tokens` tokens in each of `pairs` heads.
    pub fn all(pairs: usize, tokens: usize) -> Self {
        Self { kept: vec![(0..tokens as u32).collect(); pairs] }
    }

    /// The highest `budget` scores of each head; see [`top`] for ties.
    ///
    /// `scores` is `[pairs, tokens]` in row-major order.
    pub fn top(scores: &[f32], tokens: usize, budget: usize) -> Self {
        Self { kept: scores.chunks(tokens.max(1)).map(|scores| top(scores, budget)).collect() }
    }

    /// The highest `budget` scores of each head, found on the device; see [`top`] for ties.
    ///
    /// # Shapes
    /// `scores` `[B, Hkv, T]`, f32.
    ///
    /// # Errors
    /// Those of [`top_slots`], and [`Error::Read`].
    pub fn highest(scores: Tensor<3>, budget: usize) -> Result<Self> {
        let [batch, heads, tokens] = scores.dims();
        let (pairs, budget) = (batch * heads, budget.min(tokens));
        if pairs == 0 || budget == 0 {
            return Ok(Self { kept: vec![Vec::new(); pairs] });
        }
        let counts = Tensor::full([pairs], budget as i32, (&scores.device(), DType::I32));
        let rows = scores.reshape([pairs, tokens]);
        let chosen = top_slots(rows, None, Choice::Top(counts), budget)?;
        let indices = read_i32("chosen tokens", chosen.indices)?;
        let heads = indices.chunks(budget);
        Ok(Self { kept: heads.map(|head| head.iter().map(|&at| at as u32).collect()).collect() })
    }

    /// AdaKV's reserve and fill: each head keeps its own best `reserved`, then the heads of a
    /// sequence compete for the rest of `kv_heads * budget` (score descending, then head, then
    /// position). The total is exact.
    pub fn ada(
        scores: &[f32],
        tokens: usize,
        kv_heads: usize,
        budget: usize,
        reserved: usize,
    ) -> Self {
        let budget = budget.min(tokens);
        let reserved = reserved.min(budget);
        let mut kept = Vec::new();
        for sequence in scores.chunks(tokens * kv_heads) {
            let orders: Vec<Vec<u32>> = sequence.chunks(tokens).map(rank).collect();
            let mut heads: Vec<Vec<u32>> =
                orders.iter().map(|order| order[..reserved].to_vec()).collect();
            let mut rest: Vec<(f32, usize, u32)> = orders
                .iter()
                .enumerate()
                .flat_map(|(head, order)| {
                    order[reserved..]
                        .iter()
                        .map(move |&token| (sequence[head * tokens + token as usize], head, token))
                })
                .collect();
            rest.sort_by(|a, b| descending(a.0, b.0).then(a.1.cmp(&b.1)).then(a.2.cmp(&b.2)));
            for &(_, head, token) in rest.iter().take(kv_heads * (budget - reserved)) {
                heads[head].push(token);
            }
            heads.iter_mut().for_each(|head| head.sort_unstable());
            kept.extend(heads);
        }
        Self { kept }
    }

    /// AdaKV's public code: of the `tokens - window` tokens before the window, head `j` keeps
    /// `round((1 - floor) c_j + int(floor * base))` of its best, where `base = budget - window` and
    /// `c_j` is how many of the joint top `kv_heads * base` are its own; the window comes on top.
    /// With `normalize`, scores count in proportion to the share of the head's mass that its own
    /// top `base` holds. The total may be off by a few slots.
    pub fn ada_official(
        scores: &[f32],
        tokens: usize,
        kv_heads: usize,
        budget: usize,
        window: usize,
        floor: f64,
        normalize: bool,
    ) -> Self {
        let budget = budget.min(tokens);
        let window = window.min(budget);
        let (past, base) = (tokens - window, budget - window);
        let mut kept = Vec::new();
        for sequence in scores.chunks(tokens * kv_heads) {
            let heads: Vec<&[f32]> = sequence.chunks(tokens).map(|head| &head[..past]).collect();
            let mut joint: Vec<(f32, usize)> = Vec::new();
            for (index, head) in heads.iter().enumerate() {
                let order = rank(head);
                let sum = |tokens: &[u32]| tokens.iter().map(|&t| head[t as usize]).sum::<f32>();
                let scale = if normalize { sum(&order[..base]) / sum(&order) } else { 1.0 };
                joint.extend(head.iter().map(|score| (score * scale, index)));
            }
            joint.sort_by(|a, b| descending(a.0, b.0));
            let mut counts = vec![0usize; kv_heads];
            joint.iter().take(kv_heads * base).for_each(|(_, head)| counts[*head] += 1);
            for (head, count) in heads.iter().zip(counts) {
                let reserved = (base as f64 * floor) as usize;
                let own = count as f64 * (1.0 - floor) + reserved as f64;
                let mut chosen = top(head, own.round_ties_even() as usize);
                chosen.extend(past as u32..tokens as u32);
                kept.push(chosen);
            }
        }
        Self { kept }
    }

    /// Kept tokens of each (sequence, head).
    pub fn kept(&self) -> &[Vec<u32>] {
        &self.kept
    }

    /// `B * Hkv`.
    pub fn pairs(&self) -> usize {
        self.kept.len()
    }

    /// Kept tokens over all heads.
    pub fn total(&self) -> usize {
        self.kept.iter().map(Vec::len).sum()
    }

    /// Selections of several groups of sequences as one.
    pub fn concat(parts: impl IntoIterator<Item = Self>) -> Self {
        Self { kept: parts.into_iter().flat_map(|part| part.kept).collect() }
    }

    /// Checks that every index is below its head's `lengths`.
    pub(crate) fn check(&self, lengths: &[usize]) -> Result<()> {
        if self.kept.len() != lengths.len() {
            return Err(Error::InvalidPlan {
                what: "selection",
                reason: format!("{} heads, the cache has {}", self.kept.len(), lengths.len()),
            });
        }
        for (tokens, &limit) in self.kept.iter().zip(lengths) {
            if let Some(&last) = tokens.last()
                && last as usize >= limit
            {
                return Err(Error::IndexOutOfRange {
                    what: "selection",
                    index: last as usize,
                    limit,
                });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ada_keeps_the_total_and_the_floor() {
        let scores = [9.0, 8.0, 7.0, 6.0, 0.4, 0.3, 0.2, 0.1];
        let ragged = Selection::ada(&scores, 4, 2, 2, 0);
        assert_eq!(ragged.kept(), [vec![0, 1, 2, 3], vec![]]);
        let floored = Selection::ada(&scores, 4, 2, 2, 1);
        assert_eq!(floored.kept(), [vec![0, 1, 2], vec![0]]);
    }

    #[test]
    fn twice_the_same_token_is_refused() {
        assert!(Selection::new(vec![vec![1, 3, 1]]).is_err());
    }
}
