//! Launches on CubeCL devices.

use burn::backend::{DType, Shape, TensorMetadata};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::calculate_cube_count_elemwise;
use cubecl::prelude::*;

use super::args::{PageBoundsArgs, PageScoresArgs, PageSlotsArgs};
use super::{PageHeads, kernel};
use crate::backend::client::{elem_type, empty_like, vector_lanes};
use crate::select::scored_rows::ScoredRowTensors;

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
        into_contiguous(keys.clone()).into_buffer_arg(),
        into_contiguous(offsets).into_buffer_arg(),
        into_contiguous(lengths).into_buffer_arg(),
        bounds.clone().into_buffer_arg(),
        total_kv_heads,
        pages,
        columns,
        page,
        last,
        elem_type(keys.dtype),
    );
    bounds
}

/// Scores, candidates, and how many are wanted.
pub(super) fn scores(args: PageScoresArgs<CubeBackend>) -> ScoredRowTensors<CubeBackend> {
    let PageScoresArgs { query, bounds, offsets, lengths, budgets, pages, options } = args;
    let (query, bounds) = (into_contiguous(query), into_contiguous(bounds));
    let [batch, heads, head_dim] = query.shape().dims();
    let group = batch * heads / offsets.shape().num_elements();
    let each = if options.heads == PageHeads::Query { 1 } else { group };
    let rows = batch * heads / each;
    let scores = empty_like(&query, Shape::from([rows, pages]), DType::F32);
    let [candidates, wanted] = [(); 2].map(|()| empty_like(&query, [rows].into(), DType::I32));
    let lanes = vector_lanes(&query, head_dim, head_dim);
    let cube_dim = CubeDim::new(&query.client, rows * pages);
    kernel::page_scores_kernel::launch(
        &query.client.clone(),
        calculate_cube_count_elemwise(&query.client, rows * pages, cube_dim),
        cube_dim,
        lanes,
        query.clone().into_buffer_arg(),
        bounds.into_buffer_arg(),
        into_contiguous(offsets).into_buffer_arg(),
        into_contiguous(lengths).into_buffer_arg(),
        into_contiguous(budgets).into_buffer_arg(),
        scores.clone().into_buffer_arg(),
        candidates.clone().into_buffer_arg(),
        wanted.clone().into_buffer_arg(),
        rows,
        pages,
        head_dim / lanes,
        group,
        each,
        options.page,
        options.heads == PageHeads::Mean,
        options.always_last,
        elem_type(query.dtype),
    );
    ScoredRowTensors { scores, candidates, wanted }
}

/// Slots and their number.
pub(super) fn slots(args: PageSlotsArgs<CubeBackend>) -> (CubeTensor, CubeTensor) {
    let PageSlotsArgs { pages, found, offsets, lengths, page, always_last } = args;
    let [rows, most] = pages.shape().dims();
    let width = (most + usize::from(always_last)) * page;
    let group = rows / offsets.shape().num_elements();
    let slots = empty_like(&pages, Shape::from([rows, width]), DType::I32);
    let counts = empty_like(&pages, Shape::from([rows]), DType::I32);
    let cube_dim = CubeDim::new(&pages.client, rows * width);
    kernel::page_slots_kernel::launch(
        &pages.client.clone(),
        calculate_cube_count_elemwise(&pages.client, rows * width, cube_dim),
        cube_dim,
        into_contiguous(pages).into_buffer_arg(),
        into_contiguous(found).into_buffer_arg(),
        into_contiguous(offsets).into_buffer_arg(),
        into_contiguous(lengths).into_buffer_arg(),
        slots.clone().into_buffer_arg(),
        counts.clone().into_buffer_arg(),
        rows,
        most,
        width,
        group,
        page,
        always_last,
    );
    (slots, counts)
}
