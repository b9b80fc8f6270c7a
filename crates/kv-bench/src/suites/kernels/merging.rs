//! The kernels of a decode step of KeepKV behind its attention.

use burn::tensor::{DType, Distribution, Int, Tensor};
use kv_kernels::{
    AverageWeights, KeyRule, MergeOptions, MergingSlots, NearestOptions, SlotRanges, StepScores,
    merge_nearest,
};

use super::KernelBench;
use super::cases::Attention;
use super::clock::Clock;

/// KeepKV's own: the share of averages that a step's scores do not change, and a guard.
const ALPHA: f32 = 0.9;
const GUARD: f32 = 8.0;

/// Times the search for the slot that is most like a victim, among all slots of its head, and the
/// merge into this slot. Later calls of a set merge into slots that earlier calls have changed:
/// other numbers, and as much work.
pub(super) fn nearest(bench: &mut KernelBench<'_>, case: &Attention) -> anyhow::Result<()> {
    let (device, dtype) = (bench.device.clone(), bench.dtype);
    let slots = case.pairs() * case.tokens;
    let group = case.query_heads / case.kv_heads;
    let bytes = slots * case.head_dim * dtype.size();
    let sets = Clock::sets(bytes);
    let normal = || Distribution::Normal(0.0, 1.0);
    let rows = || {
        let flat = Tensor::<1>::random([slots * case.head_dim], normal(), (&device, DType::F32));
        flat.cast(dtype).reshape([slots, case.head_dim])
    };
    let numbers = |with: f32| Tensor::<1>::full([slots], with, (&device, DType::F32));
    let mut pools: Vec<_> = (0..sets).map(|_| (rows(), rows())).collect();
    let [mut log_weights, mut log_scores, mut log_samples] = [0.0; 3].map(numbers);
    let [mut votes, mut votes_high] = [1.0, 0.0].map(numbers);
    let ints = |value: &dyn Fn(usize) -> usize| {
        let values: Vec<i32> = (0..case.pairs()).map(|pair| value(pair) as i32).collect();
        let flat = Tensor::<1, Int>::from_data(values.as_slice(), (&device, DType::I32));
        flat.reshape([case.batch, case.kv_heads])
    };
    let ranges =
        SlotRanges { offsets: ints(&|pair| pair * case.tokens), lengths: ints(&|_| case.tokens) };
    let victims = ints(&|pair| pair * case.tokens + pair * 7 % case.tokens);
    let goes = ints(&|_| 1);
    let queries = Tensor::<3>::random(
        [case.batch, case.query_heads, case.head_dim],
        normal(),
        (&device, DType::F32),
    );
    let logits = Tensor::random([slots, group], normal(), (&device, DType::F32));
    let options = NearestOptions {
        // All have a slot to merge into.
        threshold: 0.0,
        epsilon: 1e-6,
        queries: Some(queries.cast(dtype)),
        average: Some(StepScores {
            logits,
            weights: AverageWeights { new: (1.0 - ALPHA).ln(), old: ALPHA.ln() },
        }),
        takes: None,
        merge: MergeOptions { rule: KeyRule::Paper, guard: GUARD, scale: None, queries: None },
    };
    let task = format!("merge_nearest {}", case.name());
    // The search reads every key.
    let work = [bytes as f64, 2.0 * 2.0 * (slots * case.head_dim) as f64];
    bench.measure(&task, "", sets, work, |i| {
        let (keys, values) = &mut pools[i];
        let slots = MergingSlots {
            keys,
            values,
            log_weights: &mut log_weights,
            log_scores: &mut log_scores,
            log_samples: &mut log_samples,
            votes: &mut votes,
            votes_high: &mut votes_high,
            inherited: None,
        };
        merge_nearest(slots, &ranges, &victims, &goes, &options)?;
        Ok(pools[i].0.clone())
    })
}
