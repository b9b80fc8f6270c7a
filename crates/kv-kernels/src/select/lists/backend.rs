//! The backend trait of the ops on shared lists, and its implementations for CubeCL devices and the
//! CPU.

use burn::backend::tensor::IntTensor;
use burn::backend::{Backend, backend_extension};
#[cfg(feature = "gpu")]
use burn_cubecl::CubeBackend;

use super::args::{KeepListsArgs, ListSlotsArgs};
use crate::backend::optional::OptionalInt;

#[backend_extension(Cube: cfg(feature = "gpu"), Flex: cfg(feature = "flex"))]
pub(crate) trait ListsOps: Backend {
    /// Stores the lists of rows that chose anew, in place, and copies all lists to a layer's part
    /// of the board. Returns lists and board.
    fn keep_lists(
        #[extension_type] args: KeepListsArgs<Self>,
    ) -> (IntTensor<Self>, OptionalInt<Self>);

    /// The slots that lists name, `[R, width]`, and the number of each row's slots, `[R]`.
    fn list_slots(
        #[extension_type] args: ListSlotsArgs<Self>,
    ) -> (IntTensor<Self>, IntTensor<Self>);
}

#[cfg(feature = "gpu")]
impl ListsOps for CubeBackend {
    fn keep_lists(args: KeepListsArgs<Self>) -> (IntTensor<Self>, OptionalInt<Self>) {
        super::launch::keep(args)
    }

    fn list_slots(args: ListSlotsArgs<Self>) -> (IntTensor<Self>, IntTensor<Self>) {
        super::launch::slots(args)
    }
}

#[cfg(feature = "flex")]
mod cpu {
    //! The implementation for the CPU, which runs the reference.

    use burn::backend::Flex;
    use burn_flex::FlexTensor;

    use super::ListsOps;
    use crate::backend::host_buffers::{listed, owned, slice, slice_mut};
    use crate::backend::optional::OptionalInt;
    use crate::select::lists::args::{KeepListsArgs, ListSlotsArgs};
    use crate::select::lists::reference::{NewLists, slots};

    impl ListsOps for Flex {
        fn keep_lists(args: KeepListsArgs<Self>) -> (FlexTensor, OptionalInt<Self>) {
            let mut lists = owned(args.lists);
            let [indices, found, wanted, budgets, lengths] =
                [args.indices, args.found, args.wanted, args.budgets, args.lengths]
                    .map(|tensor| tensor.to_contiguous());
            let new = NewLists {
                indices: slice(&indices),
                found: slice(&found),
                wanted: slice(&wanted),
                budgets: slice(&budgets),
                lengths: slice(&lengths),
            };
            let own = slice_mut::<i32>(&mut lists);
            new.keep(own);
            let board = args.board.map(|board| {
                let (mut board, count) = (owned(board), own.len());
                slice_mut::<i32>(&mut board)[args.layer * count..][..count].copy_from_slice(own);
                board
            });
            (lists, board)
        }

        fn list_slots(args: ListSlotsArgs<Self>) -> (FlexTensor, FlexTensor) {
            let ListSlotsArgs { table, sources, budgets, offsets, lengths, width } = args;
            let [_, _, heads, list] = table.layout().shape().dims();
            let [_, _, columns] = sources.layout().shape().dims();
            let [table, sources, budgets, offsets, lengths] =
                [table, sources, budgets, offsets, lengths].map(|tensor| tensor.to_contiguous());
            let ranges = [slice(&offsets), slice(&lengths)];
            let (table, sources) = ((slice(&table), list), (slice(&sources), columns));
            listed(slots(table, sources, slice(&budgets), ranges, heads, width))
        }
    }
}
