//! The ops on pages in plain loops: the CPU path, and the oracle of the kernels' tests.

use super::{PageHeads, PageOptions};
use crate::components::sentinels::NO_SLOT;
use crate::select::scored_rows::BUDGETS;

/// The row of a page's minima.
fn row(offset: i32, kv_head: usize, page: usize, at: usize) -> usize {
    2 * (offset as usize / page + kv_head + at)
}

/// Writes the bounds of pages.
pub(crate) fn bound<E: Copy>(
    keys: &[E],
    bounds: &mut [E],
    [offsets, lengths]: [&[i32]; 2],
    head_dim: usize,
    page: usize,
    last: bool,
    load: impl Fn(E) -> f32,
) {
    for (kv_head, (&offset, &length)) in offsets.iter().zip(lengths).enumerate() {
        let length = length as usize;
        let pages = length.div_ceil(page);
        let first = if last { pages.saturating_sub(1) } else { 0 };
        for at in first..pages {
            let to = row(offset, kv_head, page, at) * head_dim;
            for column in 0..head_dim {
                let key = |slot: usize| keys[(offset as usize + slot) * head_dim + column];
                let (mut low, mut high) = (key(at * page), key(at * page));
                for slot in at * page..((at + 1) * page).min(length) {
                    let own = key(slot);
                    if load(own) < load(low) {
                        low = own;
                    }
                    if load(own) > load(high) {
                        high = own;
                    }
                }
                bounds[to + column] = low;
                bounds[to + head_dim + column] = high;
            }
        }
    }
}

/// Scores `[R, pages]`, numbers of candidates `[R]`, and numbers of wanted pages `[R]`.
pub(crate) fn score(
    query: &[f32],
    bounds: &[f32],
    [offsets, lengths]: [&[i32]; 2],
    budgets: &[i32],
    [head_dim, pages]: [usize; 2],
    options: PageOptions,
) -> (Vec<f32>, Vec<i32>, Vec<i32>) {
    let group = query.len() / head_dim / offsets.len();
    let each = if options.heads == PageHeads::Query { 1 } else { group };
    let rows = offsets.len() * group / each;
    let (mut scores, mut candidates, mut wanted) =
        (vec![0.0; rows * pages], Vec::new(), Vec::new());
    for at in 0..rows {
        let kv_head = at * each / group;
        let length = lengths[kv_head] as usize;
        let [own, count] = counts(length, budgets[at * BUDGETS] as usize, options);
        for page in 0..own.min(pages) {
            let from = row(offsets[kv_head], kv_head, options.page, page) * head_dim;
            let (low, high) = bounds[from..from + 2 * head_dim].split_at(head_dim);
            let heads = (at * each..(at + 1) * each).map(|head| {
                let query = &query[head * head_dim..][..head_dim];
                let bounds = low.iter().zip(high);
                query.iter().zip(bounds).map(|(q, (l, h))| (q * l).max(q * h)).sum::<f32>()
            });
            scores[at * pages + page] = match options.heads {
                PageHeads::Mean => heads.sum::<f32>() / each as f32,
                _ => heads.fold(f32::NEG_INFINITY, f32::max),
            };
        }
        candidates.push(own as i32);
        wanted.push(count as i32);
    }
    (scores, candidates, wanted)
}

/// How many pages of a range are candidates, and how many of them are wanted.
fn counts(length: usize, tokens: usize, options: PageOptions) -> [usize; 2] {
    let all = length.div_ceil(options.page);
    let afford = tokens / options.page;
    let (candidates, count) = match options.always_last {
        true => (all.saturating_sub(1), afford.max(1) - 1),
        false => (all, afford.max(3)),
    };
    [candidates, if tokens >= length { candidates } else { count.min(candidates) }]
}

/// The slots of chosen pages `[R, W]`, and the number of each row's slots `[R]`.
pub(crate) fn slots(
    pages: &[i32],
    found: &[i32],
    [offsets, lengths]: [&[i32]; 2],
    page: usize,
    always_last: bool,
) -> (Vec<i32>, Vec<i32>) {
    let (most, group) = (pages.len() / found.len(), found.len() / offsets.len());
    let width = (most + usize::from(always_last)) * page;
    let (mut slots, mut counts) = (Vec::new(), Vec::new());
    for (at, &found) in found.iter().enumerate() {
        let (offset, length) = (offsets[at / group], lengths[at / group]);
        let last = (length as usize).div_ceil(page) as i32 - 1;
        let chosen = pages[at * most..][..found as usize].iter().copied();
        let chosen = chosen.chain((always_last && last >= 0).then_some(last));
        let own = chosen.flat_map(|own| {
            let first = own * page as i32;
            (first..(first + page as i32).min(length)).map(|slot| offset + slot)
        });
        let before = slots.len();
        slots.extend(own);
        counts.push((slots.len() - before) as i32);
        slots.resize(before + width, NO_SLOT);
    }
    (slots, counts)
}
