//! Which ranges retrieve.

use cubecl::prelude::*;

use super::BINS;
use super::queue;
use crate::retrieve_slots::decide::{decide, outset_of};
use crate::retrieve_slots::kernel::Blueprint;
use crate::retrieve_slots::table::{DECIDED, DISTANCE, RETRIEVES};

/// Decides, a cube a range, and empties the bins and tallies of those that retrieve.
///
/// # Shapes
/// As for [`step`](crate::retrieve_slots::kernel::step); `tasks` `[P]`, `bins` `[P, BINS]`, `tallies` `[P, 2]`.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub(super) fn decide_kernel<F: Float>(
    vectors: &[F],
    set_vectors: &[f32],
    lengths: &[i32],
    newest: &[i32],
    table: &mut [i32],
    tasks: &mut [u32],
    bins: &[Atomic<u32>],
    tallies: &[Atomic<u32>],
    pairs: usize,
    kv_heads: usize,
    block: usize,
    hidden: u32,
    #[comptime] blueprint: Blueprint,
    #[define(F)] _dtype: ElemType,
) {
    let pair = CUBE_POS;
    if pair >= pairs {
        terminate!();
    }
    let (length, position) = (lengths[pair], newest[pair / kv_heads]);
    let outset = outset_of(&*table, pair, length, position, block, hidden, blueprint);
    let (decided, distance) = decide::<F>(vectors, set_vectors, pair, &outset, blueprint);
    let retrieves = decided == i32::new(RETRIEVES as i64);
    if retrieves {
        let mut bin = UNIT_POS as usize;
        while bin < BINS {
            bins[pair * BINS + bin].store(0u32);
            bin += blueprint.units.comptime();
        }
        if UNIT_POS < 2 {
            tallies[2 * pair + UNIT_POS as usize].store(0u32);
        }
    }
    // Nothing here reads these fields.
    if UNIT_POS == 0 {
        let also = comptime!(if blueprint.measures { queue::SCORES } else { 0 });
        let all = comptime!(queue::SCORES | queue::RETRIEVES);
        tasks[pair] = select(retrieves, all, also);
        table[outset.own + DECIDED] = decided;
        table[outset.own + DISTANCE] = i32::reinterpret(distance);
    }
}
