//! Launches sums over peers.

use burn::backend::TensorMetadata;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::LINE_BYTES;
use super::kernel::{UNITS, sum_kernel};
use crate::backend::client::{elem_type, empty_like};

/// Returns the sum of all ranks' `x`.
pub(super) fn run(
    x: CubeTensor,
    addresses: CubeTensor,
    turns: CubeTensor,
    rank: usize,
    ranks: usize,
) -> CubeTensor {
    let x = into_contiguous(x);
    let sum = empty_like(&x, x.shape(), x.dtype);
    let lanes = LINE_BYTES / x.dtype.size();
    let lines = x.shape().num_elements() / lanes;
    // SAFETY: sizes were checked, the kernel guards its accesses, and inboxes live as long as their
    // processes.
    unsafe {
        sum_kernel::launch_unchecked(
            &x.client.clone(),
            CubeCount::new_1d(lines.div_ceil(UNITS) as u32),
            CubeDim::new_1d(UNITS as u32),
            lanes,
            x.clone().into_buffer_arg(),
            sum.clone().into_buffer_arg(),
            into_contiguous(addresses).into_buffer_arg(),
            turns.into_buffer_arg(),
            lines,
            rank,
            ranks,
            elem_type(x.dtype),
        );
    }
    sum
}
