//! Slots of a pool copied into whole blocks of an archive.

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
use super::pool::{ArchivePool, ArchiveTensors};
use crate::KernelError;
use crate::backend::check::Check;
use args::ArchiveArgs;
use backend::ArchiveOps;

const OP: &str = "archive_slots";

/// Copies slots into whole blocks of an archive, in place: keys and values as they are, and of each
/// block signatures, means and spreads. The slots of a list go into its blocks in the list's order.
///
/// # Shapes
/// - `keys`, `values`: `[S, D]`, f32, f16 or bf16, of the pool's dtype
/// - `from`: `[P, M]`, 32-bit, slots of the two, `M` a multiple of [`ArchivePool::BLOCK`]; none of
///   a list that is written is absent
/// - `to`: `[P]`, 32-bit, the first block that each list is written to; negative for lists that are
///   not written
///
/// Slots and blocks are on the device and are not checked.
///
/// # Errors
/// [`KernelError`] where shapes, dtypes or devices do not fit; nothing is changed.
pub fn archive_slots(
    pool: &mut ArchivePool,
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
    pool.check(&check, head_dim, keys.dtype())?;
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
    let taken = ArchiveTensors {
        rows: pool.rows.taken(&check),
        signatures: check.take_ints(&mut pool.signatures).into_dispatch(),
        key_statistics: check.take_ints(&mut pool.key_statistics).into_dispatch(),
        value_means: check.take_ints(&mut pool.value_means).into_dispatch(),
        keeps_slots: pool.keeps_slots,
    };
    let (rows, signatures, key_statistics, value_means) =
        <Dispatch as ArchiveOps>::archive_slots(ArchiveArgs {
            pool: taken,
            keys: keys.into_dispatch(),
            values: values.into_dispatch(),
            from: from.into_dispatch(),
            to: to.into_dispatch(),
        });
    pool.rows.put_back(rows);
    pool.signatures = Tensor::from_dispatch(signatures);
    pool.key_statistics = Tensor::from_dispatch(key_statistics);
    pool.value_means = Tensor::from_dispatch(value_means);
    Ok(())
}
