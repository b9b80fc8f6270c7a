//! The end of a product whose sums several cubes have shared ([`hopper_wide`](super::hopper_wide)):
//! parts are added, and bias, gate and residual with them.

use cubecl::prelude::*;

use super::args::EpilogueConfig;
use super::epilogue::{ProductOutputs, added_to, finish};

/// Threads of a cube that adds.
pub(super) const UNITS: usize = 256;

/// # Shapes
/// `sums` `[parts, M, N]`, where `N` is the outputs, or twice the outputs where gated.
#[cube(launch_unchecked)]
pub(super) fn add_parts_kernel<E: Float>(
    sums: &[f32],
    product: &mut ProductOutputs<E>,
    parts: usize,
    #[comptime] epilogue: EpilogueConfig,
    #[define(E)] _dtype: ElemType,
) {
    let (rows, outputs) = (product.rows, product.outputs);
    let to = ABSOLUTE_POS;
    if to >= rows * outputs {
        terminate!();
    }
    let width = outputs * comptime!(epilogue.parts());
    let (row, output) = (to / outputs, to % outputs);
    let mut totals = Array::<f32>::new(2usize);
    #[unroll]
    for half in 0..comptime!(epilogue.parts()) {
        let mut total = 0.0f32;
        for part in 0..parts {
            total += sums[(part * rows + row) * width + half * outputs + output];
        }
        totals[half] = total;
    }
    product.y[to] = finish::<E>(
        &product.bias,
        added_to::<E>(&product.residual, to, epilogue),
        totals[0],
        totals[comptime!(epilogue.parts() - 1)],
        output,
        outputs,
        epilogue,
    );
}
