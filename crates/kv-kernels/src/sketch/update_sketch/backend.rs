//! The backend trait of `update_sketch`, and its implementations for CubeCL devices and the CPU.

use burn::backend::{Backend, backend_extension};
#[cfg(feature = "gpu")]
use burn_cubecl::CubeBackend;

use super::args::{SketchUpdateArgs, UpdatedSketch};

#[backend_extension(Cube: cfg(feature = "gpu"), Flex: cfg(feature = "flex"))]
pub(crate) trait UpdateSketchOps: Backend {
    /// Adds a step's probabilities to scores, and moves tokens between slots and sketches, in
    /// place.
    fn update_sketch(#[extension_type] args: SketchUpdateArgs<Self>) -> UpdatedSketch<Self>;
}

#[cfg(feature = "gpu")]
impl UpdateSketchOps for CubeBackend {
    fn update_sketch(args: SketchUpdateArgs<Self>) -> UpdatedSketch<Self> {
        super::launch::run(args)
    }
}

#[cfg(feature = "flex")]
mod cpu {
    //! The implementation for the CPU, which runs the reference.

    use burn::backend::Flex;
    use burn_flex::FlexTensor;

    use super::UpdateSketchOps;
    use crate::backend::host_buffers::{dims, owned, rounded, rounding, slice, slice_mut, wide};
    use crate::sketch::count_sketch::args::SketchTensors;
    use crate::sketch::update_sketch::args::{SketchUpdateArgs, UpdatedSketch};
    use crate::sketch::update_sketch::reference::{Host, HostLogits};
    use crate::slots::pool::SlotPools;

    impl UpdateSketchOps for Flex {
        fn update_sketch(args: SketchUpdateArgs<Self>) -> UpdatedSketch<Self> {
            let SketchUpdateArgs { sketch, pool, options, .. } = args;
            let tables = sketch.tables();
            let (shape, dtype) = (dims::<2>(&pool.keys), pool.keys.dtype());
            let (mut keys, mut values) =
                (wide(&pool.keys).into_vec(), wide(&pool.values).into_vec());
            let [mut positions, mut lengths, mut moved] =
                [pool.positions, args.lengths, args.moved].map(owned);
            let [mut slot_scores, mut token_scores] =
                [args.slot_scores, args.token_scores].map(owned);
            let host = sketch.on_host(&tables);
            let [mut sketch_keys, mut sketch_values] = [sketch.keys, sketch.values].map(owned);
            let [offsets, newest] = [args.offsets, args.newest].map(|ints| ints.to_contiguous());
            let [token_logits, log_sum_exp] =
                [args.token_logits, args.log_sum_exp].map(|tensor| tensor.to_contiguous());
            let slot_logits = args.slot_logits.as_ref().map(FlexTensor::to_contiguous);
            Host {
                sketch: host,
                entries: [slice_mut::<f32>(&mut sketch_keys), slice_mut::<f32>(&mut sketch_values)],
                slots: [&mut keys, &mut values],
                positions: slice_mut::<i32>(&mut positions),
                offsets: slice(&offsets),
                lengths: slice_mut::<i32>(&mut lengths),
                slot_scores: slice_mut::<f32>(&mut slot_scores),
                token_scores: slice_mut::<f32>(&mut token_scores),
                moved: slice_mut::<i32>(&mut moved),
                round: rounding(dtype),
            }
            .update(
                &HostLogits {
                    slots: slot_logits.as_ref().map(slice),
                    tokens: slice(&token_logits),
                    log_sum_exp: slice(&log_sum_exp),
                },
                slice(&newest),
                options,
            );
            let [heads, hashes] = tables;
            UpdatedSketch {
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
                },
                lengths,
                slot_scores,
                token_scores,
                moved,
            }
        }
    }
}
