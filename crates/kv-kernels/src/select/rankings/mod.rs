//! Rankings of scores, and the ranks of entries that compete in groups.

mod backend;
#[cfg(feature = "gpu")]
mod kernel;
#[cfg(feature = "gpu")]
mod launch;
mod reference;

use burn::backend::Dispatch;
use burn::tensor::{Int, Tensor};

use crate::KernelError;
use crate::backend::check::Check;
use backend::RankingsOps;

/// The longest row.
const MOST: usize = 1 << 20;

/// The indices of every row, ordered by score: the highest score first, the lower index among
/// equals, NaN last.
///
/// # Shapes
/// `scores` `[R, T]`, f32, `T` up to 1,048,576. Returns `[R, T]`, 32-bit.
///
/// # Errors
/// [`KernelError`] where shapes, dtypes or devices do not fit.
pub fn rankings(scores: Tensor<2>) -> Result<Tensor<2, Int>, KernelError> {
    let check = Check::new("rankings", &scores);
    checked(&check, &scores)?;
    Ok(Tensor::from_dispatch(<Dispatch as RankingsOps>::rankings(scores.into_dispatch())))
}

/// The rank of each entry of a row where entries compete in groups, as a score: 0 for the first
/// rank, −1 for the second, and so on.
///
/// 1. From the lowest entry of `ranked` up, an entry with a leader and a finite score joins the
///    leader's group: the leader's sum grows by the entry's sum, which is the entry's score and the
///    sums of all entries that have joined it. Negative sums add nothing.
/// 2. Entries that have joined no group come first, by descending sum; entries that have joined a
///    group follow, by descending sum. Among equal sums the higher entry of `ranked` comes first.
///
/// The order of the additions is fixed, so that all devices find equal sums.
///
/// # Shapes
/// `scores` `[R, T]`, f32, `T` up to 1,048,576; `ranked` `[R, T]`, as [`rankings`] has them;
/// `leaders` `[R, T]`: the leader of each entry of `ranked`, an index into `ranked` below the
/// entry's own, [`crate::NO_SLOT`] for none; 32-bit, on the device and not checked. Returns `[R,
/// T]`, in the order of `scores`.
///
/// # Errors
/// [`KernelError`] where shapes, dtypes or devices do not fit.
pub fn group_priority_ranks(
    scores: Tensor<2>,
    ranked: Tensor<2, Int>,
    leaders: Tensor<2, Int>,
) -> Result<Tensor<2>, KernelError> {
    let check = Check::new("group_priority_ranks", &scores);
    checked(&check, &scores)?;
    for (argument, places) in [("ranked", &ranked), ("leaders", &leaders)] {
        check.shape(argument, places, &scores.dims())?;
        check.int(argument, places)?;
    }
    Ok(Tensor::from_dispatch(<Dispatch as RankingsOps>::group_priority_ranks(
        scores.into_dispatch(),
        ranked.into_dispatch(),
        leaders.into_dispatch(),
    )))
}

fn checked(check: &Check, scores: &Tensor<2>) -> Result<(), KernelError> {
    check.supported()?;
    check.f32("scores", scores)?;
    check.filled("scores", scores)?;
    let [_, columns] = scores.dims();
    if columns > MOST {
        return Err(check.unsupported("scores of a row", columns, "1 to 1,048,576"));
    }
    Ok(())
}
