//! The slots of every range by their numbers, listed on the device.

mod backend;
#[cfg(feature = "gpu")]
mod kernel;
#[cfg(feature = "gpu")]
mod launch;

use burn::backend::Dispatch;
use burn::tensor::{Int, Tensor};

use crate::KernelError;
use crate::backend::check::Check;
use backend::RangeSlotsOps;

/// The first `width` slots of every range, `offset + i` for `i` from 0, whether or not they are
/// live. Nothing is uploaded, so that recorded steps can list slots.
///
/// # Shapes
/// `offsets` `[B, Hkv]`, 32-bit. Returns `[B * Hkv, width]`.
///
/// # Errors
/// [`KernelError`] for offsets of another type, for no ranges, and for a `width` of 0.
pub fn range_slots(offsets: &Tensor<2, Int>, width: usize) -> Result<Tensor<2, Int>, KernelError> {
    const OP: &str = "range_slots";
    let check = Check::new(OP, offsets);
    check.supported()?;
    check.int("offsets", offsets)?;
    check.filled("offsets", offsets)?;
    if width == 0 {
        return Err(KernelError::Unsupported {
            op: OP,
            argument: "width",
            actual: width.to_string(),
            supported: "at least 1",
        });
    }
    let slots = <Dispatch as RangeSlotsOps>::range_slots(offsets.clone().into_dispatch(), width);
    Ok(Tensor::from_dispatch(slots))
}
