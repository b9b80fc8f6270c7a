//! The CubeCL kernels: a unit a number of a list, a slot of a row.

use cubecl::prelude::*;

use super::HEADER;
use crate::select::scored_rows::BUDGETS;

/// # Shapes
/// `lists` `[rows, width]`; `board` `[layers, rows, width]` where it `posts`.
#[cube(launch)]
#[allow(clippy::too_many_arguments)]
pub(crate) fn keep_lists_kernel(
    lists: &mut [f32],
    indices: &[i32],
    found: &[i32],
    wanted: &[i32],
    budgets: &[f32],
    lengths: &[i32],
    board: &mut [f32],
    rows: usize,
    width: usize,
    group: usize,
    layer: usize,
    #[comptime] posts: bool,
) {
    let at = ABSOLUTE_POS;
    if at >= rows * width {
        terminate!();
    }
    let (row, column) = (at / width, at % width);
    let mut number = lists[at];
    if wanted[row] > 0 {
        if column == 0 {
            number = f32::cast_from(found[row]);
        } else if column == 1 {
            let length = lengths[row / group] as usize;
            let recents = budgets[row * BUDGETS + 2] as usize;
            let mut first = min(budgets[row * BUDGETS + 1] as usize, length);
            if length > recents {
                first = max(first, length - recents);
            }
            number = f32::cast_from(first);
        } else if column == 2 {
            number += 1.0f32;
        } else {
            number = f32::cast_from(indices[row * (width - HEADER) + column - HEADER]);
        }
        lists[at] = number;
    }
    if posts {
        board[layer * rows * width + at] = number;
    }
}

/// # Shapes
/// `table` `[layers, rows, list]`, `sources` `[rows, columns]`, `slots` `[rows, width]`.
#[cube(launch)]
#[allow(clippy::too_many_arguments)]
pub(crate) fn list_slots_kernel(
    table: &[f32],
    sources: &[f32],
    budgets: &[f32],
    offsets: &[i32],
    lengths: &[i32],
    slots: &mut [i32],
    counts: &mut [i32],
    rows: usize,
    heads: usize,
    group: usize,
    list: usize,
    columns: usize,
    width: usize,
) {
    let at = ABSOLUTE_POS;
    if at >= rows * width {
        terminate!();
    }
    let (row, column) = (at / width, at % width);
    let (offset, length) = (offsets[row / group] as usize, lengths[row / group] as usize);
    let mut from = row / heads * heads + sources[row * columns] as usize;
    if columns > 1 {
        from += sources[row * columns + 1] as usize * rows;
    }
    from *= list;
    let own = budgets[row * BUDGETS + 1] as usize;
    let sinks = min(own, length);
    let mut chosen = 0usize;
    if table[from] > 0.0f32 {
        chosen = table[from] as usize;
    }
    let first_recent = max(table[from + 1] as usize, sinks);
    let mut total = sinks + chosen;
    if length > first_recent {
        total += length - first_recent;
    }
    let mut slot = i32::new(-1);
    if column < sinks {
        slot = i32::cast_from(offset + column);
    } else if column < sinks + chosen {
        let index = table[from + HEADER + column - sinks] as usize;
        slot = i32::cast_from(offset + own + index);
    } else if column < total {
        slot = i32::cast_from(offset + first_recent + column - sinks - chosen);
    }
    slots[at] = slot;
    if column == 0 {
        counts[row] = i32::cast_from(min(total, width));
    }
}
