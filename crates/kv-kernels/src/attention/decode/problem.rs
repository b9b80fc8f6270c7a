//! A call of weighted decode attention on the host: its arguments, and its results.

use super::index_sets::{FIRST, FREED, LOCAL, READ, SINKS};

/// One call's arguments, as slices in row-major order.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Problem<'a, E> {
    /// `[B, Hq, D]`
    pub(crate) query: &'a [E],
    /// `[S, D]`
    pub(crate) keys: &'a [E],
    /// `[S, D]`
    pub(crate) values: &'a [E],
    /// `[S]`
    pub(crate) log_weights: Option<&'a [f32]>,
    /// `[S]`, weights of the values alone.
    pub(crate) numerators: Option<&'a [f32]>,
    /// Which slots of each range are read.
    pub(crate) view: View<'a>,
    /// `[B, Hkv]`
    pub(crate) offsets: &'a [i32],
    /// `[B, Hkv]`
    pub(crate) lengths: &'a [i32],
    /// `Hq / Hkv`
    pub(crate) group: usize,
    /// `D`
    pub(crate) head_dim: usize,
    /// Factor of `q . k`.
    pub(crate) scale: f32,
}

/// [`crate::SlotView`] on the host.
#[derive(Debug, Clone, Copy)]
pub(crate) enum View<'a> {
    /// All slots of a range.
    All,
    /// The first `sinks` slots, and all slots from `starts` `[B, Hkv]` on.
    Window {
        /// Slots at the start of each range.
        sinks: usize,
        /// The first slot of the window, counted from the range's first slot.
        starts: &'a [i32],
    },
    /// Slots of the pool, `[B, Hkv, N]`; `lengths` has the length of each list.
    List(&'a [i32]),
    /// A table of index sets, one row for each range.
    Sets(&'a [i32]),
}

impl<E> Problem<'_, E> {
    /// The slots that a key-value head attends to.
    pub(super) fn visible(&self, kv_head: usize) -> Vec<usize> {
        let length = usize::try_from(self.lengths[kv_head]).unwrap_or(0);
        let start = self.offsets[kv_head] as usize;
        match self.view {
            View::All => (start..start + length).collect(),
            View::Window { sinks, starts } => {
                let sinks = sinks.min(length);
                let first = usize::try_from(starts[kv_head]).unwrap_or(0).clamp(sinks, length);
                (0..sinks).chain(first..length).map(|slot| start + slot).collect()
            }
            View::List(slots) => {
                let width = slots.len() / self.offsets.len();
                let pool = self.keys.len() / self.head_dim;
                let listed = &slots[kv_head * width..][..length.min(width)];
                let listed = listed.iter().filter_map(|slot| usize::try_from(*slot).ok());
                listed.filter(|slot| *slot < pool).collect()
            }
            View::Sets(table) => {
                let width = table.len() / self.offsets.len();
                let own = &table[kv_head * width..][..width];
                let field = |at: usize| own[at] as usize;
                let set = &own[field(FIRST)..][..field(READ)];
                let listed = set.iter().map(|token| *token as usize - field(FREED));
                let slots = (0..field(SINKS).min(length)).chain(listed).chain(field(LOCAL)..length);
                slots.map(|slot| start + slot).collect()
            }
        }
    }
}

/// The results of a call, in f32.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Solution {
    /// `[B, Hq, D]`
    pub(crate) output: Vec<f32>,
    /// `[B, Hq]`
    pub(crate) log_sum_exp: Vec<f32>,
    /// Probabilities or logits, `[S, G]`; 0 for slots that are not attended to.
    pub(crate) scores: Vec<f32>,
}

/// The number that is returned for every slot and query head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scores {
    /// No number.
    None,
    /// The attention probability.
    Probabilities,
    /// The logit, with the logarithm of the weight.
    Logits,
}

impl Solution {
    /// The results of attention to nothing.
    pub(super) fn empty<E>(problem: &Problem<'_, E>, scores: Scores) -> Self {
        let Problem { group, head_dim, .. } = *problem;
        let heads = problem.offsets.len() * group;
        let slots = if scores == Scores::None { 0 } else { problem.keys.len() / head_dim };
        Self {
            output: vec![0.0; heads * head_dim],
            log_sum_exp: vec![f32::NEG_INFINITY; heads],
            scores: vec![0.0; slots * group],
        }
    }
}
