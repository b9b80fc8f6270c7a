//! The kernels of Quest's pages, with one unit for each channel of a page's bounds, for each page's
//! score, or for each slot of a row.

use cubecl::prelude::*;

use crate::components::sentinels::NO_SLOT;
use crate::select::scored_rows::{BUDGETS, ScoredRowBuffers};

/// Head ranges, `[B, Hkv]` each, and the size of pages.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct PagedRanges {
    offsets: Box<[i32]>,
    lengths: Box<[i32]>,
    /// Slots of a page.
    page: usize,
}

/// The pages whose bounds are computed.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct BoundedPages {
    total_kv_heads: usize,
    /// Pages of each range that are visited, from the first page on; 1 where only the last page is.
    pages: usize,
    /// Elements of a key.
    columns: usize,
}

/// # Shapes
/// `keys` `[S, columns]`, `bounds` `[page_rows, columns]`.
#[cube(launch)]
pub(crate) fn page_bounds_kernel<E: Numeric>(
    keys: &[E],
    ranges: &PagedRanges,
    bounds: &mut [E],
    bounded: &BoundedPages,
    #[comptime] last: bool,
    #[define(E)] _dtype: ElemType,
) {
    let (at, columns, page) = (ABSOLUTE_POS, bounded.columns, ranges.page);
    if at >= bounded.total_kv_heads * bounded.pages * columns {
        terminate!();
    }
    let column = at % columns;
    let kv_head = at / columns / bounded.pages;
    let (offset, length) = (ranges.offsets[kv_head] as usize, ranges.lengths[kv_head] as usize);
    let mut own = at / columns % bounded.pages;
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

/// Queries' budgets and sizes, by which pages are scored.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct PageQueries {
    /// `[rows, 3]`
    budgets: Box<[i32]>,
    /// Vectors of a query, and of a bound.
    columns: usize,
    /// Query heads of a key-value head.
    group: usize,
    /// Query heads that choose their pages together.
    each: usize,
}

/// Comptime rules of the scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct PageRule {
    /// Whether heads that choose together use the mean of their scores; otherwise they use the
    /// maximum.
    pub(super) mean: bool,
    /// Whether the last page is always read.
    pub(super) always_last: bool,
}

/// # Shapes
/// `query` `[B, Hq, columns]` and `bounds` `[page_rows, columns]`, in vectors. A row of `scored` is
/// one query head, or the heads that choose together; a column is a page.
#[cube(launch)]
pub(crate) fn page_scores_kernel<E: Float, N: Size>(
    query: &[Vector<E, N>],
    bounds: &[Vector<E, N>],
    ranges: &PagedRanges,
    of: &PageQueries,
    scored: &mut ScoredRowBuffers,
    #[comptime] rule: PageRule,
    #[define(E)] _dtype: ElemType,
) {
    let PageRule { mean, always_last } = comptime!(rule);
    let (at, pages, page) = (ABSOLUTE_POS, scored.columns, ranges.page);
    if at >= scored.rows * pages {
        terminate!();
    }
    let (row, own) = (at / pages, at % pages);
    let (each, columns) = (of.each, of.columns);
    let kv_head = row * each / of.group;
    let (offset, length) = (ranges.offsets[kv_head] as usize, ranges.lengths[kv_head] as usize);
    let mut own_candidates = length.div_ceil(page);
    if always_last {
        own_candidates = max(own_candidates, 1) - 1;
    }
    if own == 0 {
        let tokens = of.budgets[row * BUDGETS] as usize;
        let mut count = own_candidates;
        if tokens < length {
            if always_last {
                count = max(tokens / page, 1) - 1;
            } else {
                count = max(tokens / page, 3);
            }
        }
        scored.candidates[row] = i32::cast_from(own_candidates);
        scored.wanted[row] = i32::cast_from(min(count, own_candidates));
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
        scored.scores[at] = score;
    }
}

/// The pages that rows have chosen, in ascending order.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct ChosenPages {
    /// `[rows, most]`
    pages: Box<[i32]>,
    /// `[rows]`
    found: Box<[i32]>,
    rows: usize,
    most: usize,
    /// Rows of a key-value head.
    group: usize,
}

/// # Shapes
/// `slots` `[rows, width]`, `counts` `[rows]`.
#[cube(launch)]
pub(crate) fn page_slots_kernel(
    chosen: &ChosenPages,
    ranges: &PagedRanges,
    slots: &mut [i32],
    counts: &mut [i32],
    width: usize,
    #[comptime] always_last: bool,
) {
    let (at, page) = (ABSOLUTE_POS, ranges.page);
    if at >= chosen.rows * width {
        terminate!();
    }
    let (row, column) = (at / width, at % width);
    let kv_head = row / chosen.group;
    let length = ranges.lengths[kv_head] as usize;
    let all = length.div_ceil(page);
    let found = chosen.found[row] as usize;
    // Chosen pages ascend: only the range's last page may be short.
    let mut total = found;
    if always_last {
        total += min(all, 1);
    }
    let mut own = all;
    if column / page < found {
        own = chosen.pages[row * chosen.most + column / page] as usize;
    } else if column / page < total {
        own = all - 1;
    }
    let slot = own * page + column % page;
    let mut written = i32::new(NO_SLOT as i64);
    if slot < length {
        written = i32::cast_from(ranges.offsets[kv_head] as usize + slot);
    }
    slots[at] = written;
    if column == 0 {
        let mut count = total * page;
        if total > 0 {
            let mut last = all - 1;
            if !always_last {
                last = chosen.pages[row * chosen.most + total - 1] as usize;
            }
            count = (total - 1) * page + min(length - last * page, page);
        }
        counts[row] = i32::cast_from(count);
    }
}
