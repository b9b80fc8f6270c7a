//! The best of what is within the edges' bins.

use cubecl::prelude::*;

use super::edge::{ABOVE, BIN, FOUND, WITHIN, find_edges};
use super::{EDGE_WITHIN, EDGES, FINER, finer_bin_of};
use crate::retrieve_slots::choose::Wanted;
use crate::retrieve_slots::kernel::Blueprint;
use crate::retrieve_slots::marks::{MARKS, WORD};
use crate::retrieve_slots::sight::Sight;

/// Marks what is above the edges' bins and the highest candidates, ties by the lowest slot: as many
/// as are wanted in all. Of candidates, too, those above the edge's part of its bin are in, and
/// those within it are compared.
///
/// # Shapes
/// `near` `[3, words]`.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(super) fn mark_best(
    marks: &[u32],
    candidates: &[u32],
    edges: &[u32],
    pair: usize,
    stride: usize,
    near: &mut Shared<[u32]>,
    sight: &Sight,
    wanted: &Wanted,
    highest: f32,
    #[comptime] words: usize,
    #[comptime] room: usize,
    #[comptime] blueprint: Blueprint,
) {
    let units = blueprint.units.comptime();
    let unit = UNIT_POS as usize;
    let chosen = Shared::<[Atomic<u32>]>::new_slice(comptime!(2 * words));
    let all = stride.div_ceil(WORD);
    let marked = pair * MARKS * all;
    let known = sight.local.div_ceil(WORD);
    let mut word = unit;
    while word < known {
        #[unroll]
        for search in 0..2usize {
            chosen[search * words + word].store(marks[marked + search * all + word]);
        }
        word += units;
    }
    let histograms = Shared::<[Atomic<u32>]>::new_slice(comptime!(2 * FINER));
    let tied = Shared::<[Atomic<u32>]>::new_slice(2usize);
    let mut ties = Shared::<[u32]>::new_slice(comptime!(4 * room));
    let mut found = Shared::<[u32]>::new_slice(comptime!(2 * FOUND));
    let each = comptime!(room.div_ceil(units));
    let mut counts = Array::<usize>::new(2usize);
    let mut left = Array::<u32>::new(2usize);
    let mut keys = Array::<u32>::new(comptime!(2 * each));
    let mut slots = Array::<u32>::new(comptime!(2 * each));
    #[unroll]
    for search in 0..2usize {
        let most = if comptime!(search == 0) { wanted.top } else { wanted.fewer() };
        left[search] = most as u32 - edges[pair * EDGES + search];
        counts[search] = edges[pair * EDGES + EDGE_WITHIN + search] as usize;
        #[unroll]
        for e in 0..each {
            let i = min(unit + e * units, counts[search] - 1);
            let from = 2 * ((2 * pair + search) * room + i);
            keys[search * each + e] = candidates[from];
            slots[search * each + e] = candidates[from + 1];
        }
    }
    let mut bin = unit;
    while bin < comptime!(2 * FINER) {
        histograms[bin].store(0u32);
        bin += units;
    }
    if unit < 2 {
        tied[unit].store(0u32);
    }
    sync_cube();
    #[unroll]
    for search in 0..2usize {
        #[unroll]
        for e in 0..each {
            if unit + e * units < counts[search] {
                let bin = finer_bin_of(keys[search * each + e], highest);
                histograms[search * FINER + bin].fetch_add(1u32);
            }
        }
    }
    sync_cube();
    #[unroll]
    for search in 0..2usize {
        let (base, to) = comptime!((search * FINER, search * FOUND));
        let mut most = Array::<u32>::new(1usize);
        most[0] = left[search];
        find_edges(&histograms[..], base, FINER, &most, 1usize, &mut found, to, blueprint);
    }
    sync_cube();
    #[unroll]
    for search in 0..2usize {
        let edge = comptime!(search * FOUND);
        #[unroll]
        for e in 0..each {
            let (key, slot) = (keys[search * each + e], slots[search * each + e]);
            if unit + e * units < counts[search] {
                let bin = finer_bin_of(key, highest) as u32;
                if bin < found[edge + BIN] {
                    choose(&chosen, slot, comptime!(search * words));
                } else if bin == found[edge + BIN] {
                    let at = tied[search].fetch_add(1u32) as usize;
                    let to = 2 * (search * room + at);
                    ties[to] = key;
                    ties[to + 1] = slot;
                }
            }
        }
    }
    sync_cube();
    #[unroll]
    for search in 0..2usize {
        let edge = comptime!(search * FOUND);
        let from = comptime!(2 * search * room);
        let last = left[search] - found[edge + ABOVE];
        let within = found[edge + WITHIN] as usize;
        let mut i = unit;
        while i < within {
            let (key, slot) = (ties[from + 2 * i], ties[from + 2 * i + 1]);
            let mut rank = 0u32;
            for other in 0..within {
                let (others, at) = (ties[from + 2 * other], ties[from + 2 * other + 1]);
                rank += select(others > key || (others == key && at < slot), 1u32, 0u32);
            }
            if rank < last {
                choose(&chosen, slot, comptime!(search * words));
            }
            i += units;
        }
    }
    sync_cube();
    word = unit;
    while word < known {
        near[word] = chosen[word].load();
        near[words + word] = select(wanted.dilated > 0, chosen[words + word].load(), 0u32);
        word += units;
    }
}

/// Marks a slot in the words from `first` on.
#[cube]
fn choose(chosen: &Shared<[Atomic<u32>]>, slot: u32, #[comptime] first: usize) {
    let bit = 1u32 << (slot % comptime!(WORD as u32));
    chosen[first + slot as usize / WORD].fetch_or(bit);
}
