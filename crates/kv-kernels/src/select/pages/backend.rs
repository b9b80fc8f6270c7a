//! The backend trait of the ops on pages, and its implementations for CubeCL devices and the CPU.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, backend_extension};
#[cfg(feature = "gpu")]
use burn_cubecl::CubeBackend;

use super::args::{PageBoundsArgs, PageScoresArgs, PageSlotsArgs};
use crate::select::scored_rows::ScoredRowTensors;

#[backend_extension(Cube: cfg(feature = "gpu"), Flex: cfg(feature = "flex"))]
pub(crate) trait PagesOps: Backend {
    /// Writes the bounds of pages in place, and returns them.
    fn page_bounds(#[extension_type] args: PageBoundsArgs<Self>) -> FloatTensor<Self>;

    /// Scores of pages `[R, pages]`, numbers of candidates `[R]`, and numbers of wanted pages
    /// `[R]`.
    fn page_scores(#[extension_type] args: PageScoresArgs<Self>) -> ScoredRowTensors<Self>;

    /// The slots of chosen pages `[R, W]`, and the number of each row's slots `[R]`.
    fn page_slots(
        #[extension_type] args: PageSlotsArgs<Self>,
    ) -> (IntTensor<Self>, IntTensor<Self>);
}

#[cfg(feature = "gpu")]
impl PagesOps for CubeBackend {
    fn page_bounds(args: PageBoundsArgs<Self>) -> FloatTensor<Self> {
        super::launch::bounds(args)
    }

    fn page_scores(args: PageScoresArgs<Self>) -> ScoredRowTensors<Self> {
        super::launch::scores(args)
    }

    fn page_slots(args: PageSlotsArgs<Self>) -> (IntTensor<Self>, IntTensor<Self>) {
        super::launch::slots(args)
    }
}

#[cfg(feature = "flex")]
mod cpu {
    //! The implementation for the CPU, which runs the reference.

    use burn::backend::{DType, Flex};
    use burn_flex::FlexTensor;
    use half::{bf16, f16};

    use super::PagesOps;
    use crate::backend::host_buffers::{listed, owned, slice, slice_mut, wide};
    use crate::select::pages::args::{PageBoundsArgs, PageScoresArgs, PageSlotsArgs};
    use crate::select::pages::reference::{bound, score, slots};
    use crate::select::scored_rows::ScoredRowTensors;

    impl PagesOps for Flex {
        fn page_bounds(args: PageBoundsArgs<Self>) -> FlexTensor {
            let PageBoundsArgs { keys, offsets, lengths, bounds, page, last, .. } = args;
            let mut bounds = owned(bounds);
            let [_, head_dim] = keys.layout().shape().dims();
            let [keys, offsets, lengths] =
                [keys, offsets, lengths].map(|tensor| tensor.to_contiguous());
            let ranges = [slice::<i32>(&offsets), slice::<i32>(&lengths)];
            macro_rules! bound {
                ($kind:ty, $load:expr) => {
                    bound(
                        slice::<$kind>(&keys),
                        slice_mut::<$kind>(&mut bounds),
                        ranges,
                        head_dim,
                        page,
                        last,
                        $load,
                    )
                };
            }
            match keys.dtype() {
                DType::F16 => bound!(f16, f16::to_f32),
                DType::BF16 => bound!(bf16, bf16::to_f32),
                _ => bound!(f32, |x| x),
            }
            bounds
        }

        fn page_scores(args: PageScoresArgs<Self>) -> ScoredRowTensors<Self> {
            let PageScoresArgs { query, bounds, offsets, lengths, budgets, pages, options } = args;
            let [_, _, head_dim] = query.layout().shape().dims();
            let [offsets, lengths, budgets] =
                [offsets, lengths, budgets].map(|tensor| tensor.to_contiguous());
            let ranges = [slice::<i32>(&offsets), slice::<i32>(&lengths)];
            let [query, bounds] = [&query, &bounds].map(wide);
            let budgets = slice(&budgets);
            let scored = score(&query, &bounds, ranges, budgets, [head_dim, pages], options);
            ScoredRowTensors::new(scored, pages)
        }

        fn page_slots(args: PageSlotsArgs<Self>) -> (FlexTensor, FlexTensor) {
            let PageSlotsArgs { pages, found, offsets, lengths, page, always_last } = args;
            let [pages, found, offsets, lengths] =
                [pages, found, offsets, lengths].map(|tensor| tensor.to_contiguous());
            let ranges = [slice::<i32>(&offsets), slice::<i32>(&lengths)];
            listed(slots(slice(&pages), slice(&found), ranges, page, always_last))
        }
    }
}
