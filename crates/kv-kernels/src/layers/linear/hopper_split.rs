//! The end of a product whose sums several cubes have shared ([`hopper_wide`](super::hopper_wide)):
//! parts are added, and bias, gate and residual with them.

use cubecl::prelude::*;

use super::args::EpilogueConfig;
use super::epilogue::{ProductOutputs, added_to, finish};
use super::hopper_wide::ROWS;
use crate::components::tma::TILE_COLUMNS;

/// Outputs of a cube's tile, before parts are added.
pub(super) const COLUMNS: usize = 128;
/// The fewest blocks of 64 columns that a part sums: fewer would not fill its stages of copies.
const LEAST_BLOCKS: usize = 4;
/// Threads of a cube that adds.
pub(super) const UNITS: usize = 256;

/// Tiles of a product of `rows` rows and `outputs` outputs.
pub(super) fn tiles_of(rows: usize, outputs: usize) -> usize {
    rows.div_ceil(ROWS) * outputs.div_ceil(COLUMNS)
}

/// How the sums over `inputs` columns are shared: the number of parts, and the blocks of 64 columns
/// of each. All cubes run at once.
pub(super) fn parts_of(inputs: usize, tiles: usize, processors: usize) -> [usize; 2] {
    let blocks = inputs.div_ceil(TILE_COLUMNS);
    let most = (blocks / LEAST_BLOCKS).max(1);
    let each = blocks.div_ceil((processors / tiles.max(1)).clamp(1, most));
    [blocks.div_ceil(each), each]
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_all_blocks_and_run_at_once() {
        for inputs in [64, 96, 320, 4_096, 14_336, 28_672] {
            for tiles in [1, 7, 32, 48, 66, 100, 132] {
                let [parts, each] = parts_of(inputs, tiles, 132);
                let blocks = inputs.div_ceil(TILE_COLUMNS);
                // No part is empty.
                assert!(parts * each >= blocks && (parts - 1) * each < blocks, "{inputs} {tiles}");
                assert!(parts == 1 || parts * tiles <= 132, "{inputs} {tiles}: {parts}");
            }
        }
        assert_eq!(parts_of(14_336, 32, 132), [4, 56]);
    }
}
