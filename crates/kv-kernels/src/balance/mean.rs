//! The mean key of every list, in two kernels: sums of chunks, then the sum of these sums. Several
//! cubes share a list so.

use cubecl::prelude::*;

use super::walk::TokenLists;

/// Tokens of a chunk.
pub(super) const CHUNK: usize = 256;
/// Units of a cube.
pub(super) const UNITS: usize = 256;

/// Sums a chunk of a list by one cube.
///
/// # Shapes
/// `keys` `[S, columns]` and `sums` `[P, chunks, columns]`, in vectors of `N`.
#[cube(launch_unchecked)]
pub(super) fn chunk_sums_kernel<F: Float, N: Size>(
    keys: &[Vector<F, N>],
    lists: &TokenLists,
    sums: &mut [Vector<f32, N>],
    columns: usize,
    #[define(F)] _dtype: ElemType,
) {
    let longest = lists.longest;
    let chunks = longest.div_ceil(CHUNK.runtime());
    let cube = CUBE_POS;
    if cube >= lists.rows * chunks {
        terminate!();
    }
    let (row, chunk) = (cube / chunks, cube % chunks);
    let first = chunk * CHUNK;
    let end = min(first + CHUNK, min(lists.counts[row] as usize, longest));
    let unit = UNIT_POS as usize;
    // The cube's units take several tokens at a time, a row each. Where a row has more columns than
    // there are units, the columns are taken in turns.
    let width = min(columns, UNITS.runtime());
    let teams = UNITS.runtime() / width;
    let (team, lane) = (unit / width, unit % width);
    let mut parts = Shared::<[Vector<f32, N>]>::new_slice(UNITS);
    let mut turn = 0usize;
    while turn < columns {
        let column = turn + lane;
        let mut sum = Vector::<f32, N>::new(0.0f32);
        if team < teams && column < columns {
            let mut at = first + team;
            while at < end {
                let slot = lists.slots[row * longest + at] as usize;
                sum += Vector::cast_from(keys[slot * columns + column]);
                at += teams;
            }
        }
        parts[unit] = sum;
        sync_cube();
        if team == 0 && column < columns {
            for other in 1..teams {
                sum += parts[other * width + lane];
            }
            sums[cube * columns + column] = sum;
        }
        sync_cube();
        turn += width;
    }
}

/// Sums a column of a list's chunks by one unit, and divides by the count.
///
/// # Shapes
/// `sums` `[P, chunks, width]`, `counts` `[P]`, `means` `[P, width]`.
#[cube(launch_unchecked)]
pub(super) fn means_kernel(
    sums: &[f32],
    counts: &[i32],
    means: &mut [f32],
    total: usize,
    longest: usize,
    width: usize,
) {
    let at = ABSOLUTE_POS;
    if at >= total {
        terminate!();
    }
    let (row, column) = (at / width, at % width);
    let chunks = longest.div_ceil(CHUNK.runtime());
    let mut sum = 0.0f32;
    for chunk in 0..chunks {
        sum += sums[(row * chunks + chunk) * width + column];
    }
    means[at] = sum / f32::cast_from(min(max(counts[row], 1i32), longest as i32));
}
