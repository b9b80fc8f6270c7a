//! Which ranges retrieve, and the end of the step for those that do not.

use cubecl::prelude::*;

use super::queue;
use crate::retrieve_slots::conclude::{conclude, keep_shared};
use crate::retrieve_slots::decide::{decide, glimpse};
use crate::retrieve_slots::kernel::Blueprint;
use crate::retrieve_slots::sight::outset_of;
use crate::retrieve_slots::table::RETRIEVES;

/// Decides, a cube a range, and concludes for those that do not retrieve.
///
/// # Shapes
/// As for [`step`](crate::retrieve_slots::kernel::step); `tasks` `[P]`.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub(super) fn decide_kernel<F: Float>(
    vectors: &[F],
    set_vectors: &mut [f32],
    lengths: &[i32],
    newest: &[i32],
    table: &mut [i32],
    tasks: &mut [u32],
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
    let first = glimpse::<F>(vectors, &*set_vectors, &*table, pair, blueprint);
    let outset = outset_of(&*table, pair, length, position, block, hidden, blueprint);
    let decision = decide::<F>(&first, vectors, &*set_vectors, &*table, pair, &outset, blueprint);
    let decided = decision.decided;
    let retrieves = decided == i32::new(RETRIEVES as i64);
    keep_shared::<F>(vectors, set_vectors, table, &outset, pair, decided, blueprint);
    if !retrieves {
        let set = max(decided, 0i32) as usize;
        let (own, sight) = (outset.own, &outset.sight);
        conclude(table, own, sight, &decision, set, blueprint);
    }
    if UNIT_POS == 0 {
        let also = comptime!(if blueprint.measures { queue::SCORES } else { 0 });
        let all = comptime!(queue::SCORES | queue::RETRIEVES);
        tasks[pair] = select(retrieves, all, also);
    }
}
