//! Merges one slot of every (sequence, key-value head) into the slot whose key is most alike, with
//! the weights, scores and votes of both. A decode step's eviction merges so, where it would
//! otherwise drop the slot. In the same launch, the step's scores can be added to the slots'
//! averages first.

#[cfg(feature = "gpu")]
mod alike;
mod args;
mod backend;
#[cfg(feature = "gpu")]
mod blueprint;
#[cfg(feature = "gpu")]
mod kernel;
#[cfg(feature = "gpu")]
mod launch;
mod reference;

use burn::backend::Dispatch;
use burn::tensor::{Int, Tensor};

use super::merge_slots::MergeConfig;
use crate::backend::check::Check;
use crate::components::sentinels::LOG_OF_ZERO;
use crate::slots::average_scores::AverageWeights;
use crate::{KernelError, MergeOptions, SlotRanges};
use args::{MergingPools, StepMerges};
use backend::MergeNearestOps;

const OP: &str = "merge_nearest";

/// A cache's slots, and the numbers of each slot that merges need: `[S]`, f32, and keys and values
/// `[S, D]`. All are written in place.
#[derive(Debug)]
pub struct MergingSlots<'a> {
    /// Keys.
    pub keys: &'a mut Tensor<2>,
    /// Values.
    pub values: &'a mut Tensor<2>,
    /// `ln p`, the logarithm of each slot's weight.
    pub log_weights: &'a mut Tensor<1>,
    /// `ln S`, the logarithm of each slot's sum of scores. Its mean is `S` divided by the number in
    /// `samples`.
    pub log_scores: &'a mut Tensor<1>,
    /// The logarithm of the divisor of `S`.
    pub log_samples: &'a mut Tensor<1>,
    /// Tokens that each slot stands for, modulo 4,096.
    pub votes: &'a mut Tensor<1>,
    /// Tokens that each slot stands for, in multiples of 4,096.
    pub votes_high: &'a mut Tensor<1>,
    /// A number of each slot that a merged slot has the sum of, where there is one.
    pub inherited: Option<&'a mut Tensor<1>>,
}

/// How [`merge_nearest`] merges.
#[derive(Debug, Clone, Default)]
pub struct NearestOptions {
    /// The cosine that a merge must exceed.
    pub threshold: f32,
    /// The number that is added to scores.
    pub epsilon: f64,
    /// The step's queries, `[B, Hq, D]`, of the keys' dtype. Their mean over each group is the
    /// query of [`MergeOptions::queries`].
    pub queries: Option<Tensor<3>>,
    /// A step's scores, which are added to the averages of all live slots first.
    pub average: Option<StepScores>,
    /// Which merges each slot takes, `[S]`, f32: [`crate::TAKES_SIMILAR`], [`crate::TAKES_NONE`] or
    /// [`crate::TAKES_ANY`]. Without it all slots take similar victims.
    pub takes: Option<Tensor<1>>,
    /// The other options of a merge; its own `queries` are ignored.
    pub merge: MergeOptions,
}

/// The arguments of [`crate::average_scores`] besides the slots.
#[derive(Debug, Clone)]
pub struct StepScores {
    /// Logits, `[S, G]`, f32, which include the slots' log-weights.
    pub logits: Tensor<2>,
    /// The factors of the new scores and of the averages so far.
    pub weights: AverageWeights,
}

/// Merges one victim of every range into the slot with the highest cosine (the first among equals),
/// if that exceeds the threshold. With [`NearestOptions::takes`] the slot is chosen among those
/// that take similar victims; where none of them is similar enough, the first slot of the range
/// that takes any victim takes it. Key and value are merged as in [`crate::merge_slots`]; votes,
/// weights and inherited numbers are added up. The victim's slot stays in place, for the caller to
/// drop. Where the options have a step's scores, the averages of all live slots take them in first,
/// even in ranges without a merge.
///
/// # Shapes
/// `victims` `[B, Hkv]`, slots counted in the pool, 32-bit; `goes` `[B, Hkv]`, 32-bit, 0 for ranges
/// without a merge. Their contents are on the device and are not checked.
///
/// # Errors
/// [`KernelError`] where shapes, dtypes or devices do not fit; nothing is changed.
pub fn merge_nearest(
    slots: MergingSlots<'_>,
    ranges: &SlotRanges,
    victims: &Tensor<2, Int>,
    goes: &Tensor<2, Int>,
    options: &NearestOptions,
) -> Result<(), KernelError> {
    let MergingSlots {
        keys,
        values,
        log_weights,
        log_scores,
        log_samples,
        votes,
        votes_high,
        mut inherited,
    } = slots;
    let check = Check::new(OP, keys);
    check.supported()?;
    check.float("keys", keys)?;
    check.filled("keys", keys)?;
    check.counted("keys", keys)?;
    let ([count, head_dim], [batch, kv_heads]) = (keys.dims(), victims.dims());
    check.shape("values", values, &[count, head_dim])?;
    check.same_dtype("values", values, "the keys' dtype", keys.dtype())?;
    for (argument, tensor) in [
        ("log_weights", &*log_weights),
        ("log_scores", &*log_scores),
        ("log_samples", &*log_samples),
        ("votes", &*votes),
        ("votes_high", &*votes_high),
    ] {
        check.shape(argument, tensor, &[count])?;
        check.f32(argument, tensor)?;
    }
    for (argument, tensor) in
        [("inherited", inherited.as_deref()), ("takes", options.takes.as_ref())]
    {
        if let Some(tensor) = tensor {
            check.shape(argument, tensor, &[count])?;
            check.f32(argument, tensor)?;
        }
    }
    check.ranges(ranges, batch, kv_heads)?;
    for (argument, tensor) in [("victims", victims), ("goes", goes)] {
        check.shape(argument, tensor, &[batch, kv_heads])?;
        check.int(argument, tensor)?;
    }
    let merge = MergeOptions { queries: None, ..options.merge.clone() };
    let mut config = merge.config(OP, &check, batch * kv_heads, head_dim, true)?;
    if let Some(queries) = &options.queries {
        let [_, heads, _] = queries.dims();
        if heads % kv_heads.max(1) != 0 {
            return Err(KernelError::HeadGroups { op: OP, query_heads: heads, kv_heads });
        }
        check.shape("queries", queries, &[batch, heads, head_dim])?;
        check.filled("queries", queries)?;
        check.same_dtype("queries", queries, "the keys' dtype", keys.dtype())?;
        config.queried = true;
    }
    if let Some(StepScores { logits, .. }) = &options.average {
        let [_, group] = logits.dims();
        check.shape("logits", logits, &[count, group])?;
        check.filled("logits", logits)?;
        check.f32("logits", logits)?;
    }
    let merged = <Dispatch as MergeNearestOps>::merge_nearest(
        MergingPools {
            keys: check.take(keys).into_dispatch(),
            values: check.take(values).into_dispatch(),
            log_weights: check.take(log_weights).into_dispatch(),
            log_scores: check.take(log_scores).into_dispatch(),
            log_samples: check.take(log_samples).into_dispatch(),
            votes: check.take(votes).into_dispatch(),
            votes_high: check.take(votes_high).into_dispatch(),
            inherited: inherited.as_deref_mut().map(|numbers| check.take(numbers)).into(),
        },
        StepMerges {
            offsets: ranges.offsets.clone().into_dispatch(),
            lengths: ranges.lengths.clone().into_dispatch(),
            victims: victims.clone().into_dispatch(),
            goes: goes.clone().into_dispatch(),
            queries: options.queries.clone().into(),
            logits: options.average.as_ref().map(|scores| scores.logits.clone()).into(),
            takes: options.takes.clone().into(),
        },
        NearestConfig {
            merge: config,
            average: options.average.as_ref().map(|scores| scores.weights),
            threshold: options.threshold,
            // A finite stand-in for the logarithm of 0.
            log_epsilon: (options.epsilon.ln() as f32).max(LOG_OF_ZERO),
        },
    );
    *keys = Tensor::from_dispatch(merged.keys);
    *values = Tensor::from_dispatch(merged.values);
    *log_weights = Tensor::from_dispatch(merged.log_weights);
    *log_scores = Tensor::from_dispatch(merged.log_scores);
    *log_samples = Tensor::from_dispatch(merged.log_samples);
    *votes = Tensor::from_dispatch(merged.votes);
    *votes_high = Tensor::from_dispatch(merged.votes_high);
    if let (Some(inherited), Some(sums)) = (inherited, merged.inherited.into_option()) {
        *inherited = Tensor::from_dispatch(sums);
    }
    Ok(())
}

/// Scalars and comptime configuration of a call, as backends receive them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct NearestConfig {
    pub(crate) merge: MergeConfig,
    pub(crate) threshold: f32,
    pub(crate) log_epsilon: f32,
    /// The factors of averages, where a step's scores are added first.
    pub(crate) average: Option<AverageWeights>,
}
