//! Launches prefill attention on Hopper.

use burn::backend::{DType, Shape, TensorMetadata};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::ops::reshape;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::column_sums::ColumnSumsLaunch;
use super::hopper::{PromptLaunch, PromptOutputsLaunch};
use super::{PrefillConfig, PrefillWindow, column_sums, hopper};
use crate::backend::client::{elem_type, empty_like, processors};
use crate::components::tma::tiles;

/// Causal attention. Returns the output `[B, Hq, N, D]`, the log-sum-exp `[B, Hq, N]`, and column
/// sums `[B, Hq, T]` where `config` asks for them (else any tensor).
pub(crate) fn causal(
    query: CubeTensor,
    keys: CubeTensor,
    values: CubeTensor,
    config: PrefillConfig,
) -> (CubeTensor, CubeTensor, CubeTensor) {
    let [batch, heads, queries, dim] = query.shape().dims();
    let [_, kv_heads, tokens, _] = keys.shape().dims();
    let client = query.client.clone();
    let dtype = query.dtype;
    let output = empty_like(&query, query.shape(), dtype);
    let log_sum_exp = empty_like(&query, Shape::from([batch, heads, queries]), DType::F32);
    let matrices = |tensor: CubeTensor, heads: usize, rows: usize| {
        reshape(into_contiguous(tensor), Shape::from([batch * heads, rows, dim]))
    };
    let query = matrices(query, heads, queries);
    let keys = matrices(keys, kv_heads, tokens);
    let values = matrices(values, kv_heads, tokens);
    let (group, elem) = ((heads / kv_heads) as u32, elem_type(dtype));
    let (view, window) = match config.window {
        PrefillWindow::All => (hopper::View::All, 0),
        PrefillWindow::Last(window) => (hopper::View::Last, window as u32),
        PrefillWindow::From(share) => (hopper::View::From, share.bits()),
    };
    let blueprint = hopper::Blueprint::new(dim, dtype == DType::F16, view);
    let cube_dim = CubeDim::new_1d(hopper::UNITS as u32);
    let prompt = || {
        let (queries, tokens) = (queries as u32, tokens as u32);
        PromptLaunch::new(queries, tokens, group, window, config.sinks, config.scale)
    };
    // SAFETY: shapes were checked, and the kernels guard their writes.
    unsafe {
        hopper::prefill_kernel::launch_unchecked(
            &client,
            CubeCount::Static((batch * heads * queries.div_ceil(hopper::QUERIES)) as u32, 1, 1),
            cube_dim,
            dim / 2,
            tiles(query.clone(), hopper::QUERIES),
            tiles(keys.clone(), hopper::KEYS),
            tiles(values, hopper::KEYS),
            PromptOutputsLaunch::new(
                output.clone().into_buffer_arg(),
                log_sum_exp.clone().into_buffer_arg(),
            ),
            prompt(),
            blueprint,
            elem,
        );
    }
    let Some(counted) = config.counted else {
        return (output, log_sum_exp.clone(), log_sum_exp);
    };
    let sums = empty_like(&query, Shape::from([batch, heads, tokens]), DType::F32);
    let few = counted as usize <= hopper::QUERIES;
    let blocks = tokens.div_ceil(hopper::KEYS);
    // All cubes run at once, two on a processor.
    let tiles_each =
        if few { (batch * heads * blocks).div_ceil(2 * processors(&client)) } else { 1 };
    let tiles_each = tiles_each.min(blocks);
    let cubes = batch * heads * blocks.div_ceil(tiles_each);
    // SAFETY: as above.
    unsafe {
        column_sums::column_sums_kernel::launch_unchecked(
            &client,
            CubeCount::Static(cubes as u32, 1, 1),
            cube_dim,
            tiles(query, hopper::QUERIES),
            tiles(keys, hopper::KEYS),
            ColumnSumsLaunch::new(
                log_sum_exp.clone().into_buffer_arg(),
                sums.clone().into_buffer_arg(),
                counted,
                tiles_each as u32,
            ),
            prompt(),
            few,
            blueprint,
            elem,
        );
    }
    (output, log_sum_exp, sums)
}
