//! The launch on CubeCL devices.

use burn::backend::TensorMetadata;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::{GroupReduction, kernel};
use crate::gpu::{elem_type, grid};

/// Adds in the sums' own buffer.
pub(crate) fn run(
    sums: CubeTensor,
    logits: CubeTensor,
    log_sum_exp: CubeTensor,
    offsets: CubeTensor,
    lengths: CubeTensor,
    reduction: GroupReduction,
) -> CubeTensor {
    let sums = into_contiguous(sums);
    let [slots, group] = logits.shape().dims();
    let pairs = offsets.shape().num_elements();
    let cubes = cubes_of(slots, pairs);
    // SAFETY: shapes were checked; the kernel stays within the ranges.
    unsafe {
        kernel::add_probabilities_kernel::launch_unchecked(
            &sums.client.clone(),
            grid(pairs * cubes),
            CubeDim::new_1d(kernel::UNITS as u32),
            sums.clone().into_buffer_arg(),
            into_contiguous(logits).into_buffer_arg(),
            into_contiguous(log_sum_exp).into_buffer_arg(),
            into_contiguous(offsets).into_buffer_arg(),
            into_contiguous(lengths).into_buffer_arg(),
            pairs,
            cubes,
            group,
            reduction,
        );
    }
    sums
}

/// The same, weighed by values; the sums and the norms, which are written in place, too.
pub(crate) fn run_weighed(
    [sums, norms]: [CubeTensor; 2],
    values: CubeTensor,
    [logits, log_sum_exp]: [CubeTensor; 2],
    [offsets, lengths]: [CubeTensor; 2],
    reduction: GroupReduction,
) -> (CubeTensor, CubeTensor) {
    let (sums, norms) = (into_contiguous(sums), into_contiguous(norms));
    let [slots, group] = logits.shape().dims();
    let [_, head_dim] = values.shape().dims();
    let pairs = offsets.shape().num_elements();
    let cubes = cubes_of(slots, pairs);
    let dtype = elem_type(values.dtype);
    // SAFETY: shapes were checked; the kernel stays within the ranges.
    unsafe {
        kernel::add_contributions_kernel::launch_unchecked(
            &sums.client.clone(),
            grid(pairs * cubes),
            CubeDim::new_1d(kernel::UNITS as u32),
            sums.clone().into_buffer_arg(),
            norms.clone().into_buffer_arg(),
            into_contiguous(values).into_buffer_arg(),
            into_contiguous(logits).into_buffer_arg(),
            into_contiguous(log_sum_exp).into_buffer_arg(),
            into_contiguous(offsets).into_buffer_arg(),
            into_contiguous(lengths).into_buffer_arg(),
            pairs,
            cubes,
            group,
            head_dim,
            reduction,
            dtype,
        );
    }
    (sums, norms)
}

/// Cubes of a range.
fn cubes_of(slots: usize, pairs: usize) -> usize {
    (slots / pairs.max(1)).div_ceil(kernel::UNITS).max(1)
}
