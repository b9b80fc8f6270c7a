//! Logits without matrix instructions: a team of units shares a key's row, and each unit holds some
//! columns of it.

use cubecl::prelude::*;

use super::blueprint::Blueprint;
use super::kernel_args::ScoredKeys;
use super::log_sums::Sums;
use crate::components::sort_key::sort_key;

/// The visible slots of a range that are scored.
#[derive(CubeType, Clone, Copy)]
pub(super) struct ScoredSpan {
    /// The range, and its first slot.
    pub(super) kv_head: usize,
    pub(super) offset: usize,
    /// The first and the end of the scored slots, counted among the visible slots.
    pub(super) first: usize,
    pub(super) end: usize,
    /// The visible slots after the first `sinks` lie `gap` slots further on in the range.
    pub(super) sinks: usize,
    pub(super) gap: usize,
    /// Where the range's sort keys begin.
    pub(super) base: usize,
    /// The distance between the logits of two query heads.
    pub(super) stride: usize,
}

/// Writes the logits of a span's slots, or their sort keys where these are made directly. Where
/// scores feed a histogram, also adds the logits to the unit's sums.
///
/// # Shapes
/// `logits` `[P, G, stride]`, `ordered` from `span.base` on `[stride]`.
#[cube]
pub(super) fn score_rows<F: Float, N: Size>(
    scored: &ScoredKeys<F, N>,
    logits: &mut [f32],
    ordered: &mut [u32],
    sums: &mut Sums,
    span: &ScoredSpan,
    #[comptime] blueprint: Blueprint,
) {
    let group = blueprint.group.comptime();
    let columns = blueprint.columns.comptime();
    let team_size = blueprint.team.comptime();
    let own = columns.div_ceil(team_size).comptime();
    let teams = comptime!(blueprint.units / team_size);
    let ahead = blueprint.ahead.comptime();
    let (kv_head, offset, stride) = (span.kv_head, span.offset, span.stride);
    let (first, end) = (span.first, span.end);
    let (sinks, gap, base) = (span.sinks, span.gap, span.base);
    let unit = UNIT_POS as usize;
    let member = unit % team_size;
    let team = unit / team_size;

    let mut q = Array::<Vector<f32, N>>::new(comptime!(group * own));
    #[unroll]
    for g in 0..group {
        #[unroll]
        for c in 0..own {
            let column = member + c * team_size;
            q[g * own + c] = Vector::new(0.0f32);
            if column < columns {
                q[g * own + c] =
                    Vector::cast_from(scored.query[(kv_head * group + g) * columns + column])
                        * Vector::new(scored.scale);
            }
        }
    }
    // All teams run equally many rounds, since a plane's teams exchange numbers in each.
    let rounds = (end - first).div_ceil(comptime!(teams * ahead));
    for round in 0..rounds {
        let mut at = Array::<usize>::new(ahead);
        let mut k = Array::<Vector<F, N>>::new(comptime!(ahead * own));
        #[unroll]
        for a in 0..ahead {
            let i = min(first + (round * ahead + a) * teams + team, end - 1);
            let slot = select(i < sinks, i, i + gap);
            at[a] = slot;
            #[unroll]
            for c in 0..own {
                let column = min(member + c * team_size, comptime!(columns - 1));
                k[a * own + c] = scored.keys[(offset + slot) * columns + column];
            }
        }
        #[unroll]
        for a in 0..ahead {
            let mut mine = Array::<f32>::new(comptime!(group.div_ceil(team_size)));
            #[unroll]
            for g in 0..group {
                let mut products = Vector::<f32, N>::new(0.0f32);
                #[unroll]
                for c in 0..own {
                    products += q[g * own + c] * Vector::cast_from(k[a * own + c]);
                }
                let dot = team_sum(products.vector_sum(), team_size);
                if member == comptime!(g % team_size) {
                    if comptime!(blueprint.direct()) {
                        ordered[base + at[a]] = sort_key(dot);
                    } else {
                        logits[(kv_head * group + g) * stride + at[a]] = dot;
                    }
                    mine[g / team_size] = dot;
                }
            }
            if comptime!(blueprint.feeds_histogram) {
                // After the end, the last row was read again.
                if first + (round * ahead + a) * teams + team < end {
                    #[unroll]
                    for h in 0..comptime!(group.div_ceil(team_size)) {
                        if member + h * team_size < group {
                            sums.add(h, mine[h], 1.0f32);
                        }
                    }
                }
            }
        }
    }
}

/// Sums over a team's units, a power of two.
#[cube]
fn team_sum(value: f32, #[comptime] team: usize) -> f32 {
    let mut sum = value;
    #[unroll]
    for level in 0..comptime!(team.ilog2()) {
        sum += plane_shuffle_xor(sum, comptime!(1u32 << level));
    }
    sum
}
