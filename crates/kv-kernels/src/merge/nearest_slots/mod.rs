//! Pairs each slot of a list with the slot of another list whose key has the highest cosine. The
//! matrix of all cosines is never stored. `tensor_core.rs` multiplies by matrix instructions where
//! the device has them for the keys' dtype; `kernel.rs` serves everything else.

mod args;
mod backend;
#[cfg(feature = "gpu")]
mod kernel;
#[cfg(feature = "gpu")]
mod kernel_args;
#[cfg(feature = "gpu")]
mod launch;
pub(crate) mod reference;
mod strategy;
#[cfg(feature = "gpu")]
mod tensor_core;

use burn::backend::Dispatch;
use burn::tensor::{Int, Tensor};

use crate::KernelError;
use crate::backend::check::Check;
use args::NearestSlotsArgs;
use backend::NearestSlotsOps;
use strategy::NearestSlotsShape;

pub use strategy::NearestSlotsStrategy;

const OP: &str = "nearest_slots";

/// Lists of slots, one a row.
#[derive(Debug, Clone)]
pub struct SlotLists {
    /// Slots of a pool, `[P, N]`, 32-bit.
    pub slots: Tensor<2, Int>,
    /// Slots of each row, from the first column on, `[P]`, 32-bit.
    pub counts: Tensor<1, Int>,
}

impl SlotLists {
    pub(crate) fn check(
        &self,
        check: &Check,
        argument: &'static str,
        rows: usize,
    ) -> Result<(), KernelError> {
        check.filled(argument, &self.slots)?;
        check.shape(argument, &self.slots, &[rows, self.slots.dims()[1]])?;
        check.int(argument, &self.slots)?;
        check.shape("counts", &self.counts, &[rows])?;
        check.int("counts", &self.counts)
    }
}

/// Which slots may be paired, and by which kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct NearestSlotsOptions {
    /// Whether a slot is paired only with places before its own.
    pub earlier: bool,
    /// The kernel to run.
    pub strategy: NearestSlotsStrategy,
}

/// The results of [`nearest_slots`], `[P, N]` each; undefined after a list's end.
#[derive(Debug, Clone)]
pub struct Nearest {
    /// Places in the other list's row, 32-bit, the first among equals; −1 where there is no other
    /// slot.
    pub places: Tensor<2, Int>,
    /// Cosines of the two keys, f32; 0 where one key is 0, −2 where there is no other slot.
    pub cosines: Tensor<2>,
}

/// For every slot of a list, the slot of another list of the same row whose key has the highest
/// cosine. A slot is not paired with itself.
///
/// With [`NearestSlotsOptions::earlier`], a slot is paired only with places before its own. Where
/// both lists are one ranking, it gets the most similar of the slots that rank higher.
///
/// # Shapes
/// `keys` `[S, D]`, f32, f16 or bf16; `of` `[P, N]` and `among` `[P, M]`, whose slots and counts
/// are on the device and are not checked.
///
/// # Errors
/// [`KernelError`] where shapes, dtypes or devices do not fit, and for a forced strategy that
/// cannot run the call.
pub fn nearest_slots(
    keys: Tensor<2>,
    of: &SlotLists,
    among: &SlotLists,
    options: NearestSlotsOptions,
) -> Result<Nearest, KernelError> {
    let check = Check::new(OP, &keys);
    check.supported()?;
    check.float("keys", &keys)?;
    check.filled("keys", &keys)?;
    check.counted("keys", &keys)?;
    let [rows, _] = of.slots.dims();
    of.check(&check, "of", rows)?;
    among.check(&check, "among", rows)?;
    let shape = NearestSlotsShape { head_dim: keys.dims()[1] };
    let strategy = check.chosen(options.strategy, keys.dtype(), &shape)?;
    let (places, cosines) = <Dispatch as NearestSlotsOps>::nearest_slots(NearestSlotsArgs {
        keys: keys.into_dispatch(),
        of: of.slots.clone().into_dispatch(),
        of_counts: of.counts.clone().into_dispatch(),
        among: among.slots.clone().into_dispatch(),
        among_counts: among.counts.clone().into_dispatch(),
        options: NearestSlotsOptions { strategy, ..options },
    });
    Ok(Nearest { places: Tensor::from_dispatch(places), cosines: Tensor::from_dispatch(cosines) })
}
