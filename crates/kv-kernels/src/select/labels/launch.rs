//! Launches `label_scores` on CubeCL devices.

use burn::backend::TensorMetadata;
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::calculate_cube_count_elemwise;
use cubecl::prelude::*;

use super::args::LabelScoresArgs;
use super::kernel::{KeptListsLaunch, LabelRowsLaunch, label_scores_kernel};
use crate::backend::client::elem_type;
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
