//! Token lists that query heads attend to for several steps, and that heads and layers share
//! (HShare). One op stores newly chosen lists; the other turns lists into slots.

mod args;
mod backend;
#[cfg(feature = "gpu")]
mod kernel;
#[cfg(feature = "gpu")]
mod launch;
mod reference;

use burn::backend::Dispatch;
use burn::tensor::{Int, Tensor};

use crate::backend::check::Check;
use crate::select::scored_rows::BUDGETS;
use crate::{Chosen, KernelError, SlotRanges};
use args::{KeepListsArgs, ListSlotsArgs};
use backend::ListsOps;

const KEEP: &str = "keep_lists";
const SLOTS: &str = "list_slots";
/// Numbers of a list before its tokens: the number of tokens, or [`crate::NO_LIST`] before the
/// first choice; the first recent slot; and how many times the list was chosen.
pub const HEADER: usize = 3;

/// Stores the lists that rows (query heads) have chosen anew, in place. A list gets the chosen
/// tokens, counted from the first slot after the sinks, their number, and the first recent slot;
/// its count of choices goes up by one. Rows that keep their lists (`wanted` of 0) stay unchanged.
/// All lists are then copied to this layer's part of `board`, if there is one.
///
/// # Shapes
/// `lists` `[B, Hq, 3 + M]`, 32-bit; `chosen` with `R = B * Hq` rows of `M` tokens; `wanted` `[R]`,
/// 0 for rows that keep their lists; `budgets` as in [`crate::label_scores`]; `ranges` `[B, Hkv]`;
/// `board` `[layers, B, Hq, 3 + M]`, 32-bit, with the layer.
///
/// # Errors
/// [`KernelError`] where shapes, dtypes or devices do not fit.
pub fn keep_lists(
    lists: &mut Tensor<3, Int>,
    chosen: &Chosen,
    wanted: &Tensor<1, Int>,
    budgets: &Tensor<3, Int>,
    ranges: &SlotRanges,
    board: Option<(&mut Tensor<4, Int>, usize)>,
) -> Result<(), KernelError> {
    let check = Check::new(KEEP, lists);
    check.supported()?;
    let [batch, heads, width] = lists.dims();
    let ([_, kv_heads], rows) = (ranges.offsets.dims(), batch * heads);
    check_lists(&check, lists, [batch, heads])?;
    check.shape("chosen indices", &chosen.indices, &[rows, width - HEADER])?;
    check.int("chosen indices", &chosen.indices)?;
    check.shape("chosen counts", &chosen.counts, &[rows])?;
    check.int("chosen counts", &chosen.counts)?;
    check.shape("wanted", wanted, &[rows])?;
    check.int("wanted", wanted)?;
    check.shape("budgets", budgets, &[batch, heads, BUDGETS])?;
    check.int("budgets", budgets)?;
    check.ranges(ranges, batch, kv_heads)?;
    let mut layer = 0;
    if let Some((board, own)) = &board {
        let [layers, ..] = board.dims();
        check.shape("board", &**board, &[layers, batch, heads, width])?;
        check.int("board", &**board)?;
        if *own >= layers {
            return Err(check.unsupported("layer", *own, "one of the board's"));
        }
        layer = *own;
    }
    let mut board = board.map(|(board, _)| board);
    let (own, posted) = <Dispatch as ListsOps>::keep_lists(KeepListsArgs {
        lists: check.take_ints(lists).into_dispatch(),
        indices: chosen.indices.clone().into_dispatch(),
        found: chosen.counts.clone().into_dispatch(),
        wanted: wanted.clone().into_dispatch(),
        budgets: budgets.clone().into_dispatch(),
        lengths: ranges.lengths.clone().into_dispatch(),
        board: board.as_deref_mut().map(|board| check.take_ints(board)).into(),
        layer,
    });
    *lists = Tensor::from_dispatch(own);
    if let Some((board, posted)) = board.zip(posted.into_option()) {
        *board = Tensor::from_dispatch(posted);
    }
    Ok(())
}

/// The lists to read: a layer's own lists, or the lists of all layers.
#[derive(Debug, Clone, Copy)]
pub enum ListTable<'a> {
    /// The lists of one layer, `[B, Hq, 3 + M]`.
    Own(&'a Tensor<3, Int>),
    /// The lists of all layers, `[layers, B, Hq, 3 + M]`.
    Board(&'a Tensor<4, Int>),
}

/// The slots that each query head attends to: the sinks, the list that it reads, and all slots from
/// that list's first recent slot on. Returns slots of the pool `[B * Hq, W]`, 32-bit, with `-1`
/// after the last, and their number `[B * Hq]`.
///
/// # Shapes
/// `sources`, 32-bit, as [`crate::RefreshRows`] has them: `[B, Hq, 1]` for [`ListTable::Own`], `[B,
/// Hq, 2]` for [`ListTable::Board`]; `budgets` `[B, Hq, 3]`; `ranges` `[B, Hkv]`. Of more than `W`
/// slots only the first are returned.
///
/// # Errors
/// [`KernelError`] where shapes, dtypes or devices do not fit.
pub fn list_slots(
    table: ListTable<'_>,
    sources: &Tensor<3, Int>,
    budgets: &Tensor<3, Int>,
    ranges: &SlotRanges,
    width: usize,
) -> Result<(Tensor<2, Int>, Tensor<1, Int>), KernelError> {
    let check = Check::new(SLOTS, budgets);
    check.supported()?;
    let ([batch, heads, _], [_, kv_heads]) = (budgets.dims(), ranges.offsets.dims());
    check.shape("budgets", budgets, &[batch, heads, BUDGETS])?;
    check.int("budgets", budgets)?;
    check.ranges(ranges, batch, kv_heads)?;
    if kv_heads == 0 || heads % kv_heads != 0 {
        return Err(KernelError::HeadGroups { op: SLOTS, query_heads: heads, kv_heads });
    }
    let (table, columns) = match table {
        ListTable::Own(lists) => {
            check_lists(&check, lists, [batch, heads])?;
            (lists.clone().unsqueeze_dim::<4>(0), 1)
        }
        ListTable::Board(board) => {
            let [layers, _, _, own] = board.dims();
            check.shape("board", board, &[layers, batch, heads, own])?;
            check.int("board", board)?;
            (board.clone(), 2)
        }
    };
    check.shape("sources", sources, &[batch, heads, columns])?;
    check.int("sources", sources)?;
    if width == 0 {
        return Err(check.unsupported("slots", 0, "lists of at least 1"));
    }
    let (slots, counts) = <Dispatch as ListsOps>::list_slots(ListSlotsArgs {
        table: table.into_dispatch(),
        sources: sources.clone().into_dispatch(),
        budgets: budgets.clone().into_dispatch(),
        offsets: ranges.offsets.clone().into_dispatch(),
        lengths: ranges.lengths.clone().into_dispatch(),
        width,
    });
    Ok((Tensor::from_dispatch(slots), Tensor::from_dispatch(counts)))
}

/// Checks lists of `[batch, heads]`, with room for at least one token.
pub(crate) fn check_lists(
    check: &Check,
    lists: &Tensor<3, Int>,
    [batch, heads]: [usize; 2],
) -> Result<(), KernelError> {
    let width = lists.dims()[2];
    check.shape("lists", lists, &[batch, heads, width])?;
    check.int("lists", lists)?;
    if width <= HEADER {
        return Err(check.unsupported("numbers of a list", width, "at least 4"));
    }
    Ok(())
}

/// Checks the sources: heads, and optionally layers.
pub(crate) fn check_sources(
    check: &Check,
    sources: &Tensor<3, Int>,
    [batch, heads]: [usize; 2],
) -> Result<(), KernelError> {
    let columns = sources.dims()[2];
    check.shape("sources", sources, &[batch, heads, columns.clamp(1, 2)])?;
    check.int("sources", sources)
}
