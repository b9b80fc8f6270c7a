//! Logits by matrix instructions: keys of 16 slots as rows, query heads of a group as columns, 8 at
//! a time. It serves vectors of 16 bytes; `score_rows.rs` serves everything else.
//!
//! The order of the summed dimension is free, so keys go from memory to registers in whole vectors.
//! In a plane, lane `4 r + j` reads every fourth vector, from vector `j` on, of the keys of slots
//! `r` and `r + 8`. It gets the logits of these two slots for query heads `j` and `j + 4`.

use cubecl::cmma::MmaDefinition;
use cubecl::prelude::*;

use super::blueprint::Blueprint;
use super::kernel_args::ScoredKeys;
use super::log_sums::Sums;
use super::score_rows::ScoredSpan;
use crate::components::sentinels::LOWEST_LOGIT;
use crate::components::sort_key::sort_key;

/// Bytes of a vector.
pub(super) const VECTOR: usize = 16;
/// Query heads of a product. Where several queries vote, a group has more: keys stay in registers
/// then, and the products of one 8 heads follow the products of another.
const HEADS: usize = 8;
/// Units that share a row.
pub(super) const TEAM: usize = 4;
/// Slots of a tile.
const TILE: usize = 16;
/// Slots of half a tile. A unit holds one row in each half.
const HALF: usize = TILE / 2;
const PLANE: usize = 32;

/// Scores slots as [`score_rows`](super::score_rows::score_rows) does, in tiles of 16 slots.
#[cube]
pub(super) fn score_mma<F: Float, N: Size>(
    scored: &ScoredKeys<F, N>,
    logits: &mut [f32],
    ordered: &mut [u32],
    sums: &mut Sums,
    span: &ScoredSpan,
    #[comptime] blueprint: Blueprint,
) {
    let (group, columns) = comptime!((blueprint.group, blueprint.columns));
    let pieces = comptime!(columns / TEAM);
    let planes = comptime!(blueprint.units / PLANE);
    let ahead = blueprint.ahead.comptime();
    let blocks = comptime!(group.div_ceil(HEADS));
    let held = comptime!(group.div_ceil(TEAM));
    let def = MmaDefinition::<F, F, f32>::new(16usize, 8usize, 16usize);
    let (kv_head, offset, stride) = (span.kv_head, span.offset, span.stride);
    let (first, end) = (span.first, span.end);
    let (sinks, gap, base) = (span.sinks, span.gap, span.base);
    let unit = UNIT_POS as usize;
    let (plane, lane) = (unit / PLANE, unit % PLANE);
    let (r, j) = (lane / TEAM, lane % TEAM);

    let mut q = Array::<Vector<F, Const<2>>>::new(comptime!(4 * pieces));
    if comptime!(blocks == 1) {
        load_queries::<F, N>(scored, &mut q, kv_head, lane, 0usize, blueprint);
    }
    // All planes run equally many rounds.
    let rounds = (end - first).div_ceil(comptime!(planes * ahead * TILE));
    for round in 0..rounds {
        let from = first + (round * comptime!(planes * ahead) + plane) * TILE + r;
        let mut k = Array::<Vector<F, N>>::new(comptime!(2 * ahead * pieces));
        #[unroll]
        for row in 0..comptime!(2 * ahead) {
            let i = min(from + row_of(row, planes), end - 1);
            let slot = select(i < sinks, i, i + gap);
            #[unroll]
            for piece in 0..pieces {
                k[row * pieces + piece] = scored.keys[(offset + slot) * columns + piece * TEAM + j];
            }
        }
        let rows = comptime!(2 * ahead);
        let mut dots = Array::<f32>::new(comptime!(held * rows));
        #[unroll]
        for product in 0..comptime!(blocks * ahead) {
            let (block, tile) = comptime!((product / ahead, product % ahead));
            if comptime!(blocks > 1 && tile == 0) {
                load_queries::<F, N>(scored, &mut q, kv_head, lane, block, blueprint);
            }
            let mut acc = Array::<Vector<f32, Const<2>>>::new(2usize);
            acc[0] = Vector::new(0.0f32);
            acc[1] = Vector::new(0.0f32);
            #[unroll]
            for piece in 0..pieces {
                let low = Vector::<u32, Const<4>>::reinterpret(k[2 * tile * pieces + piece]);
                let high = Vector::<u32, Const<4>>::reinterpret(k[(2 * tile + 1) * pieces + piece]);
                #[unroll]
                for half in 0..2usize {
                    let mut a = Array::<Vector<F, Const<2>>>::new(4usize);
                    a[0] = Vector::reinterpret(low.extract(comptime!(2 * half)));
                    a[1] = Vector::reinterpret(high.extract(comptime!(2 * half)));
                    a[2] = Vector::reinterpret(low.extract(comptime!(2 * half + 1)));
                    a[3] = Vector::reinterpret(high.extract(comptime!(2 * half + 1)));
                    let mut b = Array::<Vector<F, Const<2>>>::new(2usize);
                    b[0] = q[piece * 4 + 2 * half];
                    b[1] = q[piece * 4 + 2 * half + 1];
                    acc = def.execute(&a, &b, &acc);
                }
            }
            #[unroll]
            for half in 0..2usize {
                let row = comptime!(2 * tile + half);
                let i = from + row_of(row, planes);
                let slot = select(i < sinks, i, i + gap);
                #[unroll]
                for h in 0..comptime!((group - block * HEADS).min(HEADS).div_ceil(TEAM)) {
                    let own = comptime!(block * HEADS / TEAM + h);
                    let head = j + own * TEAM;
                    let dot = acc[half].extract(h) * scored.scale;
                    dots[own * rows + row] = select(i < end, dot, f32::new(LOWEST_LOGIT));
                    if head < group && i < end {
                        if comptime!(blueprint.direct()) {
                            ordered[base + slot] = sort_key(dot);
                        } else {
                            logits[(kv_head * group + head) * stride + slot] = dot;
                        }
                    }
                }
            }
        }
        if comptime!(blueprint.feeds_histogram) {
            #[unroll]
            for h in 0..held {
                sums.add_all(h, &dots, comptime!(h * rows), rows);
            }
        }
    }
}

/// Loads the queries of a block of heads. A lane holds columns `2 j` and `2 j + 1` of a product,
/// which are query heads `j` and `j + 4` of the block.
#[cube]
fn load_queries<F: Float, N: Size>(
    scored: &ScoredKeys<F, N>,
    q: &mut Array<Vector<F, Const<2>>>,
    kv_head: usize,
    lane: usize,
    #[comptime] block: usize,
    #[comptime] blueprint: Blueprint,
) {
    let (group, columns) = comptime!((blueprint.group, blueprint.columns));
    let (r, j) = (lane / TEAM, lane % TEAM);
    let head = min(comptime!(block * HEADS) + r % 2 * TEAM + r / 2, comptime!(group - 1));
    #[unroll]
    for piece in 0..comptime!(columns / TEAM) {
        let vector = scored.query[(kv_head * group + head) * columns + piece * TEAM + j];
        let words = Vector::<u32, Const<4>>::reinterpret(vector);
        #[unroll]
        for word in 0..4usize {
            q[piece * 4 + word] = Vector::reinterpret(words.extract(word));
        }
    }
}

/// The distance of a unit's `row`-th row of a round from its first row. A plane's tiles are
/// `planes` tiles apart.
#[cube]
fn row_of(#[comptime] row: usize, #[comptime] planes: usize) -> usize {
    comptime!(row / 2 * planes * TILE + row % 2 * HALF).runtime()
}
