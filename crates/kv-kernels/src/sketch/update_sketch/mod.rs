//! The end of a decode step for exact slots and their sketch (KVReviver, algorithm 3): scores grow
//! by the step's attention, surplus slots go into the sketch, and tokens of the sketch with high
//! scores change places with slots of low scores.
//!
//! On CubeCL devices `kernel.rs` does this with one cube a range. `evict.rs` evicts in bulk, with
//! the victims that `choose.rs` chooses. `search.rs` finds the lowest and the highest scores. Where
//! a range has many tokens, `accumulate.rs` adds probabilities before it, in parts.

#[cfg(feature = "gpu")]
mod accumulate;
mod args;
mod backend;
#[cfg(feature = "gpu")]
mod blueprint;
#[cfg(feature = "gpu")]
mod choose;
#[cfg(feature = "gpu")]
mod evict;
#[cfg(feature = "gpu")]
mod kernel;
#[cfg(feature = "gpu")]
mod kernel_args;
#[cfg(feature = "gpu")]
mod launch;
mod reference;
#[cfg(feature = "gpu")]
mod search;
#[cfg(feature = "gpu")]
mod victims;

use burn::backend::Dispatch;
use burn::tensor::{Int, Tensor};

use super::count_sketch::{HEAD_FIELDS, SketchPool};
use crate::backend::check::Check;
use crate::{KernelError, SlotPool, SlotRanges};
use args::SketchUpdateArgs;
use backend::UpdateSketchOps;

pub use crate::components::sentinels::ABSENT;

const OP: &str = "update_sketch";

/// The scores and counters that an update changes besides slots and sketches.
#[derive(Debug)]
pub struct SketchScores<'a> {
    /// The accumulated attention of every slot's token, `[S]`, f32.
    pub slots: &'a mut Tensor<1>,
    /// The accumulated attention of every token in a sketch, `[T]`, f32; [`ABSENT`] for other
    /// tokens.
    pub tokens: &'a mut Tensor<1>,
    /// How many tokens were evicted into the sketch so far, and how many have changed places with
    /// slots, `[P, 2]`, 32-bit.
    pub moved: &'a mut Tensor<2, Int>,
}

/// A step's logits and log-sum-exps, f32.
#[derive(Debug, Clone)]
pub struct StepLogits {
    /// Logits of slots, `[S, G]`. `None` where they lie in `tokens`, each at its token's row.
    pub slots: Option<Tensor<2>>,
    /// Logits of tokens, `[T, G]`.
    pub tokens: Tensor<2>,
    /// Log-sum-exps, `[B, Hq]`.
    pub log_sum_exp: Tensor<2>,
}

/// How an update moves tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SketchUpdateOptions {
    /// Slots that a range may hold beyond the slots that it keeps exactly, before they are evicted
    /// in bulk.
    pub slack: usize,
    /// A token changes places with the slot of the lowest score if its score is more than
    /// `replace_rate` times that score. At least 1; infinity means never.
    pub replace_rate: f32,
    /// The most tokens that a range has room for.
    pub longest: usize,
}

/// One step of KVReviver's bookkeeping, in place, for every range:
///
/// 1. The step's attention probabilities, summed over the group, are added to the scores. The
///    newest token's score begins with this step.
/// 2. Where the range holds more than `slack` slots beyond those that it keeps, the slots of the
///    lowest scores move into its sketch, except the most recent tokens. The length shrinks.
/// 3. The token of the highest score in the sketch and the slot of the lowest score change places,
///    as long as [`SketchUpdateOptions::replace_rate`] allows it.
///
/// Among equal scores, the first slot and the first token are taken. Where all surplus slots hold
/// most recent tokens, as in a sequence that has ended and stays at its position, the last slots
/// are dropped for good.
///
/// When a token leaves the sketch, its estimate, rounded to the slots' dtype, is taken out of its
/// entries. When it is added again, its estimate is the former one, unless its entries have changed
/// in between.
///
/// # Shapes
/// `newest` `[B]`, 32-bit: the indices of the newest tokens, which are their positions. A slot's
/// position says which token it holds.
///
/// # Errors
/// [`KernelError`] where shapes, dtypes or devices do not fit, for slots with weights and for a
/// replace rate below 1; nothing is changed.
pub fn update_sketch(
    mut sketch: SketchPool<'_>,
    mut pool: SlotPool<'_>,
    ranges: &mut SlotRanges,
    scores: SketchScores<'_>,
    logits: StepLogits,
    newest: Tensor<1, Int>,
    options: SketchUpdateOptions,
) -> Result<(), KernelError> {
    let check = Check::new(OP, sketch.keys);
    let config = sketch.source().check(&check)?;
    let [_, head_dim] = sketch.keys.dims();
    pool.check(&check, head_dim)?;
    if options.replace_rate.is_nan() || options.replace_rate < 1.0 {
        return Err(KernelError::Unsupported {
            op: OP,
            argument: "replace rate",
            actual: options.replace_rate.to_string(),
            supported: "numbers from 1 on",
        });
    }
    if pool.log_weights.is_some() {
        return Err(check.unsupported("slots with weights", 1, "slots of weight 1"));
    }
    let [batch, kv_heads] = ranges.offsets.dims();
    let total_kv_heads = batch * kv_heads;
    check.ranges(ranges, batch, kv_heads)?;
    check.shape("heads", sketch.heads, &[total_kv_heads, HEAD_FIELDS])?;
    check.shape("newest", &newest, &[batch])?;
    check.int("newest", &newest)?;
    let ([slots, _], [tokens]) = (pool.keys.dims(), scores.tokens.dims());
    check.shape("slot scores", &*scores.slots, &[slots])?;
    check.f32("slot scores", &*scores.slots)?;
    check.filled("token scores", &*scores.tokens)?;
    check.f32("token scores", &*scores.tokens)?;
    check.shape("moved", &*scores.moved, &[total_kv_heads, 2])?;
    check.int("moved", &*scores.moved)?;
    let [_, group] = logits.tokens.dims();
    check.filled("token logits", &logits.tokens)?;
    check.shape("token logits", &logits.tokens, &[tokens, group])?;
    check.f32("token logits", &logits.tokens)?;
    if let Some(own) = &logits.slots {
        check.shape("slot logits", own, &[slots, group])?;
        check.f32("slot logits", own)?;
    }
    check.shape("log_sum_exp", &logits.log_sum_exp, &[batch, kv_heads * group])?;
    check.f32("log_sum_exp", &logits.log_sum_exp)?;

    let args = SketchUpdateArgs {
        sketch: sketch.take(&check, config),
        pool: pool.take(&check),
        offsets: ranges.offsets.clone().into_dispatch(),
        lengths: check.take_ints(&mut ranges.lengths).into_dispatch(),
        slot_scores: check.take(scores.slots).into_dispatch(),
        token_scores: check.take(scores.tokens).into_dispatch(),
        moved: check.take_ints(scores.moved).into_dispatch(),
        slot_logits: logits.slots.into(),
        token_logits: logits.tokens.into_dispatch(),
        log_sum_exp: logits.log_sum_exp.into_dispatch(),
        newest: newest.into_dispatch(),
        options,
    };
    let updated = <Dispatch as UpdateSketchOps>::update_sketch(args);
    sketch.put_back([updated.sketch.keys, updated.sketch.values]);
    pool.put_back(updated.pool);
    ranges.lengths = Tensor::from_dispatch(updated.lengths);
    *scores.slots = Tensor::from_dispatch(updated.slot_scores);
    *scores.tokens = Tensor::from_dispatch(updated.token_scores);
    *scores.moved = Tensor::from_dispatch(updated.moved);
    Ok(())
}
