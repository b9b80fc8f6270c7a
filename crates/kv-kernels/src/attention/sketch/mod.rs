//! Attention over exact slots and over tokens in a count-sketch. Sketched tokens are estimated on
//! the fly, so that KVReviver's rebuilt cache is never written.
//!
//! One kernel reads a range's slots, then the tokens in its sketch. For each token it gathers one
//! entry of every bucket, takes the median, and goes on with the online softmax of the slots. A
//! range's whole sketch lies in shared memory, where that has room, in the cache's dtype. For an
//! odd number of buckets, rounding before the median gives the number that rounding after it gives;
//! for an even number, the mean of the middle two is rounded twice. `tensor_core.rs` (with
//! `staging.rs` and `entries.rs`) is this kernel for matrix instructions, `plain.rs` is it for
//! other devices, and `strategy.rs` chooses.

mod args;
mod backend;
#[cfg(feature = "gpu")]
mod blueprint;
#[cfg(feature = "gpu")]
mod entries;
#[cfg(feature = "gpu")]
mod kernel_args;
#[cfg(feature = "gpu")]
mod launch;
#[cfg(feature = "gpu")]
mod plain;
#[cfg(feature = "gpu")]
mod plan;
mod reference;
mod shape;
#[cfg(feature = "gpu")]
mod staging;
mod strategy;
#[cfg(feature = "gpu")]
mod tensor_core;

use burn::backend::Dispatch;
use burn::tensor::{Int, Tensor};

use super::decode::{ATTENDING, check as check_attention};
use crate::backend::check::Check;
use crate::sketch::count_sketch::{HEAD_FIELDS, SketchConfig, SketchSource};
use crate::{KernelError, SlotRanges};
use args::SketchAttentionArgs;
use backend::SketchAttentionOps;
use shape::SketchShape;

pub use strategy::SketchStrategy;

const OP: &str = "sketch_attention";

/// The sketched tokens to attend to besides the slots.
#[derive(Debug, Clone, Copy)]
pub struct SketchedTokens<'a> {
    /// The sketches of `B * Hkv` ranges.
    pub sketch: SketchSource<'a>,
    /// A score for every token that the ranges have room for, `[T]` over all ranges, f32: 0 or more
    /// for tokens in the sketch, negative for all others.
    pub scores: &'a Tensor<1>,
    /// The index of each sequence's newest token, `[B]`, 32-bit. Later tokens are ignored.
    pub newest: &'a Tensor<1, Int>,
    /// The most tokens that any range has room for.
    pub longest: usize,
    /// The kernel to run.
    pub strategy: SketchStrategy,
}

/// The results of attention over slots and sketched tokens.
#[derive(Debug, Clone)]
pub struct SketchAttention {
    /// The attention output, `[B, Hq, D]`, in the query's dtype.
    pub output: Tensor<3>,
    /// The log-sum-exp of each query, `[B, Hq]`, f32; −∞ where a query attends to nothing.
    pub log_sum_exp: Tensor<2>,
    /// The logits of live slots, `[S, G]`, f32; the rows of other slots hold garbage.
    pub slot_logits: Tensor<2>,
    /// The logits of tokens in a sketch, `[T, G]`, f32; the rows of other tokens hold garbage.
    pub token_logits: Tensor<2>,
}

/// Attention of one query per sequence over its slots and over the tokens in its sketches, with the
/// logit scale `1 / sqrt(D)`. Estimated keys and values are rounded to the cache's dtype, as if
/// they had been stored in it.
///
/// # Shapes
/// `query` `[B, Hq, D]`; `keys` and `values` `[S, D]`, all of one dtype; `ranges` `[B, Hkv]`, of at
/// most `longest` slots each.
///
/// # Errors
/// [`KernelError`] where shapes, dtypes or devices do not fit, and for a forced strategy that
/// cannot run the call.
pub fn sketch_attention(
    query: Tensor<3>,
    [keys, values]: [Tensor<2>; 2],
    ranges: &SlotRanges,
    longest: usize,
    tokens: SketchedTokens<'_>,
) -> Result<SketchAttention, KernelError> {
    let [batch, query_heads, head_dim] = query.dims();
    let check = Check::new(OP, &query);
    check_attention(&check, OP, &query, [&keys, &values], None, ranges, ATTENDING)?;
    let [_, kv_heads] = ranges.offsets.dims();
    let config = tokens.check(&check, batch, kv_heads, head_dim)?;
    let shape = SketchShape {
        head_dim,
        size: query.dtype().size(),
        total_kv_heads: batch * kv_heads,
        group: query_heads / kv_heads,
        entries: tokens.sketch.most_entries,
        buckets: config.buckets,
        longest: longest + tokens.longest,
    };
    check.strategy(tokens.strategy, query.dtype(), &shape)?;
    let scale = 1.0 / (head_dim as f32).sqrt();
    let attended = <Dispatch as SketchAttentionOps>::sketch_attention(SketchAttentionArgs {
        query: query.into_dispatch(),
        keys: keys.into_dispatch(),
        values: values.into_dispatch(),
        offsets: ranges.offsets.clone().into_dispatch(),
        lengths: ranges.lengths.clone().into_dispatch(),
        sketch: tokens.sketch.tensors(config),
        scores: tokens.scores.clone().into_dispatch(),
        newest: tokens.newest.clone().into_dispatch(),
        scale,
        longest,
        longest_tokens: tokens.longest,
        strategy: tokens.strategy,
    });
    let log_sum_exp = Tensor::<2>::from_dispatch(attended.log_sum_exp);
    debug_assert_eq!(log_sum_exp.dims(), [batch, query_heads]);
    Ok(SketchAttention {
        output: Tensor::from_dispatch(attended.output),
        log_sum_exp,
        slot_logits: Tensor::from_dispatch(attended.slot_logits),
        token_logits: Tensor::from_dispatch(attended.token_logits),
    })
}

impl SketchedTokens<'_> {
    pub(crate) fn check(
        &self,
        check: &Check,
        batch: usize,
        kv_heads: usize,
        head_dim: usize,
    ) -> Result<SketchConfig, KernelError> {
        let config = self.sketch.check(check)?;
        let [entries, _] = self.sketch.keys.dims();
        check.shape("sketch keys", self.sketch.keys, &[entries, head_dim])?;
        check.shape("heads", self.sketch.heads, &[batch * kv_heads, HEAD_FIELDS])?;
        check.filled("scores", self.scores)?;
        check.f32("scores", self.scores)?;
        check.shape("scores", self.scores, &self.scores.dims())?;
        check.shape("newest", self.newest, &[batch])?;
        check.int("newest", self.newest)?;
        Ok(config)
    }
}
