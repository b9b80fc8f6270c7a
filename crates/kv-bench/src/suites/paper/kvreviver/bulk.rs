//! The launch that adds up a step's scores, where it also evicts in bulk.

use burn::tensor::{DType, Device, Distribution, Int, Tensor};
use kv_kernels::{
    ABSENT, HEAD_FIELDS, ReviseOptions, RevisedScores, SketchHashes, SketchPool, SlotPool,
    SlotRanges, StepLogits, revise_sketch,
};

use super::attention::{BUCKETS, Lab, SLACK};

impl Lab<'_> {
    /// Seconds that the launch takes longer where every range holds one slot more than its slack
    /// allows, which every call brings about anew. Nothing changes places.
    pub(super) fn bulk(&self) -> anyhow::Result<f64> {
        let device: &Device = self.device;
        let pairs = self.batch * self.heads.kv;
        let group = self.heads.query / self.heads.kv;
        let (entries, limit) = self.parts();
        let held = limit + SLACK + 1;
        let ints = |values: Vec<usize>, shape: [usize; 2]| {
            let values: Vec<i32> = values.into_iter().map(|value| value as i32).collect();
            let flat = Tensor::<1, Int>::from_data(values.as_slice(), (device, DType::I32));
            flat.reshape(shape)
        };
        let shape = [self.batch, self.heads.kv];
        let each = |of: &dyn Fn(usize) -> usize| ints((0..pairs).map(of).collect(), shape);
        let heads = (0..pairs).flat_map(|pair| {
            let first = pair * BUCKETS * entries;
            [first, entries, pair * self.length, self.length, limit, limit / 2]
        });
        let heads = ints(heads.collect(), [pairs, HEAD_FIELDS]);
        let seeds: Vec<[u32; 2]> = (0..pairs as u32).map(|pair| [1, pair]).collect();
        let hashes = SketchHashes::seeded(&seeds, BUCKETS, device);
        let entry = || self.random(pairs * BUCKETS * entries).cast(DType::F32);
        let [mut sketch_keys, mut sketch_values] = [entry(), entry()];
        let [mut keys, mut values] = [self.random(pairs * held), self.random(pairs * held)];
        let first = self.length - held;
        let positions =
            ints((0..pairs * held).map(|slot| first + slot % held).collect(), [1, pairs * held]);
        let positions = positions.flatten::<1>(0, 1);
        let (slots, tokens) = (pairs * held, pairs * self.length);
        let random = |count: usize| {
            Tensor::<1>::random([count], Distribution::Uniform(1.0, 2.0), (device, DType::F32))
        };
        let scores = random(slots);
        let mut token_scores = Tensor::full([tokens], ABSENT, (device, DType::F32));
        let mut moved = ints(vec![0; 2 * pairs], [pairs, 2]);
        let lengths = each(&|_| held);
        let offsets = each(&|pair| pair * held);
        let newest =
            Tensor::<1, Int>::full([self.batch], self.length as i32 - 1, (device, DType::I32));
        let logits = StepLogits {
            slots: Some(random(slots * group).reshape([slots, group])),
            tokens: random(tokens * group).reshape([tokens, group]),
            log_sum_exp: Tensor::full([self.batch, self.heads.query], 9.0, (device, DType::F32)),
        };
        let options =
            ReviseOptions { slack: SLACK, replace_rate: f32::INFINITY, longest: self.length };
        let mut call = |evicts: bool| -> anyhow::Result<Tensor<1>> {
            // Whatever the call before has changed.
            let mut positions = positions.clone().add_scalar(0);
            let mut scores = scores.clone().mul_scalar(1.0);
            let less = if evicts { 0 } else { -1 };
            let mut ranges =
                SlotRanges { offsets: offsets.clone(), lengths: lengths.clone().add_scalar(less) };
            revise_sketch(
                SketchPool {
                    keys: &mut sketch_keys,
                    values: &mut sketch_values,
                    heads: &heads,
                    most_entries: BUCKETS * entries,
                    hashes: &hashes,
                    signed_keys: true,
                },
                SlotPool {
                    keys: &mut keys,
                    values: &mut values,
                    positions: &mut positions,
                    log_weights: None,
                },
                &mut ranges,
                RevisedScores { slots: &mut scores, tokens: &mut token_scores, moved: &mut moved },
                logits.clone(),
                newest.clone(),
                options,
            )?;
            Ok(scores)
        };
        let with = self.clock.seconds(1, |_| call(true))?;
        let without = self.clock.seconds(1, |_| call(false))?;
        Ok((with - without).max(0.0))
    }
}
