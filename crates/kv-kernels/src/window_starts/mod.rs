//! Where windows begin whose start moves on with the sequence.

#[cfg(feature = "gpu")]
pub(crate) mod kernel;
pub(crate) mod reference;

use burn::backend::Dispatch;
use burn::tensor::{Int, Tensor};

use crate::check::Check;
use crate::extension::SubsetOps;
use crate::{KernelError, Share, SlotRanges};

const OP: &str = "window_starts";

/// The first slot of every range, counted from the range's own first one, that its sequence's
/// newest token sees: the first at position [`Share::first_seen`] or behind; the range's length
/// where there is none. As [`crate::SlotView::Window`] takes them.
///
/// # Shapes
/// `positions` `[S]`, which ascend within every range; `newest` `[B]`, positions of the newest
/// tokens; 32-bit. Returns `[B, Hkv]`.
///
/// # Errors
/// [`KernelError`] where shapes, dtypes or devices do not fit.
pub fn window_starts(
    positions: &Tensor<1, Int>,
    ranges: &SlotRanges,
    newest: &Tensor<1, Int>,
    share: Share,
) -> Result<Tensor<2, Int>, KernelError> {
    let check = Check::new(OP, positions);
    check.supported()?;
    check.int("positions", positions)?;
    check.filled("positions", positions)?;
    let [batch, kv_heads] = ranges.offsets.dims();
    check.ranges(ranges, batch, kv_heads)?;
    check.filled("offsets", &ranges.offsets)?;
    check.shape("newest", newest, &[batch])?;
    check.int("newest", newest)?;
    Ok(Tensor::from_dispatch(<Dispatch as SubsetOps>::window_starts(
        positions.clone().into_dispatch(),
        ranges.offsets.clone().into_dispatch(),
        ranges.lengths.clone().into_dispatch(),
        newest.clone().into_dispatch(),
        share,
    )))
}
