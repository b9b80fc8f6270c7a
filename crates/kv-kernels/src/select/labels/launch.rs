//! The launch on CubeCL devices.

use burn::backend::{DType, Shape, TensorMetadata};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use cubecl::calculate_cube_count_elemwise;
use cubecl::prelude::*;

use super::args::LabelScoresArgs;
use super::kernel;
use crate::backend::client::{elem_type, empty_like};
use crate::select::scored_rows::ScoredRowTensors;

/// Scores, candidates, and how many are wanted.
pub(super) fn run(args: LabelScoresArgs<CubeBackend>) -> ScoredRowTensors<CubeBackend> {
    let LabelScoresArgs { query, keys, offsets, lengths, columns, .. } = args;
    let [batch, heads, head_dim] = query.shape().dims();
    let rows = batch * heads;
    let [_, _, count] = args.channels.shape().dims();
    let [[_, _, width], [_, _, source_width]] =
        [&args.lists, &args.sources].map(|tensor| tensor.shape().dims());
    let group = rows / offsets.shape().num_elements();
    let scores = empty_like(&query, Shape::from([rows, columns]), DType::F32);
    let [candidates, wanted] = [(); 2].map(|()| empty_like(&query, [rows].into(), DType::I32));
    let cube_dim = CubeDim::new(&query.client, rows * columns);
    kernel::label_scores_kernel::launch(
        &query.client.clone(),
        calculate_cube_count_elemwise(&query.client, rows * columns, cube_dim),
        cube_dim,
        into_contiguous(query.clone()).into_buffer_arg(),
        into_contiguous(keys).into_buffer_arg(),
        into_contiguous(offsets).into_buffer_arg(),
        into_contiguous(lengths).into_buffer_arg(),
        into_contiguous(args.channels).into_buffer_arg(),
        into_contiguous(args.budgets).into_buffer_arg(),
        into_contiguous(args.lists).into_buffer_arg(),
        into_contiguous(args.sources).into_buffer_arg(),
        scores.clone().into_buffer_arg(),
        candidates.clone().into_buffer_arg(),
        wanted.clone().into_buffer_arg(),
        rows,
        columns,
        heads,
        group,
        head_dim,
        count,
        width,
        source_width,
        args.layer,
        args.period,
        args.shares,
        elem_type(query.dtype),
    );
    ScoredRowTensors { scores, candidates, wanted }
}
