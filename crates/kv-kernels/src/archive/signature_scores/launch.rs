//! Launches `signature_scores` on CubeCL devices.

use burn::backend::TensorMetadata;
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::args::SignatureScoresArgs;
use super::kernel_args::{Blueprint, ScoredRangesLaunch};
use super::{SignatureStrategy, plain, tensor_core};
use crate::archive::layout::BLOCK;
use crate::backend::client::{elem_type, grid};
use crate::select::scored_rows::ScoredRowTensors;

/// Returns scores, numbers of candidates, and numbers of wanted slots.
pub(super) fn run(args: SignatureScoresArgs<CubeBackend>) -> ScoredRowTensors<CubeBackend> {
    let query = into_contiguous(args.query);
    let [batch, query_heads, head_dim] = query.shape().dims();
    let [_, kv_heads] = args.offsets.shape().dims();
    let shape = [batch * kv_heads, args.columns];
    let blocks = args.columns.div_ceil(BLOCK);
    let tasks = batch * kv_heads * blocks;
    let scored = ScoredRowTensors::empty(&query, shape);
    let (client, dtype) = (query.client.clone(), elem_type(query.dtype));
    let arg = |tensor: CubeTensor| into_contiguous(tensor).into_buffer_arg();
    let (signatures, statistics) = (arg(args.pool.signatures), arg(args.pool.key_statistics));
    let ranges = ScoredRangesLaunch::new(
        arg(args.offsets),
        arg(args.lengths),
        arg(args.log_sum_exp),
        args.scale,
        args.wanted as u32,
        blocks,
    );
    let blueprint = Blueprint { group: query_heads / kv_heads, head_dim };
    // SAFETY: shapes were checked; ranges are the caller's, within the pool.
    unsafe {
        if args.strategy == SignatureStrategy::TensorCore {
            tensor_core::signature_tiles_kernel::launch_unchecked(
                &client,
                grid(tasks.div_ceil(tensor_core::PLANES)),
                CubeDim::new_1d(tensor_core::UNITS as u32),
                query.into_buffer_arg(),
                signatures,
                statistics,
                ranges,
                scored.launched(shape),
                blueprint,
                dtype,
            );
        } else {
            plain::signature_scores_kernel::launch_unchecked(
                &client,
                grid(tasks),
                CubeDim::new_1d(BLOCK as u32),
                query.into_buffer_arg(),
                signatures,
                statistics,
                ranges,
                scored.launched(shape),
                blueprint,
                dtype,
            );
        }
    }
    scored
}
