//! The backend trait of `sketch_attention`, and its implementations for CubeCL devices and the CPU.

use burn::backend::{Backend, backend_extension};
#[cfg(feature = "gpu")]
use burn_cubecl::CubeBackend;

use super::args::{SketchAttended, SketchAttentionArgs};

#[backend_extension(Cube: cfg(feature = "gpu"), Flex: cfg(feature = "flex"))]
pub(crate) trait SketchAttentionOps: Backend {
    /// Attention over slots and over tokens in a count-sketch.
    fn sketch_attention(#[extension_type] args: SketchAttentionArgs<Self>) -> SketchAttended<Self>;
}

#[cfg(feature = "gpu")]
impl SketchAttentionOps for CubeBackend {
    fn sketch_attention(args: SketchAttentionArgs<Self>) -> SketchAttended<Self> {
        super::launch::run(args)
    }
}

#[cfg(feature = "flex")]
mod cpu {
    //! The implementation for the CPU, which runs the reference.

    use burn::backend::{DType, Flex, Shape};

    use super::SketchAttentionOps;
    use crate::attention::sketch::args::{SketchAttended, SketchAttentionArgs};
    use crate::attention::sketch::reference::Problem;
    use crate::backend::host_buffers::{dims, rounded, rounding, slice, wide};

    impl SketchAttentionOps for Flex {
        fn sketch_attention(args: SketchAttentionArgs<Self>) -> SketchAttended<Self> {
            let SketchAttentionArgs {
                query, keys, values, offsets, lengths, sketch, scale, ..
            } = args;
            let tables = sketch.tables();
            let (count, [batch, heads, head_dim]) = (dims::<2>(&keys)[0], dims(&query));
            let total_kv_heads = offsets.layout().shape().num_elements();
            let group = batch * heads / total_kv_heads;
            let slots = [keys, values].map(|tensor| wide(&tensor));
            let entries = [&sketch.keys, &sketch.values].map(wide);
            let ranges = [offsets, lengths].map(|tensor| tensor.to_contiguous());
            let (scores, newest) = (wide(&args.scores), args.newest.to_contiguous());
            let solution = Problem {
                query: &wide(&query),
                slots: [&slots[0], &slots[1]],
                ranges: [slice(&ranges[0]), slice(&ranges[1])],
                sketch: sketch.on_host(&tables),
                entries: [&entries[0], &entries[1]],
                scores: &scores,
                newest: slice(&newest),
                scale,
                round: rounding(query.dtype()),
            }
            .solve();
            let floats = |values, shape: Shape| rounded(values, shape, DType::F32);
            SketchAttended {
                output: rounded(solution.output, [batch, heads, head_dim], query.dtype()),
                log_sum_exp: floats(solution.log_sum_exp, Shape::from([batch, heads])),
                slot_logits: floats(solution.slot_logits, Shape::from([count, group])),
                token_logits: floats(solution.token_logits, Shape::from([scores.len(), group])),
            }
        }
    }
}
