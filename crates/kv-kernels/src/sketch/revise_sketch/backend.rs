//! What `revise_sketch` asks of a backend.

use burn::backend::{Backend, backend_extension};
#[cfg(feature = "gpu")]
use burn_cubecl::CubeBackend;

use super::args::{Revised, Revision};

#[backend_extension(Cube: cfg(feature = "gpu"), Flex: cfg(feature = "flex"))]
pub(crate) trait ReviseSketchOps: Backend {
    /// Adds a step's probabilities to scores and moves tokens between slots and sketches, in place.
    fn revise_sketch(#[extension_type] revision: Revision<Self>) -> Revised<Self>;
}

#[cfg(feature = "gpu")]
impl ReviseSketchOps for CubeBackend {
    fn revise_sketch(revision: Revision<Self>) -> Revised<Self> {
        super::launch::run(revision)
    }
}

#[cfg(feature = "flex")]
mod cpu {
    //! The op on the CPU, by its reference.

    use burn::backend::Flex;

    use super::ReviseSketchOps;
    use crate::backend::host_buffers::{dims, owned, rounded, rounding, slice, wide};
    use crate::sketch::count_sketch::args::SketchTensors;
    use crate::sketch::revise_sketch::args::{Revised, Revision};
    use crate::sketch::revise_sketch::reference::{Host, HostLogits};
    use crate::slots::pool::SlotPools;

    impl ReviseSketchOps for Flex {
        fn revise_sketch(revision: Revision<Self>) -> Revised<Self> {
            let Revision { sketch, pool, by_token, options, .. } = revision;
            let tables = sketch.tables();
            let (shape, dtype) = (dims::<2>(&pool.keys), pool.keys.dtype());
            let (mut keys, mut values) = (wide(&pool.keys), wide(&pool.values));
            let [mut positions, mut lengths, mut moved] =
                [pool.positions, revision.lengths, revision.moved].map(owned);
            let [mut slot_scores, mut token_scores] =
                [revision.slot_scores, revision.token_scores].map(owned);
            let host = sketch.on_host(&tables);
            let [mut sketch_keys, mut sketch_values] = [sketch.keys, sketch.values].map(owned);
            let [offsets, newest] =
                [revision.offsets, revision.newest].map(|ints| ints.to_contiguous());
            let [slot_logits, token_logits, log_sum_exp] =
                [revision.slot_logits, revision.token_logits, revision.log_sum_exp]
                    .map(|tensor| tensor.to_contiguous());
            Host {
                sketch: host,
                entries: [sketch_keys.storage_mut::<f32>(), sketch_values.storage_mut::<f32>()],
                slots: [&mut keys, &mut values],
                positions: positions.storage_mut::<i32>(),
                offsets: slice(&offsets),
                lengths: lengths.storage_mut::<i32>(),
                slot_scores: slot_scores.storage_mut::<f32>(),
                token_scores: token_scores.storage_mut::<f32>(),
                moved: moved.storage_mut::<i32>(),
                round: rounding(dtype),
            }
            .revise(
                &HostLogits {
                    slots: (!by_token).then(|| slice(&slot_logits)),
                    tokens: slice(&token_logits),
                    log_sum_exp: slice(&log_sum_exp),
                },
                slice(&newest),
                options,
            );
            let [heads, hashes] = tables;
            Revised {
                sketch: SketchTensors {
                    keys: sketch_keys,
                    values: sketch_values,
                    heads,
                    hashes,
                    most_entries: sketch.most_entries,
                    config: sketch.config,
                },
                pool: SlotPools {
                    keys: rounded(keys, shape, dtype),
                    values: rounded(values, shape, dtype),
                    positions,
                    log_weights: pool.log_weights,
                    weighted: pool.weighted,
                },
                lengths,
                slot_scores,
                token_scores,
                moved,
            }
        }
    }
}
