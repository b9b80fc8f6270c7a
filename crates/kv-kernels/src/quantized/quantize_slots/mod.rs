//! Slots of a pool quantised into whole blocks of a pool of quantised slots.

mod args;
mod backend;
#[cfg(feature = "gpu")]
mod kernel;
#[cfg(feature = "gpu")]
mod launch;
pub(crate) mod reference;

use burn::backend::Dispatch;
use burn::tensor::{Int, Tensor};

use super::layout::BLOCK;
use super::pool::QuantizedPool;
use crate::KernelError;
use crate::backend::check::Check;
use args::QuantizeArgs;
use backend::QuantizeOps;

const OP: &str = "quantize_slots";

/// Quantises slots into whole blocks of a pool, in place. The slots of a list go into its blocks in
/// the list's order.
///
/// Absent slots of a list ([`crate::NO_SLOT`]) get codes of 0 and do not count in minima and
/// maxima. A block with a key that is NaN or infinite, and a value that is, stand for NaN; so does
/// one whose minimum is within 2^120 of the least f32, since minima are rounded down.
///
/// # Shapes
/// - `keys`, `values`: `[S, D]`, f32, f16 or bf16
/// - `from`: `[P, M]`, 32-bit, slots of the two, `M` a multiple of [`QuantizedPool::BLOCK`]
/// - `to`: `[P]`, 32-bit, the first block that each list is written to; negative for lists that are
///   not written
///
/// Slots and blocks are on the device and are not checked.
///
/// # Errors
/// [`KernelError`] where shapes, dtypes or devices do not fit; nothing is changed.
pub fn quantize_slots(
    pool: &mut QuantizedPool,
    keys: Tensor<2>,
    values: Tensor<2>,
    from: Tensor<2, Int>,
    to: Tensor<1, Int>,
) -> Result<(), KernelError> {
    let check = Check::new(OP, &keys);
    check.supported()?;
    check.float("keys", &keys)?;
    check.filled("keys", &keys)?;
    check.counted("keys", &keys)?;
    let [slots, head_dim] = keys.dims();
    check.shape("values", &values, &[slots, head_dim])?;
    check.same_dtype("values", &values, "the keys' dtype", keys.dtype())?;
    pool.check(&check, head_dim)?;
    let [lists, count] = from.dims();
    check.shape("to", &to, &[lists])?;
    check.int("from", &from)?;
    check.int("to", &to)?;
    if !count.is_multiple_of(BLOCK) {
        return Err(check.unsupported("slots of a list", count, "multiples of 64"));
    }
    if lists == 0 || count == 0 {
        return Ok(());
    }
    let taken = QuantizedPool {
        key_codes: check.take_ints(&mut pool.key_codes),
        key_scales: check.take_ints(&mut pool.key_scales),
        value_codes: check.take_ints(&mut pool.value_codes),
        value_scales: check.take_ints(&mut pool.value_scales),
        bits: pool.bits,
    };
    let (key_codes, key_scales, value_codes, value_scales) =
        <Dispatch as QuantizeOps>::quantize_slots(QuantizeArgs {
            pool: taken.into_tensors(),
            keys: keys.into_dispatch(),
            values: values.into_dispatch(),
            from: from.into_dispatch(),
            to: to.into_dispatch(),
        });
    pool.key_codes = Tensor::from_dispatch(key_codes);
    pool.key_scales = Tensor::from_dispatch(key_scales);
    pool.value_codes = Tensor::from_dispatch(value_codes);
    pool.value_scales = Tensor::from_dispatch(value_scales);
    Ok(())
}
