//! Counts the tokens of an ascending list that lie before a step's window, and before its local
//! slots. Units compare many tokens at once, where a binary search would wait for one read after
//! another.

use cubecl::prelude::*;

use super::bitmask::CHUNK;
use super::blueprint::Blueprint;

/// How many of the `count` ascending tokens from `list` on are below `from`, and how many are below
/// `to`.
#[cube]
pub(super) fn count_below(
    table: &[i32],
    list: usize,
    count: usize,
    from: i32,
    to: i32,
    #[comptime] blueprint: Blueprint,
) -> (u32, u32) {
    let (units, width) = comptime!((blueprint.units, blueprint.width));
    let mut before_window = 0u32;
    let mut known = 0u32;
    let unit = UNIT_POS as usize;
    let chunk = comptime!(width.div_ceil(units));
    if comptime!(chunk <= CHUNK) {
        // All tokens are read before `count` is known.
        let mut tokens = Array::<i32>::new(chunk);
        #[unroll]
        for c in 0..chunk {
            tokens[c] = table[list + min(c * units + unit, comptime!(width - 1))];
        }
        #[unroll]
        for c in 0..chunk {
            let listed = c * units + unit < count;
            before_window += select(listed && tokens[c] < from, 1u32, 0u32);
            known += select(listed && tokens[c] < to, 1u32, 0u32);
        }
        (before_window, known) = over_cube(before_window, known, blueprint);
    } else {
        // Within a block, few tokens of a set become hidden, and few are locals. So the tokens at
        // both ends of the list suffice, unless all of these are hidden or local.
        let ends = comptime!(units / 2);
        let (before_window_first, late_last) =
            ends_beyond(table, list, count, from, to, ends, blueprint);
        if count > ends && (before_window_first == ends as u32 || late_last == ends as u32) {
            let mut i = unit;
            while i < count {
                let token = table[list + i];
                before_window += select(token < from, 1u32, 0u32);
                known += select(token < to, 1u32, 0u32);
                i += units;
            }
            (before_window, known) = over_cube(before_window, known, blueprint);
        } else {
            before_window = before_window_first;
            known = count as u32 - late_last;
        }
    }
    (before_window, known)
}

/// How many of the first `ends` tokens are below `from`, and how many of the last `ends` tokens are
/// `to` or more.
#[cube]
fn ends_beyond(
    table: &[i32],
    list: usize,
    count: usize,
    from: i32,
    to: i32,
    #[comptime] ends: usize,
    #[comptime] blueprint: Blueprint,
) -> (u32, u32) {
    let unit = UNIT_POS as usize;
    let leads = unit < ends;
    let rank = select(leads, unit, unit - min(unit, ends));
    let listed = rank < min(count, ends);
    let last = count - min(count, rank + 1);
    let token = table[list + select(leads, select(listed, rank, 0usize), last)];
    over_cube(
        select(leads && listed && token < from, 1u32, 0u32),
        select(!leads && listed && token >= to, 1u32, 0u32),
        blueprint,
    )
}

/// Sums two numbers over a cube.
#[cube]
fn over_cube(a: u32, b: u32, #[comptime] blueprint: Blueprint) -> (u32, u32) {
    let planes = comptime!(blueprint.planes());
    let mut parts = Shared::<[u32]>::new_slice(comptime!(2 * planes));
    let (a, b) = (plane_sum(a), plane_sum(b));
    let plane = (UNIT_POS / PLANE_DIM) as usize;
    // All units have read the previous sums.
    sync_cube();
    if UNIT_POS_PLANE == 0 {
        parts[plane] = a;
        parts[planes + plane] = b;
    }
    sync_cube();
    let mut all_a = 0u32;
    let mut all_b = 0u32;
    for other in 0..(CUBE_DIM / PLANE_DIM) as usize {
        all_a += parts[other];
        all_b += parts[planes + other];
    }
    (all_a, all_b)
}
