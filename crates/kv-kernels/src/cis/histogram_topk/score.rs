//! Logits of the ranges that retrieve, or of all that are measured.

use cubecl::prelude::*;

use super::BINS;
use super::log_sums::write_sums;
use super::tasks::{SCORES, run_of};
use crate::cis::blueprint::Blueprint;
use crate::cis::log_sums::Sums;
use crate::cis::score::score_split;
use crate::cis::visible_range::load_step_context;

/// Scores ranges in `parts` each, sums the exponentials of each part's logits, and empties the
/// ranges' bins and tallies.
///
/// # Shapes
/// As for [`step`](crate::cis::step::step); `tasks` `[P]`; `part_sums` `[P, parts, G, 2]`, `bins`
/// `[P, BINS]`, `tallies` `[P, 2]`. Ranges are `most` at most.
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
    part_sums: &mut [f32],
    bins: &[Atomic<u32>],
    tallies: &[Atomic<u32>],
    total_kv_heads: usize,
    kv_heads: usize,
    parts: usize,
    stride: usize,
    block: usize,
    hidden_share: u32,
    scale: f32,
    #[comptime] most: usize,
    #[comptime] blueprint: Blueprint,
    #[define(F)] _dtype: ElemType,
) {
    let mut ranges = Shared::<[u32]>::new_slice(most);
    let run = run_of(tasks, &mut ranges, total_kv_heads, parts, SCORES, blueprint);
    for item in run.first..run.end {
        let (kv_head, part) = (ranges[item / parts] as usize, item % parts);
        let position = newest[kv_head / kv_heads];
        let context = load_step_context(
            table,
            kv_head,
            lengths[kv_head],
            position,
            block,
            hidden_share,
            blueprint,
        );
        let mut bin = part * blueprint.units.comptime() + UNIT_POS as usize;
        while bin < BINS {
            bins[kv_head * BINS + bin].store(0u32);
            bin += parts * blueprint.units.comptime();
        }
        if part == 0 && UNIT_POS < 2 {
            tallies[2 * kv_head + UNIT_POS as usize].store(0u32);
        }
        let mut sums = Sums::none(comptime!(blueprint.held()));
        score_split::<F, N>(
            query,
            keys,
            logits,
            ordered,
            kv_head * stride,
            &mut sums,
            &context.visible,
            kv_head,
            offsets[kv_head] as usize,
            part,
            parts,
            stride,
            scale,
            blueprint,
        );
        write_sums(&sums, part_sums, kv_head * parts + part, blueprint);
    }
}
