//! Launches the ops on labels on CubeCL devices.

use burn::backend::{Shape, TensorMetadata};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::calculate_cube_count_elemwise;
use cubecl::prelude::*;

use super::args::{CopyLabelsArgs, LabelScoresArgs};
use super::kernel::{KeptListsLaunch, LabelRowsLaunch, copy_labels_kernel, label_scores_kernel};
use crate::backend::client::{elem_type, empty_like};
use crate::components::pool::HeadRangesLaunch;
use crate::select::scored_rows::ScoredRowTensors;

/// Returns scores, numbers of candidates, and numbers of wanted tokens.
pub(super) fn run(args: LabelScoresArgs<CubeBackend>) -> ScoredRowTensors<CubeBackend> {
    let query = args.query;
    let [batch, heads, head_dim] = query.shape().dims();
    let rows = batch * heads;
    let [_, _, labels] = args.channels.shape().dims();
    let shares = args.lists.as_ref().is_some();
    let [width, source_width] = [&args.lists, &args.sources]
        .map(|tensor| tensor.as_ref().map_or(0, |tensor| tensor.shape()[2]));
    let shape = [rows, args.columns];
    let scored = ScoredRowTensors::empty(&query, shape);
    let budgets = into_contiguous(args.budgets);
    let arg = |tensor: CubeTensor| into_contiguous(tensor).into_buffer_arg();
    let of = LabelRowsLaunch::new(
        arg(args.offsets.clone()),
        arg(args.lengths),
        arg(args.channels),
        arg(budgets.clone()),
        heads,
        rows / args.offsets.shape().num_elements(),
        head_dim,
        labels,
    );
    let kept = KeptListsLaunch::new(
        arg(args.lists.or_stand_in(&budgets)),
        arg(args.sources.or_stand_in(&budgets)),
        width,
        source_width,
        args.layer,
        args.period,
    );
    let cube_dim = CubeDim::new(&query.client, rows * args.columns);
    label_scores_kernel::launch(
        &query.client.clone(),
        calculate_cube_count_elemwise(&query.client, rows * args.columns, cube_dim),
        cube_dim,
        arg(query.clone()),
        arg(args.keys),
        of,
        kept,
        scored.launched(shape),
        shares,
        elem_type(query.dtype),
    );
    scored
}

/// Writes into the labels' own buffer. Returns it, and the label channels of queries.
pub(super) fn copy(args: CopyLabelsArgs<CubeBackend>) -> (CubeTensor, CubeTensor) {
    let CopyLabelsArgs { query, keys, channels, offsets, lengths, labels } = args;
    let labels = into_contiguous(labels);
    let [batch, all, head_dim] = query.shape().dims();
    let [_, _, count] = channels.shape().dims();
    let total_kv_heads = offsets.shape().num_elements();
    let queries = batch * all / total_kv_heads;
    let chosen = empty_like(&query, Shape::from([batch, all, count]), query.dtype);
    let units = total_kv_heads * (queries + 1) * count;
    let cube_dim = CubeDim::new(&query.client, units);
    let arg = |tensor: CubeTensor| into_contiguous(tensor).into_buffer_arg();
    copy_labels_kernel::launch(
        &query.client.clone(),
        calculate_cube_count_elemwise(&query.client, units, cube_dim),
        cube_dim,
        arg(query.clone()),
        arg(keys),
        arg(channels),
        HeadRangesLaunch::new(arg(offsets), arg(lengths), total_kv_heads),
        chosen.clone().into_buffer_arg(),
        labels.clone().into_buffer_arg(),
        queries,
        head_dim,
        count,
        elem_type(query.dtype),
    );
    (labels, chosen)
}
