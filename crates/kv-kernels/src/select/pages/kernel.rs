//! The CubeCL kernels: a unit a channel of a page, a page of a row, a slot of a row.

use cubecl::prelude::*;

use crate::select::scored_rows::BUDGETS;

/// # Shapes
/// `pages` of each range are visited, from the first on; one, the last, where `last`.
#[cube(launch)]
#[allow(clippy::too_many_arguments)]
pub(crate) fn page_bounds_kernel<E: Numeric>(
    keys: &[E],
    offsets: &[i32],
    lengths: &[i32],
    bounds: &mut [E],
    total_kv_heads: usize,
    pages: usize,
    columns: usize,
    page: usize,
    #[comptime] last: bool,
    #[define(E)] _dtype: ElemType,
) {
    let at = ABSOLUTE_POS;
    if at >= total_kv_heads * pages * columns {
        terminate!();
    }
    let column = at % columns;
    let kv_head = at / columns / pages;
    let (offset, length) = (offsets[kv_head] as usize, lengths[kv_head] as usize);
    let mut own = at / columns % pages;
    if last {
        own = max(length.div_ceil(page), 1) - 1;
    }
    let mut slot = own * page;
    if slot < length {
        let end = min(slot + page, length);
        let mut low = f32::cast_from(keys[(offset + slot) * columns + column]);
        let mut high = low;
        while slot < end {
            let key = f32::cast_from(keys[(offset + slot) * columns + column]);
            if key < low {
                low = key;
            }
            if key > high {
                high = key;
            }
            slot += 1;
        }
        let to = 2 * (offset / page + kv_head + own) * columns + column;
        bounds[to] = E::cast_from(low);
        bounds[to + columns] = E::cast_from(high);
    }
}

/// # Shapes
/// In vectors: `query` `[B, Hq, columns]`, `bounds` `[N, columns]`; `scores` `[rows, pages]`.
/// `each` query heads choose together.
#[cube(launch)]
#[allow(clippy::too_many_arguments)]
pub(crate) fn page_scores_kernel<E: Float, N: Size>(
    query: &[Vector<E, N>],
    bounds: &[Vector<E, N>],
    offsets: &[i32],
    lengths: &[i32],
    budgets: &[f32],
    scores: &mut [f32],
    candidates: &mut [i32],
    wanted: &mut [i32],
    rows: usize,
    pages: usize,
    columns: usize,
    group: usize,
    each: usize,
    page: usize,
    #[comptime] mean: bool,
    #[comptime] always_last: bool,
    #[define(E)] _dtype: ElemType,
) {
    let at = ABSOLUTE_POS;
    if at >= rows * pages {
        terminate!();
    }
    let (row, own) = (at / pages, at % pages);
    let kv_head = row * each / group;
    let (offset, length) = (offsets[kv_head] as usize, lengths[kv_head] as usize);
    let mut own_candidates = length.div_ceil(page);
    if always_last {
        own_candidates = max(own_candidates, 1) - 1;
    }
    if own == 0 {
        let tokens = budgets[row * BUDGETS] as usize;
        let mut count = own_candidates;
        if tokens < length {
            if always_last {
                count = max(tokens / page, 1) - 1;
            } else {
                count = max(tokens / page, 3);
            }
        }
        candidates[row] = i32::cast_from(own_candidates);
        wanted[row] = i32::cast_from(min(count, own_candidates));
    }
    if own < own_candidates {
        let from = 2 * (offset / page + kv_head + own) * columns;
        let mut score = 0.0f32;
        for head in 0..each {
            let mut sum = 0.0f32;
            for column in 0..columns {
                let q = Vector::<f32, N>::cast_from(query[(row * each + head) * columns + column]);
                let low = q * Vector::<f32, N>::cast_from(bounds[from + column]);
                let high = q * Vector::<f32, N>::cast_from(bounds[from + columns + column]);
                #[unroll]
                for lane in 0..N::value() {
                    let (a, b) = (low.extract(lane), high.extract(lane));
                    sum += select(a > b, a, b);
                }
            }
            if mean {
                score += sum / f32::cast_from(each);
            } else if head == 0 {
                score = sum;
            } else {
                score = select(sum > score, sum, score);
            }
        }
        scores[at] = score;
    }
}

/// # Shapes
/// `pages` `[rows, most]`, `slots` `[rows, width]`.
#[cube(launch)]
#[allow(clippy::too_many_arguments)]
pub(crate) fn page_slots_kernel(
    pages: &[i32],
    found: &[i32],
    offsets: &[i32],
    lengths: &[i32],
    slots: &mut [i32],
    counts: &mut [i32],
    rows: usize,
    most: usize,
    width: usize,
    group: usize,
    page: usize,
    #[comptime] always_last: bool,
) {
    let at = ABSOLUTE_POS;
    if at >= rows * width {
        terminate!();
    }
    let (row, column) = (at / width, at % width);
    let kv_head = row / group;
    let length = lengths[kv_head] as usize;
    let all = length.div_ceil(page);
    let chosen = found[row] as usize;
    // Pages are chosen in order: only the last one of all may be short.
    let mut total = chosen;
    if always_last {
        total += min(all, 1);
    }
    let mut own = all;
    if column / page < chosen {
        own = pages[row * most + column / page] as usize;
    } else if column / page < total {
        own = all - 1;
    }
    let slot = own * page + column % page;
    let mut written = i32::new(-1);
    if slot < length {
        written = i32::cast_from(offsets[kv_head] as usize + slot);
    }
    slots[at] = written;
    if column == 0 {
        let mut count = total * page;
        if total > 0 {
            let mut last = all - 1;
            if !always_last {
                last = pages[row * most + total - 1] as usize;
            }
            count = (total - 1) * page + min(length - last * page, page);
        }
        counts[row] = i32::cast_from(count);
    }
}
