//! Attention by its reference.

use burn::backend::{DType, Element, Flex, Shape, TensorData};
use burn_flex::FlexTensor;
use bytemuck::Pod;
use half::{bf16, f16};

use super::buffers::{owned, slice, wide};
use crate::add_probabilities::GroupReduction;
use crate::add_probabilities::reference::Probabilities;
use crate::decode_attention::reference::{Problem, Scores, Solution, View, solve};
use crate::decode_attention::{DecodeConfig, ViewKind};
use crate::evicting_attention::reference::{Decision, HostGuard};
use crate::evicting_attention::{EvictionConfig, EvictionScope};
use crate::extension::{AttentionOps, Eviction};

impl AttentionOps for Flex {
    fn decode_attention(
        query: FlexTensor,
        keys: FlexTensor,
        values: FlexTensor,
        log_weights: FlexTensor,
        numerators: FlexTensor,
        offsets: FlexTensor,
        lengths: FlexTensor,
        view: FlexTensor,
        config: DecodeConfig,
    ) -> (FlexTensor, FlexTensor, FlexTensor) {
        let args =
            Args { query, keys, values, log_weights, numerators, offsets, lengths, view, config };
        args.solve(match (config.features.scores, config.raw) {
            (false, _) => Scores::None,
            (true, false) => Scores::Probabilities,
            (true, true) => Scores::Logits,
        })
    }

    fn evicting_attention(
        query: FlexTensor,
        keys: FlexTensor,
        values: FlexTensor,
        log_weights: FlexTensor,
        eviction: Eviction<Self>,
        config: EvictionConfig,
    ) -> (FlexTensor, FlexTensor, FlexTensor, FlexTensor) {
        let [pairs @ .., kv_heads] = eviction.offsets.layout().shape().dims::<2>();
        let group = query.layout().shape()[1] / kv_heads;
        let args = Args {
            query,
            keys,
            values,
            numerators: log_weights.clone(),
            log_weights,
            offsets: eviction.offsets.clone(),
            lengths: eviction.lengths.clone(),
            view: eviction.lengths.clone(),
            config: config.attention,
        };
        let (output, log_sum_exp, logits) = args.solve(Scores::Logits);
        let [offsets, lengths, limits, places, positions, now] = [
            eviction.offsets,
            eviction.lengths,
            eviction.limits,
            eviction.places,
            eviction.positions,
            eviction.now,
        ]
        .map(|tensor| tensor.to_contiguous());
        let log_norms = eviction.log_norms.to_contiguous();
        let decision = Decision {
            logits: slice::<f32>(&logits),
            log_sum_exp: slice::<f32>(&log_sum_exp),
            log_norms: slice::<f32>(&log_norms),
            offsets: slice::<i32>(&offsets),
            lengths: slice::<i32>(&lengths),
            limits: slice::<i32>(&limits),
            newest: slice::<i32>(&places),
            spares_newest: config.spares_newest,
            guard: config.guarded.then(|| HostGuard {
                positions: slice::<i32>(&positions),
                now: slice::<i32>(&now),
                sinks: config.sinks,
                recents: config.recents,
            }),
            kv_heads,
            group,
            together: config.scope == EvictionScope::Layer,
        };
        let importance = decision.importance();
        let next = TensorData::new(decision.next(&importance), Shape::from([pairs[0], kv_heads]));
        let slots = importance.len();
        let importance = TensorData::new(importance, [slots]);
        let (next, importance) = (FlexTensor::from_data(next), FlexTensor::from_data(importance));
        (output, next, eviction.arrivals, importance)
    }

    fn add_probabilities(
        sums: FlexTensor,
        logits: FlexTensor,
        log_sum_exp: FlexTensor,
        offsets: FlexTensor,
        lengths: FlexTensor,
        reduction: GroupReduction,
    ) -> FlexTensor {
        let mut sums = owned(sums);
        let [logits, log_sum_exp, offsets, lengths] =
            [logits, log_sum_exp, offsets, lengths].map(|tensor| tensor.to_contiguous());
        let probabilities = Probabilities {
            logits: slice(&logits),
            log_sum_exp: slice(&log_sum_exp),
            offsets: slice(&offsets),
            lengths: slice(&lengths),
            reduction,
        };
        let written = sums.storage_mut::<f32>();
        probabilities.each(|slot, own, _| written[slot] += own);
        sums
    }

    fn add_contributions(
        sums: FlexTensor,
        norms: FlexTensor,
        values: FlexTensor,
        logits: FlexTensor,
        log_sum_exp: FlexTensor,
        offsets: FlexTensor,
        lengths: FlexTensor,
        reduction: GroupReduction,
    ) -> (FlexTensor, FlexTensor) {
        let (mut sums, mut norms) = (owned(sums), owned(norms));
        let [logits, log_sum_exp, offsets, lengths] =
            [logits, log_sum_exp, offsets, lengths].map(|tensor| tensor.to_contiguous());
        let [_, head_dim] = values.layout().shape().dims();
        let values = wide(&values);
        let probabilities = Probabilities {
            logits: slice(&logits),
            log_sum_exp: slice(&log_sum_exp),
            offsets: slice(&offsets),
            lengths: slice(&lengths),
            reduction,
        };
        let (written, known) = (sums.storage_mut::<f32>(), norms.storage_mut::<f32>());
        probabilities.each(|slot, own, last| {
            if last {
                let value = &values[slot * head_dim..][..head_dim];
                known[slot] = value.iter().map(|x| x.abs()).sum();
            }
            written[slot] += own * known[slot];
        });
        (sums, norms)
    }
}

/// A call's tensors.
pub(super) struct Args {
    pub(super) query: FlexTensor,
    pub(super) keys: FlexTensor,
    pub(super) values: FlexTensor,
    pub(super) log_weights: FlexTensor,
    pub(super) numerators: FlexTensor,
    pub(super) offsets: FlexTensor,
    pub(super) lengths: FlexTensor,
    pub(super) view: FlexTensor,
    pub(super) config: DecodeConfig,
}

impl Args {
    pub(super) fn solve(self, scores: Scores) -> (FlexTensor, FlexTensor, FlexTensor) {
        match self.query.dtype() {
            DType::F16 => self.run::<f16>(scores, f16::to_f32, f16::from_f32),
            DType::BF16 => self.run::<bf16>(scores, bf16::to_f32, bf16::from_f32),
            _ => self.run::<f32>(scores, |x| x, |x| x),
        }
    }

    fn run<E: Element + Pod>(
        self,
        scores: Scores,
        load: impl Fn(E) -> f32,
        store: impl Fn(f32) -> E,
    ) -> (FlexTensor, FlexTensor, FlexTensor) {
        let shape = self.query.layout().shape().clone();
        let ranges = self.offsets.layout().shape().clone();
        let (query_heads, head_dim, kv_heads) = (shape[1], shape[2], ranges[1]);
        let group = query_heads / kv_heads;
        let features = self.config.features;
        let [query, keys, values, log_weights, numerators] =
            [self.query, self.keys, self.values, self.log_weights, self.numerators]
                .map(|tensor| tensor.to_contiguous());
        let [offsets, lengths, view] =
            [self.offsets, self.lengths, self.view].map(|tensor| tensor.to_contiguous());
        let view = slice::<i32>(&view);
        let problem = Problem {
            query: slice::<E>(&query),
            keys: slice::<E>(&keys),
            values: slice::<E>(&values),
            log_weights: features.weighted.then(|| slice::<f32>(&log_weights)),
            numerators: features.numerators.then(|| slice::<f32>(&numerators)),
            view: match features.view {
                ViewKind::All => View::All,
                ViewKind::Window => View::Window { sinks: self.config.sinks, starts: view },
                ViewKind::List => View::List(view),
                ViewKind::Sets => View::Sets(view),
            },
            offsets: slice::<i32>(&offsets),
            lengths: slice::<i32>(&lengths),
            kv_heads,
            group,
            head_dim,
            scale: self.config.scale,
        };
        let Solution { output, log_sum_exp, scores } = solve(&problem, scores, load);

        let output = TensorData::new(output.into_iter().map(store).collect::<Vec<E>>(), shape);
        let rows = log_sum_exp.len() / query_heads;
        let log_sum_exp = TensorData::new(log_sum_exp, Shape::from([rows, query_heads]));
        let slots = scores.len() / group;
        let scores = TensorData::new(scores, Shape::from([slots, group]));
        (
            FlexTensor::from_data(output),
            FlexTensor::from_data(log_sum_exp),
            FlexTensor::from_data(scores),
        )
    }
}
