//! The backend trait of `signature_scores`, and its implementations for CubeCL devices and the CPU.

use burn::backend::{Backend, backend_extension};
#[cfg(feature = "gpu")]
use burn_cubecl::CubeBackend;

use super::args::SignatureScoresArgs;
use crate::select::scored_rows::ScoredRowTensors;

#[backend_extension(Cube: cfg(feature = "gpu"), Flex: cfg(feature = "flex"))]
pub(crate) trait SignatureOps: Backend {
    /// Scores `[R, T]`, numbers of candidates `[R]`, and numbers of wanted slots `[R]`.
    fn signature_scores(
        #[extension_type] args: SignatureScoresArgs<Self>,
    ) -> ScoredRowTensors<Self>;
}

#[cfg(feature = "gpu")]
impl SignatureOps for CubeBackend {
    fn signature_scores(args: SignatureScoresArgs<Self>) -> ScoredRowTensors<Self> {
        super::launch::run(args)
    }
}

#[cfg(feature = "flex")]
mod cpu {
    //! The implementation for the CPU, which runs the reference.

    use burn::backend::Flex;

    use super::SignatureOps;
    use crate::archive::signature_scores::args::SignatureScoresArgs;
    use crate::archive::signature_scores::reference::Signatures;
    use crate::backend::host_buffers::{dims, slice, wide};
    use crate::select::scored_rows::ScoredRowTensors;

    impl SignatureOps for Flex {
        fn signature_scores(args: SignatureScoresArgs<Self>) -> ScoredRowTensors<Self> {
            let [_, _, head_dim] = dims(&args.query);
            let (query, log_sum_exp) = (wide(&args.query), wide(&args.log_sum_exp));
            let [signatures, statistics, offsets, lengths] =
                [args.pool.signatures, args.pool.key_statistics, args.offsets, args.lengths]
                    .map(|tensor| tensor.to_contiguous());
            let scored = Signatures {
                signatures: slice(&signatures),
                statistics: slice(&statistics),
                head_dim,
                scale: args.scale,
            };
            let (offsets, lengths) = (slice::<i32>(&offsets), slice::<i32>(&lengths));
            let group = log_sum_exp.len() / offsets.len();
            let mut scores = vec![0.0; offsets.len() * args.columns];
            for (row, scores) in scores.chunks_mut(args.columns).enumerate() {
                let queries = &query[row * group * head_dim..][..group * head_dim];
                let sums = &log_sum_exp[row * group..][..group];
                let (first, length) = (offsets[row].max(0) as usize, lengths[row].max(0) as usize);
                scored.score(queries, sums, first, &mut scores[..length.min(args.columns)]);
            }
            let candidates =
                lengths.iter().map(|length| (*length).clamp(0, args.columns as i32)).collect();
            let wanted = vec![args.wanted as i32; offsets.len()];
            ScoredRowTensors::new((scores, candidates, wanted), args.columns)
        }
    }
}
