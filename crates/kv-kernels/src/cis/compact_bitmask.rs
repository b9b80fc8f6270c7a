//! Compacts a bitmask: lists the tokens of the slots whose bits are set, in ascending order. A
//! prefix sum of the words' bit counts gives each unit the place of its first token.

use cubecl::prelude::*;

use super::bitmask::{BitmaskPlace, WORD, own_words, shifted, within};
use super::blueprint::Blueprint;
use super::visible_range::VisibleRange;
use crate::components::prefix_sum::exclusive;

/// Counts of the tokens that [`compact_bitmask`] has listed, of a set and of the step's own choice.
#[derive(CubeType, Clone, Copy)]
pub(super) struct CompactedSet {
    /// Tokens in the set's list. A full list holds the first tokens of the set.
    pub(super) count: usize,
    /// Tokens that the set would have in a list with room for all of them.
    pub(super) marked: usize,
    /// Tokens in the list of the step's own choice, where the step reads the choice and not its
    /// set.
    pub(super) chosen: usize,
}

/// Where the set's list and the own choice's list begin in the table; and the dilation radius, in
/// slots on each side.
#[derive(CubeType, Clone, Copy)]
pub(super) struct ListOffsets {
    pub(super) set: usize,
    pub(super) choice: usize,
    pub(super) radius: usize,
}

/// A unit's words of a bitmask: from word `first` to before `last` of the bitmask at `from`. A
/// token's index is its slot plus `freed`.
#[derive(CubeType, Clone, Copy)]
struct UnitWords {
    from: usize,
    first: usize,
    last: usize,
    freed: usize,
}

/// Lists the tokens of the selected slots and of the neighbours of the `k_dilate` highest scores:
/// the set. Where the step reads its own choice, also lists the selected slots alone. Where the
/// cube `gathers` tokens, it collects them in shared memory and then writes them side by side.
///
/// # Shapes
/// `bitmasks` from `place.marked` on `[3, words]`, a bit a slot.
#[cube]
pub(super) fn compact_bitmask(
    bitmasks: &mut [u32],
    place: &BitmaskPlace,
    table: &mut [i32],
    visible: &VisibleRange,
    lists: &ListOffsets,
    #[comptime] gathers: bool,
    #[comptime] blueprint: Blueprint,
) -> CompactedSet {
    let units = blueprint.units.comptime();
    let width = blueprint.width.comptime();
    let (start, local) = (visible.start, visible.local);
    let (marked, words, radius) = (place.marked, place.words, lists.radius);
    // A neighbour may be a local slot now, and not be one any more in a later step that shares the
    // set.
    let reach = min(local + radius, visible.length);
    let known = local.div_ceil(WORD);
    let (first, last) = own_words(reach, units);
    let set = marked + 2 * words;
    for word in first..last {
        let mut chosen = 0u32;
        if word < known {
            chosen = bitmasks[marked + word];
        }
        for distance in 0..radius + 1 {
            chosen |= shifted(&*bitmasks, marked + words, known, word, distance);
        }
        bitmasks[set + word] = chosen & within(word, start, reach);
    }
    let mut tokens = Shared::<[i32]>::new_slice(comptime!(if gathers { width } else { 1 }));
    let count = write_tokens(
        &*bitmasks,
        &UnitWords { from: set, first, last, freed: visible.freed },
        table,
        lists.set,
        &mut tokens,
        gathers,
        blueprint,
    );
    let mut choice = 0usize;
    if comptime!(blueprint.reads_choice) {
        let last = max(min(last, known), first);
        choice = write_tokens(
            &*bitmasks,
            &UnitWords { from: marked, first, last, freed: visible.freed },
            table,
            lists.choice,
            &mut tokens,
            gathers,
            blueprint,
        );
    }
    CompactedSet { count: min(count, width), marked: count, chosen: min(choice, width) }
}

/// Lists the tokens of the slots whose bits are set, as far as the list has room. Returns how many
/// bits are set.
#[cube]
fn write_tokens(
    bitmasks: &[u32],
    words: &UnitWords,
    table: &mut [i32],
    to: usize,
    tokens: &mut Shared<[i32]>,
    #[comptime] gathers: bool,
    #[comptime] blueprint: Blueprint,
) -> usize {
    let units = blueprint.units.comptime();
    let mut parts = Shared::<[u32]>::new_slice(comptime!(blueprint.planes()));
    let mut own = 0u32;
    for word in words.first..words.last {
        own += bitmasks[words.from + word].count_ones();
    }
    let (before, count) = exclusive(own, &mut parts);
    let listed = min(count as usize, comptime!(blueprint.width));
    let mut next = before as usize;
    for word in words.first..words.last {
        let mut bits = bitmasks[words.from + word];
        while bits > 0 {
            let bit = ((bits - 1) & !bits).count_ones() as usize;
            if next < listed {
                let token = i32::cast_from(word * WORD + bit + words.freed);
                if gathers {
                    tokens[next] = token;
                } else {
                    table[to + next] = token;
                }
            }
            next += 1;
            bits &= bits - 1;
        }
    }
    if gathers {
        sync_cube();
        let mut i = UNIT_POS as usize;
        while i < listed {
            table[to + i] = tokens[i];
            i += units;
        }
        // The next list is gathered in the same shared memory.
        sync_cube();
    }
    count as usize
}
