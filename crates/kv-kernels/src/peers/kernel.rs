//! The kernel that adds the numbers of several GPUs.

use cubecl::prelude::*;

use crate::components::ptx::{read_line, write_line};

/// Units of a cube. Few, so that the numbers of a decode step go to several processors.
pub(super) const UNITS: usize = 128;
/// Lines of an inbox for each rank and each half.
pub(super) const LINES: usize = 1 << 16;

/// # Shapes
/// `x` and `sum` `[lines]` vectors of eight bytes, `addresses` `[ranks, 2]`, `turns` `[cubes]`.
///
/// A cube waits for the cube of its number on the other ranks alone. Cubes begin in the order of
/// their numbers, so that the first cubes which have not ended are there on all ranks: none waits
/// for a cube that has no processor.
#[cube(launch_unchecked)]
pub(super) fn sum_kernel<E: Float, N: Size>(
    x: &[Vector<E, N>],
    sum: &mut [Vector<E, N>],
    addresses: &[u32],
    turns: &mut [u32],
    lines: usize,
    #[comptime] rank: usize,
    #[comptime] ranks: usize,
    #[define(E)] _dtype: ElemType,
) {
    let at = ABSOLUTE_POS;
    let cube = CUBE_POS;
    let turn = turns[cube] + 1u32;
    let half = (turn & 1u32) * comptime!((ranks * LINES) as u32);
    if at < lines {
        let line = half + at as u32;
        let own = Vector::<u32, Const<2>>::reinterpret(x[at]);
        let to = line + comptime!((rank * LINES) as u32);
        #[unroll]
        for other in 0..ranks {
            if comptime!(other != rank) {
                let (low, high) =
                    (addresses[comptime!(2 * other)], addresses[comptime!(2 * other + 1)]);
                write_line(low, high, to, own.extract(0usize), own.extract(1usize), turn);
            }
        }
        let (low, high) = (addresses[comptime!(2 * rank)], addresses[comptime!(2 * rank + 1)]);
        let mut total = Vector::<f32, N>::new(0.0f32);
        #[unroll]
        for other in 0..ranks {
            if comptime!(other == rank) {
                total += Vector::cast_from(x[at]);
            } else {
                let words = read_line(low, high, line + comptime!((other * LINES) as u32), turn);
                total += Vector::cast_from(Vector::<E, N>::reinterpret(words));
            }
        }
        sum[at] = Vector::cast_from(total);
    }
    // All units have read the turn.
    sync_cube();
    if UNIT_POS == 0 {
        turns[cube] = turn;
    }
}
