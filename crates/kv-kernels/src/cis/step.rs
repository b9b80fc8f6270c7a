//! One range's step by one cube: selects behind scores that other kernels have made, or that it
//! makes itself.

use cubecl::prelude::*;

use super::bitmask::{BITMASKS, BitmaskPlace, CHUNK, WORD};
use super::blueprint::Blueprint;
use super::compact_bitmask::ListOffsets;
use super::finish_step::{finish_step, store_set, store_shared_set};
use super::log_sums::{Sums, log_sums};
use super::match_cached_set::{Decision, load_similarity_partials, match_cached_set};
use super::score::score_split;
use super::select_topk::{LogitRows, load_topk_sizes, select_topk};
use super::table::*;
use super::visible_range::load_step_context;
use crate::attention::decode::slot_indexer::SetView;
use crate::components::barrier::sync_memory;

/// # Shapes
/// As for [`step`].
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub(super) fn retrieve_kernel<F: Float, N: Size>(
    query: &[Vector<F, N>],
    keys: &[Vector<F, N>],
    vectors: &[F],
    set_vectors: &mut [f32],
    offsets: &[i32],
    lengths: &[i32],
    newest: &[i32],
    table: &mut [i32],
    logits: &mut [f32],
    ordered: &mut [u32],
    bitmasks: &mut [u32],
    log_sum_exp: &mut [f32],
    total_kv_heads: usize,
    kv_heads: usize,
    stride: usize,
    radius: usize,
    block: usize,
    hidden_share: u32,
    scale: f32,
    #[comptime] blueprint: Blueprint,
    #[define(F)] _dtype: ElemType,
) {
    let kv_head = CUBE_POS;
    if kv_head >= total_kv_heads {
        terminate!();
    }
    step::<F, N>(
        query,
        keys,
        vectors,
        set_vectors,
        offsets[kv_head] as usize,
        lengths[kv_head],
        newest[kv_head / kv_heads],
        table,
        logits,
        ordered,
        bitmasks,
        log_sum_exp,
        kv_head,
        stride,
        radius,
        block,
        hidden_share,
        scale,
        blueprint,
    );
}

/// Runs a range's step in a cube; returns what it reads.
///
/// # Shapes
/// In vectors: `query` `[P, G, columns]`, `keys` `[S, columns]`. `vectors` `[P, parts, length]`,
/// `set_vectors` `[P, sets, parts, length]`, `table` `[P, row]`; `logits` `[P, G, stride]`,
/// `ordered` `[P, stride]`, `bitmasks` `[P, 3, words]`, `log_sum_exp` `[P, G]`.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn step<F: Float, N: Size>(
    query: &[Vector<F, N>],
    keys: &[Vector<F, N>],
    vectors: &[F],
    set_vectors: &mut [f32],
    offset: usize,
    length: i32,
    position: i32,
    table: &mut [i32],
    logits: &mut [f32],
    ordered: &mut [u32],
    bitmasks: &mut [u32],
    log_sum_exp: &mut [f32],
    kv_head: usize,
    stride: usize,
    radius: usize,
    block: usize,
    hidden_share: u32,
    scale: f32,
    #[comptime] blueprint: Blueprint,
) -> SetView {
    let group = blueprint.group.comptime();
    let units = blueprint.units.comptime();
    let sets = blueprint.sets.comptime();
    let width = blueprint.width.comptime();
    let direct = comptime!(blueprint.direct());
    let staged = blueprint.staged.comptime();
    let unit = UNIT_POS as usize;
    let context =
        load_step_context(&*table, kv_head, length, position, block, hidden_share, blueprint);
    let own = context.own;
    let visible = &context.visible;
    let wanted = load_topk_sizes(&*table, own);
    let mut decided = table[own + DECIDED];
    let mut near = Shared::<[u32]>::new_slice(comptime!(staged.max(1)));
    let mut near_bitmasks =
        Shared::<[u32]>::new_slice(comptime!(BITMASKS * staged.div_ceil(WORD).max(1)));
    let words = stride.div_ceil(WORD);
    let marked = kv_head * BITMASKS * words;
    let all = comptime!(blueprint.measures);
    if comptime!(blueprint.scores) {
        let first =
            load_similarity_partials::<F>(vectors, &*set_vectors, &*table, kv_head, blueprint);
        let decision =
            match_cached_set::<F>(&first, vectors, &*set_vectors, &*table, &context, blueprint);
        decided = decision.decided;
        if all || decided == i32::new(RETRIEVES as i64) {
            let (scores, scores_at) = if comptime!(staged > 0) {
                (&mut near[..], 0usize)
            } else {
                (&mut ordered[..], kv_head * stride)
            };
            let mut none = Sums::none(comptime!(blueprint.held()));
            score_split::<F, N>(
                query, keys, logits, scores, scores_at, &mut none, visible, kv_head, offset,
                0usize, 1usize, stride, scale, blueprint,
            );
        }
    }
    let retrieves = decided == i32::new(RETRIEVES as i64);
    if comptime!(blueprint.chains && blueprint.shares && !blueprint.scores) {
        // All have read the range's fields, as they have where they compared.
        sync_cube();
    }
    store_shared_set::<F>(vectors, set_vectors, table, &context, decided, blueprint);
    let mut choice = 0usize;
    let mut set = 0usize;
    if decided > 0 {
        set = decided as usize;
    }
    if all || retrieves {
        sync_memory(blueprint.fenced);
        let base = kv_head * group * stride;
        let mut sums = Array::<f32>::new(group);
        #[unroll]
        for g in 0..group {
            sums[g] = 0.0f32;
        }
        if comptime!(blueprint.measures || group > 1) {
            let own = log_sums(&*logits, base, stride, visible, blueprint);
            #[unroll]
            for g in 0..group {
                sums[g] = own[g];
            }
        }
        if comptime!(blueprint.measures) && unit == 0 {
            #[unroll]
            for g in 0..group {
                log_sum_exp[kv_head * group + g] = sums[g];
            }
        }
        if retrieves {
            set = min(context.held, comptime!(sets - 1));
            let lists = ListOffsets {
                set: own + comptime!(list(sets, width, 0)) + set * width,
                choice: own + comptime!(list(sets, width, sets)),
                radius,
            };
            let rows = LogitRows { from: base, stride };
            if comptime!(direct && staged > 0 && !blueprint.scores) {
                let mut i = visible.start + unit;
                while i < visible.local {
                    let mut some = Array::<u32>::new(CHUNK);
                    #[unroll]
                    for c in 0..CHUNK {
                        let at = min(i + c * units, visible.local - 1);
                        some[c] = ordered[kv_head * stride + at];
                    }
                    #[unroll]
                    for c in 0..CHUNK {
                        let at = i + c * units;
                        if at < visible.local {
                            near[at] = some[c];
                        }
                    }
                    i += CHUNK * units;
                }
            }
            let (scores, scores_at, bits, bits_at) = if comptime!(staged > 0) {
                (&mut near[..], 0usize, &mut near_bitmasks[..], 0usize)
            } else {
                (&mut ordered[..], kv_head * stride, &mut bitmasks[..], marked)
            };
            let place = BitmaskPlace { marked: bits_at, words };
            let listed = select_topk(
                &*logits, scores, scores_at, bits, &place, table, &sums, &rows, visible, &lists,
                &wanted, blueprint,
            );
            choice = listed.chosen;
            store_set::<F>(vectors, set_vectors, table, &context, set, listed.count, blueprint);
            sync_memory(blueprint.fenced);
        }
    }
    let count = table[own + FIELDS + set * SET_FIELDS + COUNT] as usize;
    let decision = Decision { decided, count, choice };
    finish_step(table, own, visible, &decision, set, blueprint)
}
