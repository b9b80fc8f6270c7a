//! Launches `signature_scores` on CubeCL devices.

use burn::backend::TensorMetadata;
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::args::SignatureScoresArgs;
use super::kernel::{Blueprint, SignedSlotsLaunch, signature_scores_kernel};
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
    let scored = ScoredRowTensors::empty(&query, shape);
    let arg = |tensor: CubeTensor| into_contiguous(tensor).into_buffer_arg();
    let slots = SignedSlotsLaunch::new(
        arg(args.pool.signatures),
        arg(args.pool.key_statistics),
        arg(args.offsets),
        arg(args.lengths),
        arg(args.log_sum_exp),
        args.scale,
        args.wanted as u32,
        blocks,
    );
    // SAFETY: shapes were checked; ranges are the caller's, within the pool.
    unsafe {
        signature_scores_kernel::launch_unchecked(
            &query.client.clone(),
            grid(batch * kv_heads * blocks),
            CubeDim::new_1d(BLOCK as u32),
            query.clone().into_buffer_arg(),
            slots,
            scored.launched(shape),
            Blueprint { group: query_heads / kv_heads, head_dim },
            elem_type(query.dtype),
        );
    }
    scored
}
