//! Scores as rankings, and the priorities of tokens whose groups compete as one.

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

/// Indices of every row by score: the highest first, the lower index among equals, NaN last.
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

/// When each of every row has its turn where groups compete as one, as a score: 0 for the first, −1
/// for the second. Whoever has a leader, which ranks higher, joins it if its own score is finite,
/// and hands on all that it has, with what was handed on to it; what is negative adds nothing.
/// Those that have joined nobody come first, by their sums, then the others, by theirs; the higher
/// rank among equals.
///
/// Sums are made from the lowest rank up, so that they are the same on every device.
///
/// # Shapes
/// `scores` `[R, T]`, f32, `T` up to 1,048,576; `ranked` `[R, T]`, as [`rankings`] has them;
/// `leaders` `[R, T]`, each ranked one's leader as a place among these before its own, −1 for none;
/// 32-bit, on the device and not checked. Returns `[R, T]`, in the order of `scores`.
///
/// # Errors
/// [`KernelError`] where shapes, dtypes or devices do not fit.
pub fn turns_of_groups(
    scores: Tensor<2>,
    ranked: Tensor<2, Int>,
    leaders: Tensor<2, Int>,
) -> Result<Tensor<2>, KernelError> {
    let check = Check::new("turns_of_groups", &scores);
    checked(&check, &scores)?;
    for (argument, places) in [("ranked", &ranked), ("leaders", &leaders)] {
        check.shape(argument, places, &scores.dims())?;
        check.int(argument, places)?;
    }
    Ok(Tensor::from_dispatch(<Dispatch as RankingsOps>::turns_of_groups(
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
