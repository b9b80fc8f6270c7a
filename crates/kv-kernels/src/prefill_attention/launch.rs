//! Launches prefill attention on Hopper.

use burn::backend::{DType, Shape, TensorMetadata};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::ops::reshape;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::hopper;
use crate::gpu::{elem_type, empty_like};
use crate::hopper::tiles;

/// Output `[B, Hq, N, D]` and log-sum-exp `[B, Hq, N]` of causal attention.
pub(crate) fn causal(
    query: CubeTensor,
    keys: CubeTensor,
    values: CubeTensor,
    scale: f32,
) -> (CubeTensor, CubeTensor) {
    let [batch, heads, queries, dim] = query.shape().dims();
    let [_, kv_heads, tokens, _] = keys.shape().dims();
    let client = query.client.clone();
    let output = empty_like(&query, query.shape(), query.dtype);
    let log_sum_exp = empty_like(&query, Shape::from([batch, heads, queries]), DType::F32);
    let matrices = |tensor: CubeTensor, heads: usize, rows: usize| {
        let shape = Shape::from([batch * heads, rows, dim]);
        tiles(reshape(into_contiguous(tensor), shape), hopper::QUERIES)
    };
    let dtype = query.dtype;
    // SAFETY: shapes were checked, and the kernel guards its writes.
    unsafe {
        hopper::prefill_kernel::launch_unchecked(
            &client,
            CubeCount::Static((batch * heads * queries.div_ceil(hopper::QUERIES)) as u32, 1, 1),
            CubeDim::new_1d(hopper::UNITS as u32),
            dim / 2,
            matrices(query, heads, queries),
            matrices(keys, kv_heads, tokens),
            matrices(values, kv_heads, tokens),
            output.clone().into_buffer_arg(),
            log_sum_exp.clone().into_buffer_arg(),
            queries as u32,
            tokens as u32,
            (heads / kv_heads) as u32,
            scale,
            hopper::Blueprint::new(dim, dtype == DType::F16),
            elem_type(dtype),
        );
    }
    (output, log_sum_exp)
}
