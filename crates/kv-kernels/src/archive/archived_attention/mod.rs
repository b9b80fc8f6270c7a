//! Attention of a decode step to archived slots, continued from the attention over other slots
//! ([`crate::attention::continued`]).
//!
//! A few slots of each range come back from host memory exactly: the ones of the highest scores
//! ([`super::signature_scores`]). The others stand as one slot a block, of the means of the block's
//! keys and values. Where `c` of a block's 64 slots have come back, its mean counts `64 − c` times:
//! its logit is `scale q · k̄ + ln(64 − c)`. The means are over all slots of the block, whichever
//! have come back.

mod args;
mod backend;
#[cfg(feature = "gpu")]
mod kernel;
#[cfg(feature = "gpu")]
mod launch;
pub(crate) mod reference;

use burn::backend::Dispatch;
use burn::tensor::Tensor;

use super::layout::BLOCK;
use super::pool::ArchivePool;
use super::signature_scores::{
    SignatureScoresOptions, SignatureStrategy, check_call, signature_scores,
};
use crate::attention::continued::AttendedSlots;
use crate::backend::check::Check;
use crate::{Choice, KernelError, SlotRanges, top_slots};
use args::ArchivedAttentionArgs;
use backend::ArchivedAttentionOps;

const OP: &str = "archived_attention";

/// How [`archived_attention`] attends.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ArchivedAttentionOptions {
    /// The factor of logits; `None` means `1 / sqrt(D)`.
    pub scale: Option<f32>,
    /// The most slots that a range may have.
    pub longest: usize,
    /// The number of slots of each range that come back exactly; 0 for none, as of a pool that sums
    /// up.
    pub revived: usize,
}

/// Attends to archived slots, beside the slots that were attended to before. Returns the output and
/// the log-sum-exp over both.
///
/// # Shapes
/// - `query`: `[B, Hq, D]`, of the pool's dtype
/// - `ranges`: offsets and lengths `[B, Hkv]`, 32-bit, in archived slots, multiples of
///   [`ArchivePool::BLOCK`]. They are on the device and are not checked.
///
/// # Errors
/// [`KernelError`] where shapes, dtypes or devices do not fit.
pub fn archived_attention(
    query: Tensor<3>,
    pool: &ArchivePool,
    ranges: &SlotRanges,
    attended: AttendedSlots,
    options: ArchivedAttentionOptions,
) -> Result<AttendedSlots, KernelError> {
    let check = Check::new(OP, &query);
    check_call(&check, &query, pool, ranges, &attended.log_sum_exp)?;
    attended.check(&check, query.dims(), query.dtype())?;
    let [_, _, head_dim] = query.dims();
    let ArchivedAttentionOptions { scale, longest, revived } = options;
    if longest == 0 {
        return Err(check.unsupported("longest", longest, "at least 1 slot"));
    }
    let longest = longest.min(pool.slots()).next_multiple_of(BLOCK);
    let chosen = match revived.min(longest) {
        0 => None,
        revived => {
            let sums = &attended.log_sum_exp;
            let options = SignatureScoresOptions {
                scale,
                longest,
                wanted: revived,
                strategy: SignatureStrategy::Auto,
            };
            let scored = signature_scores(&query, pool, ranges, sums, options)?;
            let choice = Choice::Top(scored.wanted);
            Some(top_slots(scored.scores, Some(scored.candidates), choice, revived)?)
        }
    };
    let (chosen, counts) = chosen.map(|chosen| (chosen.indices, chosen.counts)).unzip();
    let (output, log_sum_exp) =
        <Dispatch as ArchivedAttentionOps>::archived_attention(ArchivedAttentionArgs {
            query: query.into_dispatch(),
            pool: pool.to_tensors(),
            offsets: ranges.offsets.clone().into_dispatch(),
            lengths: ranges.lengths.clone().into_dispatch(),
            chosen: chosen.into(),
            counts: counts.into(),
            output: attended.output.into_dispatch(),
            log_sum_exp: attended.log_sum_exp.into_dispatch(),
            scale: scale.unwrap_or_else(|| 1.0 / (head_dim as f32).sqrt()),
            longest,
        });
    Ok(AttendedSlots {
        output: Tensor::from_dispatch(output),
        log_sum_exp: Tensor::from_dispatch(log_sum_exp),
    })
}
