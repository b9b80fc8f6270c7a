//! Rows of scores, pooled over neighbouring columns.

mod backend;
#[cfg(feature = "gpu")]
mod kernel;
#[cfg(feature = "gpu")]
mod launch;

use burn::backend::Dispatch;
use burn::tensor::Tensor;

use crate::KernelError;
use crate::backend::check::Check;
use backend::PooledRowsOps;

/// How the scores of neighbouring columns become one score.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RowPool {
    /// Their sum, divided by the size of the window. Columns beyond the row's ends count as zeros.
    Average,
    /// The highest of them.
    Maximum,
}

/// Each score and the scores of its neighbours as one, where a window of `size` columns, an odd
/// number, has the score in its middle. NaN shows in every window that has it.
///
/// The width of the rows is no constant of the kernel, unlike in the pooling of the tensor library,
/// which is compiled anew for every width, and so for every length of a prompt.
///
/// # Shapes
/// `scores` `[R, T]`, f32. Returns `[R, T]`.
///
/// # Errors
/// [`KernelError`] for scores of another type, for none, and for an even `size`.
pub fn pool_rows(scores: Tensor<2>, size: usize, pool: RowPool) -> Result<Tensor<2>, KernelError> {
    const OP: &str = "pool_rows";
    let check = Check::new(OP, &scores);
    check.supported()?;
    check.f32("scores", &scores)?;
    check.filled("scores", &scores)?;
    check.counted("scores", &scores)?;
    if size.is_multiple_of(2) {
        return Err(KernelError::Unsupported {
            op: OP,
            argument: "size",
            actual: size.to_string(),
            supported: "odd numbers",
        });
    }
    let pooled = <Dispatch as PooledRowsOps>::pool_rows(scores.into_dispatch(), size, pool);
    Ok(Tensor::from_dispatch(pooled))
}
