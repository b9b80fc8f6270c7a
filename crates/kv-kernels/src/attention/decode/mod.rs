//! Weighted decode attention over slots: ragged lengths, grouped queries, optional weights, index
//! lists and windows.
//!
//! On CubeCL devices `strategy.rs` chooses a kernel, and `plan.rs` chooses how many cubes share a
//! head (split-KV):
//!
//! - `tensor_core.rs` serves f16 and bf16 on devices with matrix instructions. `mma_fragments.rs`
//!   loads keys and values, `products.rs` multiplies, and `split_kv_reduce.rs` reduces the sums of
//!   a cube's planes and of a cluster's cubes. `blueprint.rs` is its comptime configuration.
//! - `plain.rs` serves everything else, with the softmax of `subgroup_softmax.rs`.
//!
//! The kernels' arguments are in `kernel_args.rs`. `combine.rs` combines the parts of a head that
//! no cluster has reduced, and `normalise.rs` turns logits into probabilities. `slot_indexer.rs`
//! finds the slots that a query attends to. For evictions, `argmin_importance.rs` finds the slot
//! that adds least to a head's output, and `together.rs` finds one slot for all heads of a
//! sequence.
//!
//! On CPUs `vectorised.rs` attends, by vector instructions and on all cores.

#[cfg(feature = "gpu")]
pub(crate) mod argmin_importance;
pub(crate) mod args;
pub(crate) mod backend;
#[cfg(feature = "gpu")]
pub(crate) mod blueprint;
#[cfg(feature = "gpu")]
mod combine;
#[cfg(feature = "gpu")]
pub(crate) mod eviction;
#[cfg(feature = "gpu")]
pub(crate) mod importance_records;
pub(crate) mod index_sets;
#[cfg(feature = "gpu")]
pub(crate) mod kernel_args;
#[cfg(feature = "gpu")]
pub(crate) mod launch;
#[cfg(feature = "gpu")]
pub(crate) mod mma_fragments;
#[cfg(feature = "gpu")]
mod normalise;
mod options;
#[cfg(feature = "gpu")]
mod plain;
#[cfg(feature = "gpu")]
pub(crate) mod plan;
#[cfg(feature = "flex")]
pub(crate) mod problem;
#[cfg(feature = "gpu")]
pub(crate) mod products;
#[cfg(feature = "gpu")]
pub(crate) mod range_part;
#[cfg(feature = "gpu")]
pub(crate) mod slot_indexer;
#[cfg(feature = "gpu")]
pub(crate) mod split_kv_reduce;
pub(crate) mod strategy;
#[cfg(feature = "gpu")]
pub(crate) mod subgroup_softmax;
#[cfg(feature = "gpu")]
pub(crate) mod tensor_core;
#[cfg(feature = "gpu")]
pub(crate) mod together;
#[cfg(feature = "flex")]
mod vectorised;

use burn::backend::Dispatch;
use burn::tensor::Tensor;

use crate::backend::check::Check;
use crate::{KernelError, SlotRanges};
use args::DecodeArgs;
use backend::DecodeAttentionOps;
use strategy::DecodeShape;

pub use options::{AttentionOutput, DecodeAttentionOptions, SlotView};
pub(crate) use options::{DecodeConfig, Features, ViewKind};
pub use strategy::DecodeStrategy;

const OP: &str = "decode_attention";

/// The largest number of query heads that may share a key-value head where an op attends.
pub(crate) const ATTENDING: GroupLimit = GroupLimit { count: 8, said: "1 to 8" };

/// The most query heads of a key-value head that an op takes, and how its errors say so.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GroupLimit {
    pub(crate) count: usize,
    pub(crate) said: &'static str,
}

/// The largest head dim.
const MAX_HEAD_DIM: usize = 256;

/// Attention of one query per sequence over its slots,
/// `o = sum_i a_i exp(s_i) v_i / sum_i w_i exp(s_i)` with `s_i = scale * q . k_i`, where `a = w`
/// unless `options` says otherwise.
///
/// Every exponential is taken after the maximum is subtracted, and sums are kept in f32 whatever
/// the storage dtype. A range of length 0, or whose weights are all 0, gives an output of zeros and
/// a log-sum-exp of −∞.
///
/// # Shapes
/// - `query`: `[B, Hq, D]`, `keys` and `values`: `[S, D]`, all of one dtype (f32, f16 or bf16)
/// - `log_weights`: `[S]`, f32, `ln w_i` (−∞ for a weight of 0); `None` means all weights are 1
/// - `ranges`: `[B, Hkv]`, with `Hq` a multiple `G <= 8` of `Hkv`; slots of different ranges may
///   overlap, as sequences may share a prefix. Where logits or probabilities are wanted, each slot
///   has one row of results: ranges must not overlap then, and no list may name a slot twice
///
/// # Errors
/// [`KernelError`] for shapes, dtypes, devices or sizes that do not fit; `D` must be a multiple of
/// 4 of at most 256. The numbers in ranges and views are on the device and are not checked, since
/// the op does not wait for the device: a range must end within the pool
/// ([`SlotRanges::validate`]), and listed slots outside the pool count as absent
/// ([`SlotView::validate`]). [`KernelError::Unavailable`] for a forced strategy that cannot run the
/// call.
pub fn decode_attention(
    query: Tensor<3>,
    keys: Tensor<2>,
    values: Tensor<2>,
    log_weights: Option<Tensor<1>>,
    ranges: &SlotRanges,
    options: DecodeAttentionOptions,
) -> Result<AttentionOutput, KernelError> {
    let [batch, _, head_dim] = query.dims();
    let [slots, _] = keys.dims();
    let [_, kv_heads] = ranges.offsets.dims();
    let check = Check::new(OP, &query);
    let pools = [&keys, &values];
    self::check(&check, OP, &query, pools, log_weights.as_ref(), ranges, ATTENDING)?;
    if let Some(numerators) = &options.numerator_weights {
        check.shape("numerator_weights", numerators, &[slots])?;
        check.f32("numerator_weights", numerators)?;
    }
    if options.probabilities && options.logits {
        let supported = "probabilities or logits, not both";
        return Err(unsupported(OP, "scores", 2, supported));
    }
    let view = options.view.check(&check, batch, kv_heads)?;

    let config = DecodeConfig {
        scale: options.scale.unwrap_or_else(|| 1.0 / (head_dim as f32).sqrt()),
        features: Features {
            weighted: log_weights.is_some(),
            numerators: options.numerator_weights.is_some(),
            log_sum_exp: options.log_sum_exp || options.probabilities,
            scores: options.probabilities || options.logits,
            view: view.kind,
        },
        longest: options.longest.unwrap_or(slots).min(slots).min(view.longest),
        sinks: view.sinks,
        raw: options.logits,
        strategy: options.strategy,
    };
    let shape = DecodeShape {
        head_dim,
        total_kv_heads: batch * kv_heads,
        longest: config.longest,
        listed: matches!(view.kind, ViewKind::List | ViewKind::Sets),
        weighted: config.features.weighted,
    };
    check.strategy(options.strategy, query.dtype(), &shape)?;
    let lengths = view.lengths.unwrap_or_else(|| ranges.lengths.clone());
    let attended = <Dispatch as DecodeAttentionOps>::decode_attention(DecodeArgs {
        query: query.into_dispatch(),
        keys: keys.into_dispatch(),
        values: values.into_dispatch(),
        log_weights: log_weights.into(),
        numerators: options.numerator_weights.into(),
        offsets: ranges.offsets.clone().into_dispatch(),
        lengths: lengths.into_dispatch(),
        view: view.slots.into(),
        config,
    });
    let scores = || Tensor::from_dispatch(attended.scores.clone());
    Ok(AttentionOutput {
        probabilities: options.probabilities.then(scores),
        logits: options.logits.then(scores),
        output: Tensor::from_dispatch(attended.output),
        log_sum_exp: options.log_sum_exp.then(|| Tensor::from_dispatch(attended.log_sum_exp)),
    })
}

/// Checks the arguments that all ops of attention over slots share.
pub(crate) fn check(
    check: &Check,
    op: &'static str,
    query: &Tensor<3>,
    [keys, values]: [&Tensor<2>; 2],
    log_weights: Option<&Tensor<1>>,
    ranges: &SlotRanges,
    most: GroupLimit,
) -> Result<(), KernelError> {
    let [batch, query_heads, head_dim] = query.dims();
    let [slots, _] = keys.dims();
    let [_, kv_heads] = ranges.offsets.dims();
    check.supported()?;
    check.float("query", query)?;
    for (argument, tensor) in [("keys", keys), ("values", values)] {
        check.shape(argument, tensor, &[slots, head_dim])?;
        check.same_dtype(argument, tensor, "the query's dtype", query.dtype())?;
    }
    check.ranges(ranges, batch, kv_heads)?;
    if kv_heads == 0 || query_heads % kv_heads != 0 {
        return Err(KernelError::HeadGroups { op, query_heads, kv_heads });
    }
    let group = query_heads / kv_heads;
    if group == 0 || group > most.count {
        return Err(unsupported(op, "query heads per key-value head", group, most.said));
    }
    if head_dim == 0 || head_dim > MAX_HEAD_DIM || !head_dim.is_multiple_of(4) {
        return Err(unsupported(op, "head dim", head_dim, "multiples of 4 up to 256"));
    }
    if batch == 0 || slots == 0 {
        return Err(unsupported(op, "batch x slots", batch * slots, "at least 1"));
    }
    if let Some(weights) = log_weights {
        check.shape("log_weights", weights, &[slots])?;
        check.f32("log_weights", weights)?;
    }
    Ok(())
}

fn unsupported(
    op: &'static str,
    argument: &'static str,
    actual: usize,
    supported: &'static str,
) -> KernelError {
    KernelError::Unsupported { op, argument, actual: actual.to_string(), supported }
}
