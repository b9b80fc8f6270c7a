//! The highest scores of every row, chosen on the device: a given number of them, or all from a
//! bound on.

mod args;
mod backend;
#[cfg(feature = "gpu")]
mod kernel;
#[cfg(feature = "gpu")]
mod launch;
mod reference;

use burn::backend::Dispatch;
use burn::tensor::{DType, Int, Tensor};

use crate::KernelError;
use crate::backend::check::Check;
use args::{TopSlotsArgs, WantedScores};
use backend::TopSlotsOps;

const OP: &str = "top_slots";
/// The longest row.
const MOST: usize = 1 << 20;

/// The rule by which scores are chosen from every row.
#[derive(Debug, Clone)]
pub enum Choice {
    /// A number of the highest scores, `[R]`, 32-bit; the lower index among equals, NaN last.
    Top(Tensor<1, Int>),
    /// All scores from a bound on; the bounds are `[R]`, f32.
    Above(Tensor<1>),
}

/// The chosen scores.
#[derive(Debug, Clone)]
pub struct Chosen {
    /// Ascending indices, `[R, most]`, 32-bit, with `-1` after the last.
    pub indices: Tensor<2, Int>,
    /// The number of each row's indices, `[R]`, 32-bit.
    pub counts: Tensor<1, Int>,
}

/// Chooses among the first `lengths` scores of every row, at most `most`. Where more scores reach a
/// bound, the first ones are chosen.
///
/// # Shapes
/// `scores` `[R, T]`, f32, `T` up to 1,048,576; `lengths` `[R]`, 32-bit, up to `T` (on the device,
/// not checked), `None` for whole rows.
///
/// # Errors
/// [`KernelError`] where shapes, dtypes or devices do not fit.
pub fn top_slots(
    scores: Tensor<2>,
    lengths: Option<Tensor<1, Int>>,
    choice: Choice,
    most: usize,
) -> Result<Chosen, KernelError> {
    let [rows, columns] = scores.dims();
    let device = scores.device();
    let check = Check::new(OP, &scores);
    check.supported()?;
    check.f32("scores", &scores)?;
    check.filled("scores", &scores)?;
    if columns > MOST || most == 0 {
        let (argument, actual) =
            if most == 0 { ("most", most) } else { ("scores of a row", columns) };
        let supported = "1 to 1,048,576";
        return Err(KernelError::Unsupported {
            op: OP,
            argument,
            actual: actual.to_string(),
            supported,
        });
    }
    let lengths =
        lengths.unwrap_or_else(|| Tensor::full([rows], columns as i32, (&device, DType::I32)));
    check.shape("lengths", &lengths, &[rows])?;
    check.int("lengths", &lengths)?;
    let wanted = match choice {
        Choice::Top(counts) => {
            check.shape("counts", &counts, &[rows])?;
            check.int("counts", &counts)?;
            WantedScores::Top(counts.into_dispatch())
        }
        Choice::Above(bounds) => {
            check.shape("bounds", &bounds, &[rows])?;
            check.f32("bounds", &bounds)?;
            WantedScores::Above(bounds.into_dispatch())
        }
    };
    let (indices, counts) = <Dispatch as TopSlotsOps>::top_slots(TopSlotsArgs {
        scores: scores.into_dispatch(),
        lengths: lengths.into_dispatch(),
        wanted,
        most,
    });
    Ok(Chosen { indices: Tensor::from_dispatch(indices), counts: Tensor::from_dispatch(counts) })
}
