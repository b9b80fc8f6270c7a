//! Launches the ops on pages on CubeCL devices.

use burn::backend::{DType, Shape, TensorMetadata};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::calculate_cube_count_elemwise;
use cubecl::prelude::*;

use super::PageHeads;
use super::args::{PageBoundsArgs, PageScoresArgs, PageSlotsArgs};
use super::kernel::{
    self, BoundedPagesLaunch, ChosenPagesLaunch, PageQueriesLaunch, PageRule, PagedRangesLaunch,
};
use crate::backend::client::{elem_type, empty_like, vector_lanes};
use crate::select::scored_rows::ScoredRowTensors;

/// A tensor without gaps, as a kernel's argument.
fn arg(tensor: CubeTensor) -> BufferArg {
    into_contiguous(tensor).into_buffer_arg()
}

/// Writes into the bounds' own buffer.
pub(super) fn bounds(args: PageBoundsArgs<CubeBackend>) -> CubeTensor {
    let PageBoundsArgs { keys, offsets, lengths, bounds, page, pages, last } = args;
    let bounds = into_contiguous(bounds);
    let [_, columns] = keys.shape().dims();
    let total_kv_heads = offsets.shape().num_elements();
    let units = total_kv_heads * pages * columns;
    let cube_dim = CubeDim::new(&keys.client, units);
    kernel::page_bounds_kernel::launch(
        &keys.client.clone(),
        calculate_cube_count_elemwise(&keys.client, units, cube_dim),
        cube_dim,
        arg(keys.clone()),
        PagedRangesLaunch::new(arg(offsets), arg(lengths), page),
        bounds.clone().into_buffer_arg(),
        BoundedPagesLaunch::new(total_kv_heads, pages, columns),
        last,
        elem_type(keys.dtype),
    );
    bounds
}

/// Returns scores, numbers of candidates, and numbers of wanted pages.
pub(super) fn scores(args: PageScoresArgs<CubeBackend>) -> ScoredRowTensors<CubeBackend> {
    let PageScoresArgs { query, bounds, offsets, lengths, budgets, pages, options } = args;
    let (query, bounds) = (into_contiguous(query), into_contiguous(bounds));
    let [batch, heads, head_dim] = query.shape().dims();
    let group = batch * heads / offsets.shape().num_elements();
    let each = if options.heads == PageHeads::Query { 1 } else { group };
    let rows = batch * heads / each;
    let scored = ScoredRowTensors::empty(&query, [rows, pages]);
    let lanes = vector_lanes(&query, head_dim, head_dim);
    let cube_dim = CubeDim::new(&query.client, rows * pages);
    kernel::page_scores_kernel::launch(
        &query.client.clone(),
        calculate_cube_count_elemwise(&query.client, rows * pages, cube_dim),
        cube_dim,
        lanes,
        query.clone().into_buffer_arg(),
        bounds.into_buffer_arg(),
        PagedRangesLaunch::new(arg(offsets), arg(lengths), options.page),
        PageQueriesLaunch::new(arg(budgets), head_dim / lanes, group, each),
        scored.launched([rows, pages]),
        PageRule { mean: options.heads == PageHeads::Mean, always_last: options.always_last },
        elem_type(query.dtype),
    );
    scored
}

/// Returns slots, and the number of each row's slots.
pub(super) fn slots(args: PageSlotsArgs<CubeBackend>) -> (CubeTensor, CubeTensor) {
    let PageSlotsArgs { pages, found, offsets, lengths, page, always_last } = args;
    let client = pages.client.clone();
    let [rows, most] = pages.shape().dims();
    let width = (most + usize::from(always_last)) * page;
    let group = rows / offsets.shape().num_elements();
    let slots = empty_like(&pages, Shape::from([rows, width]), DType::I32);
    let counts = empty_like(&pages, Shape::from([rows]), DType::I32);
    let cube_dim = CubeDim::new(&client, rows * width);
    kernel::page_slots_kernel::launch(
        &client,
        calculate_cube_count_elemwise(&client, rows * width, cube_dim),
        cube_dim,
        ChosenPagesLaunch::new(arg(pages), arg(found), rows, most, group),
        PagedRangesLaunch::new(arg(offsets), arg(lengths), page),
        slots.clone().into_buffer_arg(),
        counts.clone().into_buffer_arg(),
        width,
        always_last,
    );
    (slots, counts)
}
