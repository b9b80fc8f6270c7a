//! The launch on CubeCL devices.

use burn::backend::{DType, Shape, TensorMetadata};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::calculate_cube_count_elemwise;
use cubecl::prelude::*;

use super::kernel;
use crate::extension::LabelTensors;
use crate::gpu::{elem_type, empty_like};

/// Scores, candidates, and how many are wanted.
pub(crate) fn run(
    query: CubeTensor,
    keys: CubeTensor,
    offsets: CubeTensor,
    lengths: CubeTensor,
    labels: LabelTensors<CubeBackend>,
    columns: usize,
) -> (CubeTensor, CubeTensor, CubeTensor) {
    let [batch, heads, head_dim] = query.shape().dims();
    let rows = batch * heads;
    let [_, _, count] = labels.channels.shape().dims();
    let [[_, _, width], [_, _, source_width]] =
        [&labels.lists, &labels.sources].map(|tensor| tensor.shape().dims());
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
        into_contiguous(labels.channels).into_buffer_arg(),
        into_contiguous(labels.budgets).into_buffer_arg(),
        into_contiguous(labels.lists).into_buffer_arg(),
        into_contiguous(labels.sources).into_buffer_arg(),
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
        labels.layer,
        labels.period,
        labels.shares,
        elem_type(query.dtype),
    );
    (scores, candidates, wanted)
}
