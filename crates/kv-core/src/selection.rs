//! The tokens that each head keeps.

use std::sync::OnceLock;

use burn::tensor::{DType, Device, Int, Tensor};
use kv_kernels::{Choice, SlotLists, scatter_scalars, top_slots};

use crate::layer::expect_shape;
use crate::ranking::{descending, rank, top};
use crate::tensors::{ints, listed};
use crate::{Error, Result, read_i32};

/// The tokens (or live slots) that each head range keeps, ascending. Heads may keep different
/// numbers.
///
/// A selection that the device has made stays there. [`Self::kept`] waits for the device; filling
/// or compacting a cache by the selection does not. The host knows the number of tokens of each
/// head in any case. Heads must have at least as many tokens as the selection was made from.
#[derive(Debug, Clone)]
pub struct Selection {
    lengths: Vec<usize>,
    /// The kept tokens, as chosen by the host or read from the device.
    kept: OnceLock<Vec<Vec<u32>>>,
    chosen: Option<Chosen>,
    /// Whether the heads of each sequence are known to keep the same tokens.
    alike: bool,
}

/// Tokens that the device has chosen.
#[derive(Debug, Clone)]
struct Chosen {
    /// The chosen tokens, `[B * Hkv, most]`; entries behind a head's last one are arbitrary.
    indices: Tensor<2, Int>,
    /// The number of tokens that each head chose from, `[B * Hkv]`.
    among: Vec<usize>,
}

impl Selection {
    /// A selection of `kept[b * Hkv + h]`, which is sorted here.
    ///
    /// # Errors
    /// [`Error::InvalidPlan`] where a token occurs twice in a head.
    pub fn new(mut kept: Vec<Vec<u32>>) -> Result<Self> {
        for (range, tokens) in kept.iter_mut().enumerate() {
            tokens.sort_unstable();
            if let Some(twice) = tokens.windows(2).find(|pair| pair[0] == pair[1]) {
                return Err(Error::InvalidPlan {
                    what: "selection",
                    reason: format!("token {} is kept twice in head {range}", twice[0]),
                });
            }
        }
        Ok(Self::of(kept))
    }

    /// A selection of tokens that ascend in each head already.
    fn of(kept: Vec<Vec<u32>>) -> Self {
        let lengths = kept.iter().map(Vec::len).collect();
        Self { lengths, kept: OnceLock::from(kept), chosen: None, alike: false }
    }

    /// Keeps all of `tokens` tokens in each of `total_kv_heads` head ranges.
    pub fn all(total_kv_heads: usize, tokens: usize) -> Self {
        Self::of(vec![(0..tokens as u32).collect(); total_kv_heads]).with_heads_alike()
    }

    /// The selection of whoever knows that all heads of a sequence keep the same tokens, as where
    /// they have the same scores.
    #[must_use]
    pub fn with_heads_alike(self) -> Self {
        Self { alike: true, ..self }
    }

    /// Whether all `kv_heads` heads of each sequence keep the same tokens. Waits for the device
    /// where that is not known ([`Self::with_heads_alike`]).
    ///
    /// # Errors
    /// [`Error::Read`].
    pub fn has_heads_alike(&self, kv_heads: usize) -> Result<bool> {
        let alike = |heads: &[Vec<u32>]| heads.iter().all(|kept| *kept == heads[0]);
        Ok(self.alike || self.kept()?.chunks(kv_heads.max(1)).all(alike))
    }

    /// The highest `budget` scores of each head; see [`top`] for ties.
    ///
    /// `scores` is `[B * Hkv, tokens]` in row-major order.
    pub fn top(scores: &[f32], tokens: usize, budget: usize) -> Self {
        Self::of(scores.chunks(tokens.max(1)).map(|scores| top(scores, budget)).collect())
    }

    /// The highest `budget` scores of each head, found on the device without waiting for it; see
    /// [`top`] for ties.
    ///
    /// # Shapes
    /// `scores` `[B, Hkv, T]`, f32.
    ///
    /// # Errors
    /// The errors of [`top_slots`].
    pub fn highest(scores: Tensor<3>, budget: usize) -> Result<Self> {
        let [batch, heads, tokens] = scores.dims();
        let (total_kv_heads, budget) = (batch * heads, budget.min(tokens));
        if total_kv_heads == 0 {
            return Ok(Self::of(Vec::new()));
        }
        Self::highest_of(
            scores.reshape([total_kv_heads, tokens]),
            &vec![tokens; total_kv_heads],
            &vec![budget; total_kv_heads],
        )
    }

    /// The `counts` highest of the first `among` scores of each row, `[B * Hkv, T]`, f32, as
    /// [`Self::highest`] finds them; all of these where there are fewer.
    ///
    /// # Errors
    /// The errors of [`top_slots`].
    pub fn highest_of(scores: Tensor<2>, among: &[usize], counts: &[usize]) -> Result<Self> {
        let lengths: Vec<usize> = among.iter().zip(counts).map(|(&a, &b)| a.min(b)).collect();
        let most = lengths.iter().copied().max().unwrap_or_default();
        if most == 0 {
            return Ok(Self::of(vec![Vec::new(); lengths.len()]));
        }
        let device = scores.device();
        let upload = |of: &[usize]| counted(of, &device);
        let choice = Choice::Top(upload(&lengths));
        let indices = top_slots(scores, Some(upload(among)), choice, most)?.indices;
        let chosen = Some(Chosen { indices, among: among.to_vec() });
        Ok(Self { lengths, kept: OnceLock::new(), chosen, alike: false })
    }

    /// The tokens that are not kept, of heads of `lengths` tokens, ascending. The device finds them
    /// where it has made the selection.
    ///
    /// # Errors
    /// [`Error::InvalidPlan`] and [`Error::IndexOutOfRange`] where the selection does not fit
    /// these, [`Error::Kernel`].
    pub fn others(&self, lengths: &[usize]) -> Result<Self> {
        self.check(lengths)?;
        let counts: Vec<usize> = lengths.iter().zip(&self.lengths).map(|(a, b)| a - b).collect();
        let Some(Chosen { indices, .. }) = &self.chosen else {
            let heads = self.kept()?.iter().zip(lengths);
            let others = heads.map(|(kept, &length)| {
                // Both ascend.
                let mut kept = kept.iter().peekable();
                (0..length as u32).filter(|at| kept.next_if_eq(&at).is_none()).collect()
            });
            return Ok(Self::of(others.collect()));
        };
        let width = lengths.iter().copied().max().unwrap_or_default();
        let goes = self.marks(width, &indices.device())?.neg().add_scalar(1.0);
        Self::highest_of(goes, lengths, &counts)
    }

    /// 1 for the tokens that are kept and 0 for others, `[B * Hkv, tokens]`, f32.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    pub fn marks(&self, tokens: usize, device: &Device) -> Result<Tensor<2>> {
        let total_kv_heads = self.head_ranges();
        let firsts: Vec<usize> = (0..total_kv_heads).map(|range| range * tokens).collect();
        let kept = self.lists(&firsts, device)?.slots.flatten(0, 1);
        let mut marks = Tensor::<1>::zeros([total_kv_heads * tokens], (device, DType::F32));
        let ones = Tensor::ones(kept.dims(), (device, DType::F32));
        scatter_scalars(&mut marks, kept, ones)?;
        Ok(marks.reshape([total_kv_heads, tokens]))
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
        Self::of(kept)
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
        Self::of(kept)
    }

    /// The kept tokens of each head range. Waits for the device, once, where it has chosen them.
    ///
    /// # Errors
    /// [`Error::Read`].
    pub fn kept(&self) -> Result<&[Vec<u32>]> {
        if self.kept.get().is_none()
            && let Some(Chosen { indices, .. }) = &self.chosen
        {
            let [_, most] = indices.dims();
            let read = read_i32("chosen tokens", indices.clone())?;
            let heads = read.chunks(most).zip(&self.lengths);
            let heads = heads.map(|(head, &length)| {
                head[..length].iter().map(|&at| at as u32).collect::<Vec<u32>>()
            });
            // Another thread may have read the tokens meanwhile.
            let _ = self.kept.set(heads.collect());
        }
        Ok(self.kept.get().map_or(&[], Vec::as_slice))
    }

    /// The number of tokens that each head range keeps, `[B * Hkv]`.
    pub fn lengths(&self) -> &[usize] {
        &self.lengths
    }

    /// The number of head ranges, `B * Hkv`.
    pub fn head_ranges(&self) -> usize {
        self.lengths.len()
    }

    /// Kept tokens over all heads.
    pub fn total(&self) -> usize {
        self.lengths.iter().sum()
    }

    /// Kept tokens as rows of a pool in which heads begin at `firsts`, `[B * Hkv]`: slots
    /// `[B * Hkv, most]`, at least one a head, and −1 behind a head's last one.
    ///
    /// # Errors
    /// [`Error::Shape`] for another number of heads.
    pub fn lists(&self, firsts: &[usize], device: &Device) -> Result<SlotLists> {
        expect_shape("firsts", &[firsts.len()], &[self.head_ranges()])?;
        let (total_kv_heads, counts) = (self.head_ranges(), counted(&self.lengths, device));
        let most = self.lengths.iter().copied().max().unwrap_or_default().max(1);
        let slots = match (&self.chosen, self.kept.get()) {
            (Some(Chosen { indices, .. }), _) => {
                let indices = indices.clone().to_device(device);
                listed(indices, counted(firsts, device), counts.clone())
            }
            (None, kept) => {
                let heads = kept.map_or(&[][..], Vec::as_slice).iter().zip(firsts);
                let mut slots = vec![-1; total_kv_heads * most];
                for (to, (kept, first)) in slots.chunks_mut(most).zip(heads) {
                    let rows = kept.iter().map(|&at| (first + at as usize) as i32);
                    to.iter_mut().zip(rows).for_each(|(to, row)| *to = row);
                }
                ints(slots, [total_kv_heads, most], device)
            }
        };
        Ok(SlotLists { slots, counts })
    }

    /// Checks that every kept index is below its head's length. Where the device has made the
    /// selection, checks the number of tokens that each head chose from instead.
    ///
    /// # Errors
    /// [`Error::IndexOutOfRange`], and [`Error::InvalidPlan`] for another number of heads.
    pub fn check(&self, lengths: &[usize]) -> Result<()> {
        if self.head_ranges() != lengths.len() {
            return Err(Error::InvalidPlan {
                what: "selection",
                reason: format!("{} heads, the cache has {}", self.head_ranges(), lengths.len()),
            });
        }
        let last = |range: usize| match &self.chosen {
            Some(Chosen { among, .. }) => {
                among[range].checked_sub(1).filter(|_| self.lengths[range] > 0)
            }
            None => self.kept.get()?.get(range)?.last().map(|&last| last as usize),
        };
        for (range, &limit) in lengths.iter().enumerate() {
            if let Some(index) = last(range).filter(|&index| index >= limit) {
                return Err(Error::IndexOutOfRange { what: "selection", index, limit });
            }
        }
        Ok(())
    }
}

/// Numbers on a device.
fn counted(numbers: &[usize], device: &Device) -> Tensor<1, Int> {
    let numbers: Vec<i32> = numbers.iter().map(|&number| number as i32).collect();
    let count = numbers.len();
    ints(numbers, [count], device)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_that_keep_the_same_tokens_are_alike() {
        let heads = |kept: [&[u32]; 4]| Selection::new(kept.map(<[u32]>::to_vec).into()).unwrap();
        let alike = heads([&[0, 2], &[2, 0], &[1], &[1]]);
        assert!(alike.has_heads_alike(2).unwrap());
        assert!(!alike.has_heads_alike(4).unwrap());
        assert!(!heads([&[0], &[0], &[1], &[2]]).has_heads_alike(2).unwrap());
        assert!(Selection::all(4, 3).has_heads_alike(4).unwrap());
        assert!(Selection::all(0, 3).has_heads_alike(0).unwrap());
    }

    #[test]
    fn ada_keeps_the_total_and_the_floor() {
        let scores = [9.0, 8.0, 7.0, 6.0, 0.4, 0.3, 0.2, 0.1];
        let ragged = Selection::ada(&scores, 4, 2, 2, 0);
        assert_eq!(ragged.kept().unwrap(), [vec![0, 1, 2, 3], vec![]]);
        let floored = Selection::ada(&scores, 4, 2, 2, 1);
        assert_eq!(floored.kept().unwrap(), [vec![0, 1, 2], vec![0]]);
    }

    #[test]
    fn twice_the_same_token_is_refused() {
        assert!(Selection::new(vec![vec![1, 3, 1]]).is_err());
    }
}
