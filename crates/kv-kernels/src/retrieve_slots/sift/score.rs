//! Logits of the ranges that retrieve, or of all that are measured.

use cubecl::prelude::*;

use super::BINS;
use super::queue::{SCORES, run_of};
use super::sums::{Sums, write_sums};
use crate::retrieve_slots::kernel::Blueprint;
use crate::retrieve_slots::score::score_split;
use crate::retrieve_slots::sight::outset_of;

/// Scores ranges in `parts` each, sums the exponentials of each part's logits, and empties the
/// ranges' bins and tallies.
///
/// # Shapes
/// As for [`step`](crate::retrieve_slots::kernel::step), but `norms` `[P, parts]`; `tasks` `[P]`;
/// `part_sums` `[P, parts, G, 2]`, `bins` `[P, BINS]`, `tallies` `[P, 2]`. Ranges are `most` at
/// most.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub(super) fn score_kernel<F: Float, N: Size>(
    query: &[Vector<F, N>],
    keys: &[Vector<F, N>],
    offsets: &[i32],
    lengths: &[i32],
    newest: &[i32],
    table: &[i32],
    tasks: &[u32],
    logits: &mut [f32],
    ordered: &mut [u32],
    norms: &mut [f32],
    part_sums: &mut [f32],
    bins: &[Atomic<u32>],
    tallies: &[Atomic<u32>],
    pairs: usize,
    kv_heads: usize,
    parts: usize,
    stride: usize,
    block: usize,
    hidden: u32,
    scale: f32,
    #[comptime] most: usize,
    #[comptime] blueprint: Blueprint,
    #[define(F)] _dtype: ElemType,
) {
    let mut ranges = Shared::<[u32]>::new_slice(most);
    let run = run_of(tasks, &mut ranges, pairs, parts, SCORES, blueprint);
    for item in run.first..run.end {
        let (pair, part) = (ranges[item / parts] as usize, item % parts);
        let position = newest[pair / kv_heads];
        let outset = outset_of(table, pair, lengths[pair], position, block, hidden, blueprint);
        let mut bin = part * blueprint.units.comptime() + UNIT_POS as usize;
        while bin < BINS {
            bins[pair * BINS + bin].store(0u32);
            bin += parts * blueprint.units.comptime();
        }
        if part == 0 && UNIT_POS < 2 {
            tallies[2 * pair + UNIT_POS as usize].store(0u32);
        }
        let mut sums = Sums::none(comptime!(blueprint.held()));
        score_split::<F, N>(
            query,
            keys,
            logits,
            ordered,
            pair * stride,
            norms,
            &mut sums,
            &outset.sight,
            pair,
            offsets[pair] as usize,
            part,
            parts,
            stride,
            scale,
            blueprint,
        );
        write_sums(&sums, part_sums, pair * parts + part, blueprint);
    }
}
