//! What a decode step changes in an exact part and a sketch: scores grow, surplus slots go into the
//! sketch, and tokens of the sketch that matter more than slots change places with them (KVReviver,
//! algorithm 3).
//!
//! On CubeCL devices `kernel.rs` has a cube a range, which adds the step's probabilities to all
//! scores and moves tokens: in bulk by `evict.rs`, whose victims `choose.rs` finds, and back by
//! itself. `search.rs` looks for the lowest and the highest scores. Where a range has many tokens,
//! `accumulate.rs` adds before it, in parts.

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

/// What an update changes besides slots and sketches.
#[derive(Debug)]
pub struct SketchScores<'a> {
    /// What every slot's token has accumulated, `[S]`, f32.
    pub slots: &'a mut Tensor<1>,
    /// What every token in a sketch has accumulated, `[T]`, f32; [`ABSENT`] for other tokens.
    pub tokens: &'a mut Tensor<1>,
    /// Tokens that went into the sketch for good and those that changed places with slots, so far,
    /// `[P, 2]`, 32-bit.
    pub moved: &'a mut Tensor<2, Int>,
}

/// A step's logits, f32.
#[derive(Debug, Clone)]
pub struct StepLogits {
    /// `[S, G]`; `None` where those of slots stand among the tokens', each at its token's.
    pub slots: Option<Tensor<2>>,
    /// `[T, G]`
    pub tokens: Tensor<2>,
    /// `[B, Hq]`
    pub log_sum_exp: Tensor<2>,
}

/// How an update moves tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SketchUpdateOptions {
    /// Slots that a range may hold beyond what it keeps exactly, before they go in bulk.
    pub slack: usize,
    /// A token changes places with the slot of the lowest score if its own is higher than this many
    /// times that: at least 1, infinity for never.
    pub replace_rate: f32,
    /// The most tokens that any range has room for.
    pub longest: usize,
}

/// One step of KVReviver's bookkeeping, in place, for every range:
///
/// 1. The step's attention probabilities, summed over the group, are added to the scores. The
///    newest token's score begins with this step.
/// 2. Where the range holds more than `slack` slots beyond the slots that it keeps, the slots of
///    the lowest scores move into its sketch, but for the most recent tokens. The length shrinks.
/// 3. The token of the highest score in the sketch and the slot of the lowest score change places,
///    as long as [`SketchUpdateOptions::replace_rate`] allows.
///
/// Among equal scores, the first slot and the first token go. Where all surplus slots are of the
/// most recent tokens, as of a sequence that has ended and stays at its position, the last of them
/// are dropped for good.
///
/// A token that leaves the sketch takes its estimate, rounded to the slots' dtype, out of its
/// entries. When it goes in again, its estimate is the former one, unless its entries have changed
/// in between.
///
/// # Shapes
/// `newest` `[B]`, 32-bit: the indices of the newest tokens, which are their positions. Slots are
/// of the tokens that their positions say.
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

    let by_token = logits.slots.is_none();
    let args = SketchUpdateArgs {
        sketch: sketch.take(&check, config),
        pool: pool.take(&check),
        offsets: ranges.offsets.clone().into_dispatch(),
        lengths: check.take_ints(&mut ranges.lengths).into_dispatch(),
        slot_scores: check.take(scores.slots).into_dispatch(),
        token_scores: check.take(scores.tokens).into_dispatch(),
        moved: check.take_ints(scores.moved).into_dispatch(),
        slot_logits: logits.slots.unwrap_or_else(|| logits.tokens.clone()).into_dispatch(),
        token_logits: logits.tokens.into_dispatch(),
        log_sum_exp: logits.log_sum_exp.into_dispatch(),
        newest: newest.into_dispatch(),
        by_token,
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
