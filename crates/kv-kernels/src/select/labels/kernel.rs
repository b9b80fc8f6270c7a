//! The kernels of `label_scores`, with one unit for each slot of a row, and of `copy_labels`, with
//! one unit for each number.

use cubecl::prelude::*;

use crate::components::pool::HeadRanges;
use crate::select::scored_rows::{BUDGETS, ScoredRowBuffers};

/// The query heads' rows of candidates, and the channels that score them.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct LabelRows {
    /// `[B, Hkv]`
    offsets: Box<[i32]>,
    /// `[B, Hkv]`
    lengths: Box<[i32]>,
    /// `[rows, labels]`
    channels: Box<[i32]>,
    /// `[rows, 3]`
    budgets: Box<[i32]>,
    /// `Hq`
    heads: usize,
    /// Query heads of a key-value head.
    group: usize,
    head_dim: usize,
    /// Channels of a row.
    labels: usize,
}

/// The kept lists of rows, where rows share lists.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct KeptLists {
    /// `[rows, width]`
    lists: Box<[i32]>,
    /// `[rows, source_width]`
    sources: Box<[i32]>,
    width: usize,
    source_width: usize,
    layer: usize,
    /// Steps for which a list is kept.
    period: usize,
}

/// # Shapes
/// `query` `[rows, head_dim]`, `keys` `[S, head_dim]`.
#[cube(launch)]
pub(crate) fn label_scores_kernel<E: Float>(
    query: &[E],
    keys: &[E],
    of: &LabelRows,
    kept: &KeptLists,
    scored: &mut ScoredRowBuffers,
    #[comptime] shares: bool,
    #[define(E)] _dtype: ElemType,
) {
    let (at, columns) = (ABSOLUTE_POS, scored.columns);
    if at >= scored.rows * columns {
        terminate!();
    }
    let (row, column) = (at / columns, at % columns);
    let kv_head = row / of.group;
    let (offset, length) = (of.offsets[kv_head] as usize, of.lengths[kv_head] as usize);
    let mut due = true;
    if shares {
        due = is_due(kept, row, row % of.heads, length);
    }
    let mut own = 0usize;
    let mut count = 0usize;
    let sinks = of.budgets[row * BUDGETS + 1] as usize;
    if due {
        count = of.budgets[row * BUDGETS] as usize;
        let ends = sinks + of.budgets[row * BUDGETS + 2] as usize;
        if length > ends {
            own = length - ends;
        }
    }
    if column == 0 {
        scored.candidates[row] = i32::cast_from(own);
        scored.wanted[row] = i32::cast_from(count);
    }
    if column < own {
        let from = (offset + sinks + column) * of.head_dim;
        let mut sum = 0.0f32;
        for label in 0..of.labels {
            let channel = of.channels[row * of.labels + label] as usize;
            let q = f32::cast_from(query[row * of.head_dim + channel]);
            sum += q * f32::cast_from(keys[from + channel]);
        }
        scored.scores[at] = sum;
    }
}

/// Whether a row chooses its list anew in this step. It does so only if it reads its own list:
/// where it has none yet, or where the length is a multiple of the period.
#[cube]
#[allow(clippy::collapsible_if, reason = "kernels evaluate both sides of `&&`")]
#[allow(clippy::manual_is_multiple_of, reason = "kernels have no such method")]
fn is_due(kept: &KeptLists, row: usize, head: usize, length: usize) -> bool {
    let mut due = kept.sources[row * kept.source_width] as usize == head;
    if kept.source_width > 1 {
        if kept.sources[row * kept.source_width + 1] as usize != kept.layer {
            due = false;
        }
    }
    if length % kept.period != 0 {
        if kept.lists[row * kept.width] >= 0 {
            due = false;
        }
    }
    due
}

/// Writes the label channels of the queries, and of each range's newest key.
///
/// # Shapes
/// `query` `[B, Hkv, queries, head_dim]`, `keys` `[S, head_dim]`, `channels` `[B, Hkv, count]`,
/// `chosen` `[B, Hkv, queries, count]`, `labels` `[S, count]`.
#[cube(launch)]
pub(crate) fn copy_labels_kernel<E: Float>(
    query: &[E],
    keys: &[E],
    channels: &[i32],
    ranges: &HeadRanges,
    chosen: &mut [E],
    labels: &mut [E],
    queries: usize,
    head_dim: usize,
    count: usize,
    #[define(E)] _dtype: ElemType,
) {
    // A range has a row for each query, and one for its newest key behind them.
    let (row, label) = (ABSOLUTE_POS / count, ABSOLUTE_POS % count);
    let (kv_head, own) = (row / (queries + 1), row % (queries + 1));
    if kv_head >= ranges.total_kv_heads {
        terminate!();
    }
    let channel = channels[kv_head * count + label] as usize;
    if own < queries {
        let of = kv_head * queries + own;
        chosen[of * count + label] = query[of * head_dim + channel];
    } else if ranges.lengths[kv_head] > 0 {
        let newest = (ranges.offsets[kv_head] + ranges.lengths[kv_head] - 1) as usize;
        labels[newest * count + label] = keys[newest * head_dim + channel];
    }
}
