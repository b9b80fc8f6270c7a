//! Approximate logits from a few channels of each head, `sum_c q_c k_c`. Double Sparsity scores all
//! rows so, and HShare those rows that choose their lists anew. CIS with labels keeps these
//! channels of all keys.

mod args;
mod backend;
#[cfg(feature = "gpu")]
mod kernel;
#[cfg(feature = "gpu")]
mod launch;
mod reference;

use burn::backend::Dispatch;
use burn::tensor::{Int, Tensor};

use super::lists;
use crate::backend::check::Check;
use crate::select::scored_rows::{BUDGETS, ScoredRows};
use crate::{KernelError, SlotRanges};
use args::{CopyLabelsArgs, LabelScoresArgs};
use backend::LabelsOps;

const OP: &str = "label_scores";
const COPY: &str = "copy_labels";

/// Which rows choose their lists anew, where rows (query heads) share lists and keep them for
/// several steps.
#[derive(Debug, Clone, Copy)]
pub struct RefreshRows<'a> {
    /// The kept lists, `[B, Hq, 3 + M]`, as [`crate::keep_lists`] writes them.
    pub lists: &'a Tensor<3, Int>,
    /// The query head whose list each row reads, and optionally the list's layer in a second
    /// column: `[B, Hq, 1 or 2]`, 32-bit. A row that reads the list of another row never chooses
    /// one.
    pub sources: &'a Tensor<3, Int>,
    /// The layer of these rows.
    pub layer: usize,
    /// Steps for which a list is kept: a row chooses where it has no list yet, and in each step in
    /// which its range's length is a multiple of `period`.
    pub period: usize,
}

/// Approximate logits `sum_c q_c k_c` over each query head's channels `c`: Double Sparsity (Yang et
/// al., 2024), section 3. Candidates are the slots of the head's range between the sinks and the
/// recents of its budget; column 0 is the first slot after the sinks. Rows that keep their lists
/// have no candidates and want no tokens.
///
/// # Shapes
/// `query` `[B, Hq, D]`, `keys` `[S, D]` of its dtype; `channels` `[B, Hq, r]`, 32-bit, below `D`
/// (on the device, not checked); `budgets` `[B, Hq, 3]`, 32-bit: tokens to choose (at least 1),
/// sinks, recents; `ranges` `[B, Hkv]` of at most `longest` slots. In the result, `R` is `B * Hq`
/// and `T` is `longest`.
///
/// # Errors
/// [`KernelError`] where shapes, dtypes or devices do not fit.
pub fn label_scores(
    query: Tensor<3>,
    keys: &Tensor<2>,
    channels: &Tensor<3, Int>,
    budgets: &Tensor<3, Int>,
    ranges: &SlotRanges,
    longest: usize,
    due: Option<RefreshRows<'_>>,
) -> Result<ScoredRows, KernelError> {
    let check = Check::new(OP, &query);
    check.supported()?;
    check.float("query", &query)?;
    check.filled("query", &query)?;
    let ([batch, heads, head_dim], [_, kv_heads]) = (query.dims(), ranges.offsets.dims());
    check.ranges(ranges, batch, kv_heads)?;
    if kv_heads == 0 || heads % kv_heads != 0 {
        return Err(KernelError::HeadGroups { op: OP, query_heads: heads, kv_heads });
    }
    check.shape("keys", keys, &[keys.dims()[0], head_dim])?;
    check.same_dtype("keys", keys, "the query's dtype", query.dtype())?;
    check.counted("keys", keys)?;
    check.shape("channels", channels, &[batch, heads, channels.dims()[2]])?;
    check.int("channels", channels)?;
    check.filled("channels", channels)?;
    check.shape("budgets", budgets, &[batch, heads, BUDGETS])?;
    check.int("budgets", budgets)?;
    if longest == 0 {
        return Err(check.unsupported("longest", 0, "at least 1 slot"));
    }
    let (mut layer, mut period) = (0, 1);
    if let Some(due) = &due {
        lists::check_lists(&check, due.lists, [batch, heads])?;
        lists::check_sources(&check, due.sources, [batch, heads])?;
        (layer, period) = (due.layer, due.period);
        if period == 0 {
            return Err(check.unsupported("period", 0, "at least 1 step"));
        }
    }
    let scored = <Dispatch as LabelsOps>::label_scores(LabelScoresArgs {
        query: query.into_dispatch(),
        keys: keys.clone().into_dispatch(),
        offsets: ranges.offsets.clone().into_dispatch(),
        lengths: ranges.lengths.clone().into_dispatch(),
        channels: channels.clone().into_dispatch(),
        budgets: budgets.clone().into_dispatch(),
        lists: due.map(|due| due.lists.clone()).into(),
        sources: due.map(|due| due.sources.clone()).into(),
        layer,
        period,
        columns: longest,
    });
    Ok(scored.into())
}

/// Takes some channels of queries, and the same channels of each range's newest key, which are
/// written into the range's newest row of `labels`, in place. Products of both are approximate
/// logits. Returns the channels of the queries, `[B, N, r]`.
///
/// # Shapes
/// `query` `[B, N, D]`, with the queries of a range side by side; `keys` `[S, D]` of its dtype;
/// `channels` `[B, Hkv, r]`, 32-bit, below `D` (on the device, not checked); `ranges` `[B, Hkv]`;
/// `labels` `[S, r]`, of the keys' dtype, without padding between rows.
///
/// # Errors
/// [`KernelError`] where shapes, dtypes or devices do not fit.
pub fn copy_labels(
    query: Tensor<3>,
    keys: &Tensor<2>,
    channels: &Tensor<3, Int>,
    ranges: &SlotRanges,
    labels: &mut Tensor<2>,
) -> Result<Tensor<3>, KernelError> {
    let check = Check::new(COPY, &query);
    check.supported()?;
    check.float("query", &query)?;
    check.filled("query", &query)?;
    let ([batch, heads, head_dim], [_, kv_heads]) = (query.dims(), ranges.offsets.dims());
    check.ranges(ranges, batch, kv_heads)?;
    if kv_heads == 0 || heads % kv_heads != 0 {
        return Err(KernelError::HeadGroups { op: COPY, query_heads: heads, kv_heads });
    }
    let ([slots, _], [_, _, count]) = (keys.dims(), channels.dims());
    check.shape("keys", keys, &[slots, head_dim])?;
    check.same_dtype("keys", keys, "the query's dtype", query.dtype())?;
    check.counted("keys", keys)?;
    check.shape("channels", channels, &[batch, kv_heads, count])?;
    check.int("channels", channels)?;
    check.filled("channels", channels)?;
    check.shape("labels", labels, &[slots, count])?;
    check.same_dtype("labels", labels, "the keys' dtype", keys.dtype())?;
    let (written, chosen) = <Dispatch as LabelsOps>::copy_labels(CopyLabelsArgs {
        query: query.into_dispatch(),
        keys: keys.clone().into_dispatch(),
        channels: channels.clone().into_dispatch(),
        offsets: ranges.offsets.clone().into_dispatch(),
        lengths: ranges.lengths.clone().into_dispatch(),
        labels: check.take(labels).into_dispatch(),
    });
    *labels = Tensor::from_dispatch(written);
    Ok(Tensor::from_dispatch(chosen))
}
