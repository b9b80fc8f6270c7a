//! The kernels of the shared lists: one stores lists, with one unit for each number; one makes
//! slots of them, with one unit for each slot.

use cubecl::prelude::*;

use super::HEADER;
use crate::components::sentinels::NO_SLOT;
use crate::select::scored_rows::BUDGETS;

/// The tokens that rows have chosen in this step.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct NewLists {
    /// `[rows, width - HEADER]`
    indices: Box<[i32]>,
    /// `[rows]`
    found: Box<[i32]>,
    /// `[rows]`, 0 for rows that keep their lists.
    wanted: Box<[i32]>,
    /// `[rows, 3]`
    budgets: Box<[i32]>,
    /// `[B, Hkv]`
    lengths: Box<[i32]>,
}

/// Sizes of a layer's lists.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct ListSizes {
    rows: usize,
    /// Numbers of a list.
    width: usize,
    /// Query heads of a key-value head.
    group: usize,
}

/// # Shapes
/// `lists` `[rows, width]`; `board` `[layers, rows, width]` where it `posts`.
#[cube(launch)]
pub(crate) fn keep_lists_kernel(
    lists: &mut [i32],
    new: &NewLists,
    board: &mut [i32],
    layer: usize,
    sizes: &ListSizes,
    #[comptime] posts: bool,
) {
    let (at, width) = (ABSOLUTE_POS, sizes.width);
    if at >= sizes.rows * width {
        terminate!();
    }
    let (row, column) = (at / width, at % width);
    let mut number = lists[at];
    if new.wanted[row] > 0 {
        if column == 0 {
            number = new.found[row];
        } else if column == 1 {
            let length = new.lengths[row / sizes.group];
            let first = min(new.budgets[row * BUDGETS + 1], length);
            number = max(first, length - new.budgets[row * BUDGETS + 2]);
        } else if column == 2 {
            number += 1;
        } else {
            number = new.indices[row * (width - HEADER) + column - HEADER];
        }
        lists[at] = number;
    }
    if posts {
        board[layer * sizes.rows * width + at] = number;
    }
}

/// The lists that rows read, and the sources that say which.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct ReadLists {
    /// `[layers, rows, width]`
    table: Box<[i32]>,
    /// `[rows, source_width]`
    sources: Box<[i32]>,
    /// `[rows, 3]`
    budgets: Box<[i32]>,
    /// `Hq`
    heads: usize,
    source_width: usize,
}

/// The slots that rows attend to.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct ListedSlots {
    /// `[rows, width]`
    slots: Box<[i32]>,
    /// `[rows]`
    counts: Box<[i32]>,
    width: usize,
}

/// # Shapes
/// `offsets` and `lengths` `[B, Hkv]`.
#[cube(launch)]
pub(crate) fn list_slots_kernel(
    read: &ReadLists,
    offsets: &[i32],
    lengths: &[i32],
    listed: &mut ListedSlots,
    sizes: &ListSizes,
) {
    let (at, width) = (ABSOLUTE_POS, listed.width);
    if at >= sizes.rows * width {
        terminate!();
    }
    let (row, column) = (at / width, at % width);
    let kv_head = row / sizes.group;
    let (offset, length) = (offsets[kv_head] as usize, lengths[kv_head] as usize);
    let mut from = row / read.heads * read.heads + read.sources[row * read.source_width] as usize;
    if read.source_width > 1 {
        from += read.sources[row * read.source_width + 1] as usize * sizes.rows;
    }
    from *= sizes.width;
    let own = read.budgets[row * BUDGETS + 1] as usize;
    let sinks = min(own, length);
    // A list that was never chosen has no tokens.
    let chosen = max(read.table[from], 0) as usize;
    let first_recent = max(read.table[from + 1] as usize, sinks);
    let mut total = sinks + chosen;
    if length > first_recent {
        total += length - first_recent;
    }
    let mut slot = i32::new(NO_SLOT as i64);
    if column < sinks {
        slot = i32::cast_from(offset + column);
    } else if column < sinks + chosen {
        let index = read.table[from + HEADER + column - sinks] as usize;
        slot = i32::cast_from(offset + own + index);
    } else if column < total {
        slot = i32::cast_from(offset + first_recent + column - sinks - chosen);
    }
    listed.slots[at] = slot;
    if column == 0 {
        listed.counts[row] = i32::cast_from(min(total, width));
    }
}
