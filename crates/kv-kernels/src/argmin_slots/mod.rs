//! The weakest slot of every (sequence, key-value head): what a per-step eviction removes.

#[cfg(feature = "gpu")]
pub(crate) mod kernel;
pub(crate) mod reference;

use burn::backend::Dispatch;
use burn::tensor::{Int, Tensor};

use crate::check::Check;
use crate::extension::SlotOps;
use crate::{KernelError, SlotRanges};

/// The slot with the lowest score in each range; the lowest slot among equals, and `-1` for an
/// empty range. Scores of +∞ protect a slot as long as another is left.
///
/// # Shapes
/// `scores` `[S]` f32, `ranges` `[B, Hkv]`; returns slots of the pool, `[B, Hkv]`.
///
/// # Errors
/// [`KernelError`] where shapes, dtypes or devices do not fit.
pub fn argmin_slots(scores: Tensor<1>, ranges: &SlotRanges) -> Result<Tensor<2, Int>, KernelError> {
    let check = Check::new("argmin_slots", &scores);
    check.supported()?;
    check.f32("scores", &scores)?;
    let [batch, kv_heads] = ranges.offsets.dims();
    check.ranges(ranges, batch, kv_heads)?;
    Ok(Tensor::from_dispatch(<Dispatch as SlotOps>::argmin_slots(
        scores.into_dispatch(),
        ranges.offsets.clone().into_dispatch(),
        ranges.lengths.clone().into_dispatch(),
    )))
}
