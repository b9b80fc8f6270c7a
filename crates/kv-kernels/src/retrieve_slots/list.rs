//! A set's tokens, listed from marks.

use cubecl::prelude::*;

use super::choose::sync_scratch;
use super::kernel::Blueprint;
use super::marks::{WORD, own_words, shifted, within};
use super::sight::{Sight, first_in_sight};
use crate::scan::exclusive;

/// What is listed of a set.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Listed {
    /// Tokens in the list, which has room for the first ones.
    pub(super) count: usize,
    /// Tokens that should be.
    pub(super) marked: usize,
    /// The most attention that a query does not give to what is surely attended to until the block ends.
    pub(super) dropped: f32,
}

/// Writes the tokens of marked slots, and of the neighbours of the best, from `to` on. Where the cube `gathers` tokens,
/// they go to memory side by side.
///
/// # Shapes
/// `marks` from `marked` on `[3, words]`, a bit a slot.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(super) fn list_marked(
    logits: &[f32],
    marks: &mut [u32],
    marked: usize,
    words: usize,
    table: &mut [i32],
    sums: &Array<f32>,
    pair: usize,
    stride: usize,
    sight: &Sight,
    to: usize,
    radius: usize,
    block: usize,
    hidden: u32,
    #[comptime] gathers: bool,
    #[comptime] blueprint: Blueprint,
) -> Listed {
    let group = blueprint.group.comptime();
    let (units, planes) = comptime!((blueprint.units, blueprint.planes()));
    let unit = UNIT_POS as usize;
    let (start, local) = (sight.start, sight.local);
    let from = pair * group * stride;
    let mut parts = Shared::<[u32]>::new_slice(planes);
    // Neighbours of the best may be locals, which go out of the locals' place with time.
    let reach = min(local + radius, sight.length);
    let known = local.div_ceil(WORD);
    let (first, last) = own_words(reach, units);
    let mut own = 0u32;
    for word in first..last {
        let mut chosen = 0u32;
        if word < known {
            chosen = marks[marked + word];
        }
        for distance in 0..radius + 1 {
            chosen |= shifted(&*marks, marked + words, known, word, distance);
        }
        chosen &= within(word, start, reach);
        marks[marked + 2 * words + word] = chosen;
        own += chosen.count_ones();
    }
    let (before, count) = exclusive(own, &mut parts);
    let listed = min(count as usize, comptime!(blueprint.width));
    let mut tokens =
        Shared::<[i32]>::new_slice(comptime!(if gathers { blueprint.width } else { 1 }));
    let mut next = before as usize;
    for word in first..last {
        let mut bits = marks[marked + 2 * words + word];
        while bits > 0 {
            let bit = ((bits - 1) & !bits).count_ones() as usize;
            if next < listed {
                let token = i32::cast_from(word * WORD + bit + sight.freed);
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
        let mut i = unit;
        while i < listed {
            table[to + i] = tokens[i];
            i += units;
        }
    }

    let mut dropped = 0.0f32;
    if comptime!(blueprint.certified) {
        sync_scratch(blueprint);
        let left = block - 1 - (sight.tokens - min(sight.tokens, 1usize)) % block;
        let ahead = first_in_sight(hidden, sight.tokens + left);
        let later = ahead - min(ahead, sight.freed);
        let stays = min(local + left, sight.length);
        let mut masses = Shared::<[f32]>::new_slice(comptime!(planes * group));
        let plane = (UNIT_POS / PLANE_DIM) as usize;
        #[unroll]
        for g in 0..group {
            let mut mass = 0.0f32;
            let mut i = start + unit;
            while i < sight.length {
                let mut kept = i >= stays;
                if !kept && i < reach {
                    let bits = marks[marked + 2 * words + i / WORD];
                    kept = (bits >> u32::cast_from(i % WORD)) & 1u32 > 0;
                }
                if !kept || i < later {
                    mass += (logits[from + g * stride + i] - sums[g]).exp();
                }
                i += units;
            }
            mass = plane_sum(mass);
            if UNIT_POS_PLANE == 0 {
                masses[g * planes + plane] = mass;
            }
        }
        sync_cube();
        #[unroll]
        for g in 0..group {
            let mut mass = 0.0f32;
            for other in 0..(CUBE_DIM / PLANE_DIM) as usize {
                mass += masses[g * planes + other];
            }
            dropped = max(dropped, mass);
        }
    }
    Listed { count: listed, marked: count as usize, dropped }
}
