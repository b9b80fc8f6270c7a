//! The kernel of `pool_rows`, with one unit a score.

use cubecl::prelude::*;

use crate::components::softmax::is_number;

/// # Shapes
/// `scores` and `pooled` `[R, columns]`.
#[cube(launch)]
pub(crate) fn pool_rows_kernel(
    scores: &[f32],
    pooled: &mut [f32],
    columns: usize,
    size: usize,
    #[comptime] averages: bool,
) {
    let at = ABSOLUTE_POS;
    if at >= pooled.len() {
        terminate!();
    }
    let column = at % columns;
    let side = size / 2;
    let before = min(column, side);
    let behind = min(columns - 1 - column, side);
    let first = at - before;
    let mut found = scores[first];
    for next in 1..before + behind + 1 {
        let own = scores[first + next];
        if averages {
            found += own;
        } else if is_number(found) && (own > found || !is_number(own)) {
            found = own;
        }
    }
    if averages {
        found /= f32::cast_from(size);
    }
    pooled[at] = found;
}
