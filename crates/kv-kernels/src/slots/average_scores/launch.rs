//! Launches `average_scores` on CubeCL devices.

use burn::backend::TensorMetadata;
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::calculate_cube_count_elemwise;
use cubecl::prelude::*;

use super::args::AverageScoresArgs;
use super::kernel::{Blueprint, ScoreWeightsLaunch, average_scores_kernel};

/// Updates the averages in the tensors' own buffers.
pub(super) fn run(args: AverageScoresArgs<CubeBackend>) -> (CubeTensor, CubeTensor) {
    let AverageScoresArgs { log_scores, log_samples, logits, log_weights, weights } = args;
    let weighted = log_weights.as_ref().is_some();
    let logits = into_contiguous(logits);
    let [slots, group] = logits.shape().dims();
    let client = logits.client.clone();
    let cube_dim = CubeDim::new(&client, slots);
    average_scores_kernel::launch(
        &client,
        calculate_cube_count_elemwise(&client, slots, cube_dim),
        cube_dim,
        log_scores.clone().into_buffer_arg(),
        log_samples.clone().into_buffer_arg(),
        logits.clone().into_buffer_arg(),
        log_weights.or_stand_in(&logits).into_buffer_arg(),
        slots,
        ScoreWeightsLaunch::new(weights.new, weights.old),
        Blueprint { group, weighted },
    );
    (log_scores, log_samples)
}
