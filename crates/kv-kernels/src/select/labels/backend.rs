//! The backend trait of the ops on labels, and its implementations for CubeCL devices and the CPU.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, backend_extension};
#[cfg(feature = "gpu")]
use burn_cubecl::CubeBackend;

use super::args::{CopyLabelsArgs, LabelScoresArgs};
use crate::select::scored_rows::ScoredRowTensors;

#[backend_extension(Cube: cfg(feature = "gpu"), Flex: cfg(feature = "flex"))]
pub(crate) trait LabelsOps: Backend {
    /// Approximate scores `[R, T]`, numbers of candidates `[R]`, and numbers of wanted tokens
    /// `[R]`.
    fn label_scores(#[extension_type] args: LabelScoresArgs<Self>) -> ScoredRowTensors<Self>;

    /// Writes the newest rows of the labels in place; returns the labels, and the label channels of
    /// queries `[B, N, r]`.
    fn copy_labels(
        #[extension_type] args: CopyLabelsArgs<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);
}

#[cfg(feature = "gpu")]
impl LabelsOps for CubeBackend {
    fn label_scores(args: LabelScoresArgs<Self>) -> ScoredRowTensors<Self> {
        super::launch::run(args)
    }

    fn copy_labels(args: CopyLabelsArgs<Self>) -> (FloatTensor<Self>, FloatTensor<Self>) {
        super::launch::copy(args)
    }
}

#[cfg(feature = "flex")]
mod cpu {
    //! The implementation for the CPU, which runs the reference.

    use burn::backend::{Flex, TensorData};
    use burn_flex::FlexTensor;

    use super::LabelsOps;
    use crate::backend::host_buffers::{dims, owned, slice, slice_mut, wide, with_element};
    use crate::select::labels::args::{CopyLabelsArgs, LabelScoresArgs};
    use crate::select::labels::reference::{Labels, copy_labels};
    use crate::select::scored_rows::ScoredRowTensors;

    impl LabelsOps for Flex {
        fn label_scores(args: LabelScoresArgs<Self>) -> ScoredRowTensors<Self> {
            let [_, heads, head_dim] = args.query.layout().shape().dims();
            let [query, keys] = [&args.query, &args.keys].map(wide);
            let [offsets, lengths, channels, budgets] =
                [args.offsets, args.lengths, args.channels, args.budgets]
                    .map(|tensor| tensor.to_contiguous());
            let shared = args.lists.into_option().zip(args.sources.into_option());
            let shared = shared.map(|(lists, sources)| {
                [lists, sources].map(|rows| (rows.to_contiguous(), dims::<3>(&rows)[2]))
            });
            let found = Labels {
                query: &query,
                keys: &keys,
                offsets: slice(&offsets),
                lengths: slice(&lengths),
                channels: slice(&channels),
                budgets: slice(&budgets),
                shared: shared
                    .as_ref()
                    .map(|both| both.each_ref().map(|(rows, width)| (slice(rows), *width))),
                layer: args.layer,
                period: args.period,
                heads,
                head_dim,
                columns: args.columns,
            };
            ScoredRowTensors::new(found.score(), args.columns)
        }

        fn copy_labels(args: CopyLabelsArgs<Self>) -> (FlexTensor, FlexTensor) {
            let mut labels = owned(args.labels);
            let [batch, queries, _] = dims(&args.query);
            let [slots, head_dim] = dims(&args.keys);
            let [_, _, count] = dims(&args.channels);
            let [query, keys] = [args.query, args.keys].map(|tensor| tensor.to_contiguous());
            let ints = [args.offsets, args.lengths, args.channels].map(|own| own.to_contiguous());
            let ints = ints.each_ref().map(slice::<i32>);
            let chosen = with_element!(labels.dtype(), E => {
                let rows = [slice::<E>(&query), slice::<E>(&keys)];
                let chosen = copy_labels(rows, slice_mut::<E>(&mut labels), ints, slots, head_dim);
                FlexTensor::from_data(TensorData::new(chosen, [batch, queries, count]))
            });
            (labels, chosen)
        }
    }
}
