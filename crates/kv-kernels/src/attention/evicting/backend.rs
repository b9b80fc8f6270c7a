//! The backend trait of `evicting_attention`, and its implementations for CubeCL devices and the
//! CPU.

use burn::backend::{Backend, backend_extension};
#[cfg(feature = "gpu")]
use burn_cubecl::CubeBackend;

use super::args::{Evicted, EvictingArgs};

#[backend_extension(Cube: cfg(feature = "gpu"), Flex: cfg(feature = "flex"))]
pub(crate) trait EvictingAttentionOps: Backend {
    /// Attends for one query per sequence, and chooses the slot of each head's next token.
    fn evicting_attention(#[extension_type] args: EvictingArgs<Self>) -> Evicted<Self>;
}

#[cfg(feature = "gpu")]
impl EvictingAttentionOps for CubeBackend {
    fn evicting_attention(args: EvictingArgs<Self>) -> Evicted<Self> {
        super::launch::run(args)
    }
}

#[cfg(feature = "flex")]
mod cpu {
    //! The implementation for the CPU, which runs the reference.

    use burn::backend::{Flex, Shape, TensorData};
    use burn_flex::FlexTensor;

    use super::EvictingAttentionOps;
    use crate::attention::decode::args::{DecodeArgs, DecodeTensors};
    use crate::attention::decode::problem::Scores;
    use crate::attention::evicting::EvictionScope;
    use crate::attention::evicting::args::{Evicted, EvictingArgs};
    use crate::attention::evicting::reference::{Decision, HostGuard, HostRecords};
    use crate::backend::host_buffers::{slice, slice_mut};
    use crate::backend::optional::{OptionalFloat, OptionalInt};

    impl EvictingAttentionOps for Flex {
        fn evicting_attention(args: EvictingArgs<Self>) -> Evicted<Self> {
            let config = args.config;
            let [batch, kv_heads] = args.offsets.layout().shape().dims::<2>();
            let group = args.query.layout().shape()[1] / kv_heads;
            let attention = DecodeArgs::<Self> {
                query: args.query,
                keys: args.keys,
                values: args.values,
                log_weights: args.log_weights,
                numerators: OptionalFloat::Absent,
                offsets: args.offsets.clone(),
                lengths: args.lengths.clone(),
                view: OptionalInt::Absent,
                config: config.attention,
            };
            let DecodeTensors { output, log_sum_exp, scores: logits } =
                attention.solve(Scores::Logits);
            let [offsets, lengths, limits, write_slots] =
                [args.offsets, args.lengths, args.limits, args.write_slots]
                    .map(|tensor| tensor.to_contiguous());
            let whole = |tensor: FlexTensor| tensor.to_contiguous();
            let positions = args.positions.into_option().map(whole);
            let [now, steps] = [args.now, args.steps].map(|own| own.into_option().map(whole));
            let mut records = args.records.into_option().map(whole);
            let log_norms = args.log_norms.to_contiguous();
            let decision = Decision {
                logits: slice::<f32>(&logits),
                log_sum_exp: slice::<f32>(&log_sum_exp),
                log_norms: slice::<f32>(&log_norms),
                offsets: slice::<i32>(&offsets),
                lengths: slice::<i32>(&lengths),
                limits: slice::<i32>(&limits),
                newest: slice::<i32>(&write_slots),
                spares_newest: config.spares_newest,
                positions: positions.as_ref().map(slice::<i32>),
                guard: now.as_ref().map(|now| HostGuard {
                    now: slice::<i32>(now),
                    sinks: config.sinks,
                    recents: config.recents,
                }),
                levels: config.levels,
                kv_heads,
                group,
                together: config.scope == EvictionScope::Layer,
            };
            let importance = decision.importance();
            let records_on_host = records.as_mut().zip(steps.as_ref());
            let records_on_host = records_on_host.map(|(records, steps)| HostRecords {
                records: slice_mut::<f32>(records),
                now: slice::<i32>(steps),
                growth: config.growth,
            });
            let next = decision.next(&importance, records_on_host);
            let next = TensorData::new(next, Shape::from([batch, kv_heads]));
            let slots = importance.len();
            let importance = TensorData::new(importance, [slots]);
            let (next, importance) =
                (FlexTensor::from_data(next), FlexTensor::from_data(importance));
            let records = OptionalFloat::of(records);
            Evicted { output, write_slots: next, arrivals: args.arrivals, records, importance }
        }
    }
}
