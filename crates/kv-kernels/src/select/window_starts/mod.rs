//! The first slots of windows whose start moves on with the sequence (PSAW).

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
use crate::{KernelError, Share, SlotRanges};
use args::WindowStartsArgs;
use backend::WindowStartsOps;

const OP: &str = "window_starts";

/// The first slot of every range that its sequence's newest token sees, counted from the range's
/// first slot, as [`crate::SlotView::Window`] takes it: the first slot at or after position
/// [`Share::first_seen`], or the range's length where there is none.
///
/// # Shapes
/// `positions` `[S]`, which ascend within every range; `newest` `[B]`, the positions of the newest
/// tokens; both 32-bit. Returns `[B, Hkv]`.
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
    let args = WindowStartsArgs {
        positions: positions.clone().into_dispatch(),
        offsets: ranges.offsets.clone().into_dispatch(),
        lengths: ranges.lengths.clone().into_dispatch(),
        newest: newest.clone().into_dispatch(),
        share,
    };
    Ok(Tensor::from_dispatch(<Dispatch as WindowStartsOps>::window_starts(args)))
}
