//! Launches `draw` on CubeCL devices.

use burn::backend::{DType, Shape, TensorMetadata};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::DrawConfig;
use super::args::{Drawn, SampleTensors};
use super::kernel::{Blueprint, DrawRulesLaunch, DrawnSequencesLaunch, sample_kernel};
use crate::backend::client::{empty_like, grid, vector_lanes, widest_cube};
use crate::components::top_k::Amounts;

/// Draws a token for every row of `logits` `[B, V]`.
pub(super) fn draw(
    logits: CubeTensor,
    state: SampleTensors<CubeBackend>,
    config: DrawConfig,
) -> Drawn<CubeBackend> {
    let [rows, vocabulary] = logits.shape().dims();
    let logits = into_contiguous(logits);
    let client = logits.client.clone();
    let drawn = empty_like(&logits, Shape::from([rows]), DType::I32);
    // One cube reads a whole row, so it takes as many units as it may have.
    let (units, planes) = widest_cube(&client);
    let DrawConfig { draws, ranks, nucleus } = config;
    let lanes = vector_lanes(&logits, vocabulary, vocabulary);
    let ones = Amounts::ones(&client, (vocabulary / lanes).div_ceil(units) * lanes);
    // SAFETY: shapes were checked, and the kernel guards its accesses.
    unsafe {
        sample_kernel::launch_unchecked(
            &client,
            grid(rows),
            CubeDim::new_1d(units as u32),
            lanes,
            logits.into_buffer_arg(),
            DrawRulesLaunch::new(
                into_contiguous(state.floats).into_buffer_arg(),
                into_contiguous(state.ints).into_buffer_arg(),
            ),
            DrawnSequencesLaunch::new(
                state.draws.clone().into_buffer_arg(),
                state.positions.clone().into_buffer_arg(),
                state.tokens.clone().into_buffer_arg(),
                drawn.clone().into_buffer_arg(),
                rows,
            ),
            vocabulary / lanes,
            Blueprint { units, planes, ones, draws, ranks, nucleus },
        );
    }
    Drawn { drawn, draws: state.draws, positions: state.positions, tokens: state.tokens }
}
