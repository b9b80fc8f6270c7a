//! The backend trait of `label_scores`, and its implementations for CubeCL devices and the CPU.

use burn::backend::{Backend, backend_extension};
#[cfg(feature = "gpu")]
use burn_cubecl::CubeBackend;

use super::args::LabelScoresArgs;
use crate::select::scored_rows::ScoredRowTensors;

#[backend_extension(Cube: cfg(feature = "gpu"), Flex: cfg(feature = "flex"))]
pub(crate) trait LabelsOps: Backend {
    /// Approximate scores `[R, T]`, numbers of candidates `[R]`, and numbers of wanted tokens
    /// `[R]`.
    fn label_scores(#[extension_type] args: LabelScoresArgs<Self>) -> ScoredRowTensors<Self>;
}

#[cfg(feature = "gpu")]
impl LabelsOps for CubeBackend {
    fn label_scores(args: LabelScoresArgs<Self>) -> ScoredRowTensors<Self> {
        super::launch::run(args)
    }
}

#[cfg(feature = "flex")]
mod cpu {
    //! The implementation for the CPU, which runs the reference.

    use burn::backend::Flex;

    use super::LabelsOps;
    use crate::backend::host_buffers::{dims, slice, wide};
    use crate::select::labels::args::LabelScoresArgs;
    use crate::select::labels::reference::Labels;
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
    }
}
