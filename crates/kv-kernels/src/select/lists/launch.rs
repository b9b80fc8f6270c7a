//! Launches the ops on shared lists on CubeCL devices.

use burn::backend::{DType, Shape, TensorMetadata};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::calculate_cube_count_elemwise;
use cubecl::prelude::*;

use super::args::{KeepListsArgs, ListSlotsArgs};
use super::kernel::{self, ListSizesLaunch, ListedSlotsLaunch, NewListsLaunch, ReadListsLaunch};
use crate::backend::client::empty_like;
use crate::backend::optional::OptionalInt;

/// A tensor without gaps, as a kernel's argument.
fn arg(tensor: CubeTensor) -> BufferArg {
    into_contiguous(tensor).into_buffer_arg()
}

/// Writes into the buffers of the lists and, where there is one, of the board.
pub(super) fn keep(args: KeepListsArgs<CubeBackend>) -> (CubeTensor, OptionalInt<CubeBackend>) {
    let KeepListsArgs { lists, indices, found, wanted, budgets, lengths, board, layer } = args;
    let (lists, board) = (into_contiguous(lists), board.map(into_contiguous));
    let [batch, heads, width] = lists.shape().dims();
    let rows = batch * heads;
    let group = rows / lengths.shape().num_elements();
    let cube_dim = CubeDim::new(&lists.client, rows * width);
    kernel::keep_lists_kernel::launch(
        &lists.client.clone(),
        calculate_cube_count_elemwise(&lists.client, rows * width, cube_dim),
        cube_dim,
        lists.clone().into_buffer_arg(),
        NewListsLaunch::new(arg(indices), arg(found), arg(wanted), arg(budgets), arg(lengths)),
        board.clone().or_new(&lists).into_buffer_arg(),
        layer,
        ListSizesLaunch::new(rows, width, group),
        board.as_ref().is_some(),
    );
    (lists, board)
}

/// Returns slots, and the number of each row's slots.
pub(super) fn slots(args: ListSlotsArgs<CubeBackend>) -> (CubeTensor, CubeTensor) {
    let ListSlotsArgs { table, sources, budgets, offsets, lengths, width } = args;
    let client = budgets.client.clone();
    let [_, batch, heads, list] = table.shape().dims();
    let [_, _, source_width] = sources.shape().dims();
    let rows = batch * heads;
    let group = rows / offsets.shape().num_elements();
    let slots = empty_like(&budgets, Shape::from([rows, width]), DType::I32);
    let counts = empty_like(&budgets, Shape::from([rows]), DType::I32);
    let cube_dim = CubeDim::new(&client, rows * width);
    kernel::list_slots_kernel::launch(
        &client,
        calculate_cube_count_elemwise(&client, rows * width, cube_dim),
        cube_dim,
        ReadListsLaunch::new(arg(table), arg(sources), arg(budgets), heads, source_width),
        arg(offsets),
        arg(lengths),
        ListedSlotsLaunch::new(
            slots.clone().into_buffer_arg(),
            counts.clone().into_buffer_arg(),
            width,
        ),
        ListSizesLaunch::new(rows, list, group),
    );
    (slots, counts)
}
