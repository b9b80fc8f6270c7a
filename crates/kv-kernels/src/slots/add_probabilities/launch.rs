//! Launches `add_probabilities` and `add_contributions` on CubeCL devices.

use burn::backend::TensorMetadata;
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::args::ProbabilityArgs;
use super::kernel::{self, AttendedLaunch, Blueprint, ContributionsLaunch};
use crate::backend::client::{elem_type, grid};
use crate::components::pool::HeadRangesLaunch;

/// Adds probabilities in the buffer of the sums.
pub(super) fn run(args: ProbabilityArgs<CubeBackend>) -> CubeTensor {
    let ProbabilityArgs { sums, logits, log_sum_exp, offsets, lengths, reduction } = args;
    let sums = into_contiguous(sums);
    let [slots, group] = logits.shape().dims();
    let total_kv_heads = offsets.shape().num_elements();
    let cubes = cubes_of(slots, total_kv_heads);
    // SAFETY: shapes were checked; the kernel stays within the ranges.
    unsafe {
        kernel::add_probabilities_kernel::launch_unchecked(
            &sums.client.clone(),
            grid(total_kv_heads * cubes),
            CubeDim::new_1d(kernel::UNITS as u32),
            sums.clone().into_buffer_arg(),
            AttendedLaunch::new(
                into_contiguous(logits).into_buffer_arg(),
                into_contiguous(log_sum_exp).into_buffer_arg(),
            ),
            HeadRangesLaunch::new(
                into_contiguous(offsets).into_buffer_arg(),
                into_contiguous(lengths).into_buffer_arg(),
                total_kv_heads,
            ),
            cubes,
            Blueprint { group, reduction },
        );
    }
    sums
}

/// Adds probabilities times norms in the buffers of sums and norms, and returns both.
pub(super) fn run_weighed(
    args: ProbabilityArgs<CubeBackend>,
    norms: CubeTensor,
    values: CubeTensor,
) -> (CubeTensor, CubeTensor) {
    let ProbabilityArgs { sums, logits, log_sum_exp, offsets, lengths, reduction } = args;
    let (sums, norms) = (into_contiguous(sums), into_contiguous(norms));
    let [slots, group] = logits.shape().dims();
    let [_, head_dim] = values.shape().dims();
    let total_kv_heads = offsets.shape().num_elements();
    let cubes = cubes_of(slots, total_kv_heads);
    let dtype = elem_type(values.dtype);
    // SAFETY: shapes were checked; the kernel stays within the ranges.
    unsafe {
        kernel::add_contributions_kernel::launch_unchecked(
            &sums.client.clone(),
            grid(total_kv_heads * cubes),
            CubeDim::new_1d(kernel::UNITS as u32),
            ContributionsLaunch::new(
                sums.clone().into_buffer_arg(),
                norms.clone().into_buffer_arg(),
                into_contiguous(values).into_buffer_arg(),
            ),
            AttendedLaunch::new(
                into_contiguous(logits).into_buffer_arg(),
                into_contiguous(log_sum_exp).into_buffer_arg(),
            ),
            HeadRangesLaunch::new(
                into_contiguous(offsets).into_buffer_arg(),
                into_contiguous(lengths).into_buffer_arg(),
                total_kv_heads,
            ),
            cubes,
            head_dim,
            Blueprint { group, reduction },
            dtype,
        );
    }
    (sums, norms)
}

/// How many cubes share a range.
fn cubes_of(slots: usize, total_kv_heads: usize) -> usize {
    (slots / total_kv_heads.max(1)).div_ceil(kernel::UNITS).max(1)
}
