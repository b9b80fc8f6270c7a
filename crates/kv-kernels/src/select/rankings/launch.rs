//! Launches `rankings` and `group_priority_ranks` on CubeCL devices.

use burn::backend::{DType, Shape, TensorMetadata};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::kernel::{
    RankOutput, RankedNumbersLaunch, RanksLaunch, TokenGroupsLaunch, UNITS, group_sums_kernel,
    rankings_kernel,
};
use crate::backend::client::{empty_like, grid, is_cuda};

/// The indices of every row, ordered by score, `[R, T]`.
pub(super) fn rankings(scores: CubeTensor) -> CubeTensor {
    let [rows, columns] = scores.shape().dims();
    let scores = into_contiguous(scores);
    let ranked = empty_like(&scores, scores.shape(), DType::I32);
    let none = empty_like(&scores, Shape::from([1]), DType::F32);
    let any = empty_like(&scores, Shape::from([1]), DType::I32);
    // SAFETY: shapes were checked, and the kernel guards its accesses.
    unsafe {
        rankings_kernel::launch_unchecked(
            &scores.client.clone(),
            grid(rows * columns.div_ceil(UNITS)),
            CubeDim::new_1d(UNITS as u32),
            RankedNumbersLaunch::new(
                scores.into_buffer_arg(),
                any.clone().into_buffer_arg(),
                any.into_buffer_arg(),
                rows,
                columns,
            ),
            RanksLaunch::new(ranked.clone().into_buffer_arg(), none.into_buffer_arg()),
            RankOutput::Index,
        );
    }
    ranked
}

/// The priorities of every row's entries, `[R, T]`.
pub(super) fn group_priority_ranks(
    scores: CubeTensor,
    ranked: CubeTensor,
    leaders: CubeTensor,
) -> CubeTensor {
    let [rows, columns] = scores.shape().dims();
    let [scores, ranked, leaders] = [scores, ranked, leaders].map(into_contiguous);
    let parents = empty_like(&scores, scores.shape(), DType::I32);
    let [sums, priorities] = [(); 2].map(|()| empty_like(&scores, scores.shape(), DType::F32));
    let none = empty_like(&scores, Shape::from([1]), DType::I32);
    let client = scores.client.clone();
    let cube = CubeDim::new_1d(UNITS as u32);
    // SAFETY: shapes were checked; the given indices are trusted.
    unsafe {
        group_sums_kernel::launch_unchecked(
            &client,
            grid(rows),
            cube,
            TokenGroupsLaunch::new(
                scores.into_buffer_arg(),
                ranked.clone().into_buffer_arg(),
                leaders.into_buffer_arg(),
                parents.clone().into_buffer_arg(),
                sums.clone().into_buffer_arg(),
                rows,
                columns,
            ),
            !is_cuda(&client),
        );
        rankings_kernel::launch_unchecked(
            &client,
            grid(rows * columns.div_ceil(UNITS)),
            cube,
            RankedNumbersLaunch::new(
                sums.into_buffer_arg(),
                ranked.into_buffer_arg(),
                parents.into_buffer_arg(),
                rows,
                columns,
            ),
            RanksLaunch::new(none.into_buffer_arg(), priorities.clone().into_buffer_arg()),
            RankOutput::Priority,
        );
    }
    priorities
}
