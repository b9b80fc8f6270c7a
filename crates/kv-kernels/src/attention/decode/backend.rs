//! The backend trait of `decode_attention`, and its implementations for CubeCL devices and the CPU.

use burn::backend::{Backend, backend_extension};
#[cfg(feature = "gpu")]
use burn_cubecl::CubeBackend;

use super::args::{DecodeArgs, DecodeTensors};

#[backend_extension(Cube: cfg(feature = "gpu"), Flex: cfg(feature = "flex"))]
pub(crate) trait DecodeAttentionOps: Backend {
    /// Attention of one query per sequence over its slots.
    fn decode_attention(#[extension_type] args: DecodeArgs<Self>) -> DecodeTensors<Self>;
}

#[cfg(feature = "gpu")]
impl DecodeAttentionOps for CubeBackend {
    fn decode_attention(args: DecodeArgs<Self>) -> DecodeTensors<Self> {
        args.run()
    }
}

#[cfg(feature = "flex")]
mod cpu {
    //! The implementation for the CPU.

    use burn::backend::{DType, Element, Flex, Shape, TensorData};
    use burn_flex::FlexTensor;
    use bytemuck::Pod;
    use half::{bf16, f16};

    use super::DecodeAttentionOps;
    use crate::attention::decode::ViewKind;
    use crate::attention::decode::args::{DecodeArgs, DecodeTensors};
    use crate::attention::decode::problem::{Problem, Scores, Solution, View};
    use crate::attention::decode::vectorised::solve;
    use crate::backend::host_buffers::slice;
    use crate::components::host_vectors::HostFloat;

    impl DecodeAttentionOps for Flex {
        fn decode_attention(args: DecodeArgs<Self>) -> DecodeTensors<Self> {
            let scores = match (args.config.features.scores, args.config.raw) {
                (false, _) => Scores::None,
                (true, false) => Scores::Probabilities,
                (true, true) => Scores::Logits,
            };
            args.solve(scores)
        }
    }

    impl DecodeArgs<Flex> {
        /// Attends, and returns `scores` for every slot.
        pub(crate) fn solve(self, scores: Scores) -> DecodeTensors<Flex> {
            match self.query.dtype() {
                DType::F16 => self.run::<f16>(scores, f16::from_f32),
                DType::BF16 => self.run::<bf16>(scores, bf16::from_f32),
                _ => self.run::<f32>(scores, |x| x),
            }
        }

        fn run<E: Element + Pod + HostFloat>(
            self,
            scores: Scores,
            store: impl Fn(f32) -> E,
        ) -> DecodeTensors<Flex> {
            let shape = self.query.layout().shape().clone();
            let ranges = self.offsets.layout().shape().clone();
            let (query_heads, head_dim, kv_heads) = (shape[1], shape[2], ranges[1]);
            let group = query_heads / kv_heads;
            let [query, keys, values, offsets, lengths] =
                [self.query, self.keys, self.values, self.offsets, self.lengths]
                    .map(|tensor| tensor.to_contiguous());
            let [log_weights, numerators] = [&self.log_weights, &self.numerators]
                .map(|tensor| tensor.as_ref().map(FlexTensor::to_contiguous));
            let view = self.view.as_ref().map(FlexTensor::to_contiguous);
            let view = view.as_ref().map_or(&[][..], slice::<i32>);
            let problem = Problem {
                query: slice::<E>(&query),
                keys: slice::<E>(&keys),
                values: slice::<E>(&values),
                log_weights: log_weights.as_ref().map(slice::<f32>),
                numerators: numerators.as_ref().map(slice::<f32>),
                view: match self.config.features.view {
                    ViewKind::All => View::All,
                    ViewKind::Window => View::Window { sinks: self.config.sinks, starts: view },
                    ViewKind::List => View::List(view),
                    ViewKind::Sets => View::Sets(view),
                },
                offsets: slice::<i32>(&offsets),
                lengths: slice::<i32>(&lengths),
                group,
                head_dim,
                scale: self.config.scale,
            };
            let Solution { output, log_sum_exp, scores } = solve(&problem, scores);

            let output = TensorData::new(output.into_iter().map(store).collect::<Vec<E>>(), shape);
            let rows = log_sum_exp.len() / query_heads;
            let log_sum_exp = TensorData::new(log_sum_exp, Shape::from([rows, query_heads]));
            let slots = scores.len() / group;
            let scores = TensorData::new(scores, Shape::from([slots, group]));
            DecodeTensors {
                output: FlexTensor::from_data(output),
                log_sum_exp: FlexTensor::from_data(log_sum_exp),
                scores: FlexTensor::from_data(scores),
            }
        }
    }
}
