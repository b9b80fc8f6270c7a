//! The slot of the lowest score in every (sequence, key-value head): the slot that an eviction of
//! one token a step removes.

mod args;
mod backend;
#[cfg(feature = "gpu")]
mod kernel;
#[cfg(feature = "gpu")]
mod launch;
mod reference;

use burn::backend::Dispatch;
use burn::tensor::{Int, Tensor};

use crate::backend::check::Check;
use crate::{KernelError, SlotRanges};
use args::ArgminSlotsArgs;
use backend::ArgminSlotsOps;

const OP: &str = "argmin_slots";

/// Slots that are chosen only if no other slot is left, by their logical positions.
#[derive(Debug, Clone, Copy)]
pub struct Protected<'a> {
    /// Logical positions, `[S]`, 32-bit.
    pub positions: &'a Tensor<1, Int>,
    /// Each sequence's newest position, `[B]`, 32-bit.
    pub newest: &'a Tensor<1, Int>,
    /// Tokens at positions below this one are protected.
    pub sinks: i32,
    /// The last `recents` positions are protected.
    pub recents: i32,
}

/// The slot with the lowest score in each range: the lowest slot among equals, and
/// [`crate::NO_SLOT`] for an empty range. A slot with a score of +∞ is chosen only if no finite
/// score is left. A slot that `protected` names is chosen only if no other slot is left.
///
/// # Shapes
/// `scores` `[S]`, f32; `ranges` `[B, Hkv]`. Returns slots of the pool, `[B, Hkv]`.
///
/// # Errors
/// [`KernelError`] where shapes, dtypes or devices do not fit.
pub fn argmin_slots(
    scores: Tensor<1>,
    ranges: &SlotRanges,
    protected: Option<Protected<'_>>,
) -> Result<Tensor<2, Int>, KernelError> {
    let check = Check::new(OP, &scores);
    check.supported()?;
    check.f32("scores", &scores)?;
    let [batch, kv_heads] = ranges.offsets.dims();
    check.ranges(ranges, batch, kv_heads)?;
    if let Some(protected) = &protected {
        check.shape("positions", protected.positions, &scores.dims())?;
        check.int("positions", protected.positions)?;
        check.shape("newest", protected.newest, &[batch])?;
        check.int("newest", protected.newest)?;
    }
    let protection =
        protected.map(|Protected { sinks, recents, .. }| Protection { sinks, recents });
    let args = ArgminSlotsArgs {
        scores: scores.into_dispatch(),
        offsets: ranges.offsets.clone().into_dispatch(),
        lengths: ranges.lengths.clone().into_dispatch(),
        positions: protected.map(|protected| protected.positions.clone()).into(),
        newest: protected.map(|protected| protected.newest.clone()).into(),
        protection,
    };
    Ok(Tensor::from_dispatch(<Dispatch as ArgminSlotsOps>::argmin_slots(args)))
}

/// [`Protected`] without its tensors, as backends receive it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Protection {
    pub(crate) sinks: i32,
    pub(crate) recents: i32,
}
