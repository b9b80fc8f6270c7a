//! Writes rows into a pool, in place. A cache appends, overwrites and moves slots with it.

pub(crate) mod backend;
#[cfg(feature = "gpu")]
mod kernel;
#[cfg(feature = "gpu")]
mod launch;
mod reference;

use std::ops::Range;

use burn::backend::Dispatch;
use burn::tensor::{Float, Int, Tensor};

use crate::KernelError;
use crate::backend::check::Check;
use backend::ScatterRowsOps;

/// Writes row `n` of `rows` into row `slots[n]` of `pool`, in place.
///
/// A negative slot is skipped. A slot that occurs twice gets one of its rows. On a CubeCL device
/// every clone of the pool sees the rows. On the CPU a shared pool is copied first, so the caller
/// should hold the only reference.
///
/// # Shapes
/// `pool` `[S, D]`, `slots` `[N]` (32-bit), `rows` `[N, D]` of the pool's dtype.
///
/// # Errors
/// [`KernelError`] where shapes, dtypes or devices do not fit; the pool is unchanged. Slots are on
/// the device and are not checked beyond their sign.
pub fn scatter_rows(
    pool: &mut Tensor<2>,
    slots: Tensor<1, Int>,
    rows: Tensor<2>,
) -> Result<(), KernelError> {
    let width = pool.dims()[1];
    scatter_floats("scatter_rows", pool, slots, rows, |count| vec![count, width])
}

/// [`scatter_rows`] for a pool of one number a slot, such as weights.
///
/// # Shapes
/// `pool` `[S]`, `slots` `[N]`, `values` `[N]`.
///
/// # Errors
/// The errors of [`scatter_rows`].
pub fn scatter_scalars(
    pool: &mut Tensor<1>,
    slots: Tensor<1, Int>,
    values: Tensor<1>,
) -> Result<(), KernelError> {
    scatter_floats("scatter_scalars", pool, slots, values, |count| vec![count])
}

/// [`scatter_rows`] for a pool of one 32-bit integer a slot, such as positions.
///
/// # Shapes
/// `pool` `[S]`, `slots` `[N]`, `values` `[N]`, all 32-bit.
///
/// # Errors
/// The errors of [`scatter_rows`].
pub fn scatter_ints(
    pool: &mut Tensor<1, Int>,
    slots: Tensor<1, Int>,
    values: Tensor<1, Int>,
) -> Result<(), KernelError> {
    let check = Check::new("scatter_ints", pool);
    check.supported()?;
    check.int("pool", pool)?;
    check.int("slots", &slots)?;
    check.int("values", &values)?;
    check.shape("values", &values, &slots.dims())?;
    *pool = Tensor::from_dispatch(<Dispatch as ScatterRowsOps>::scatter_ints(
        check.take_ints(pool).into_dispatch(),
        slots.into_dispatch(),
        values.into_dispatch(),
    ));
    Ok(())
}

/// Copies `from` into the buffer of `to`, such as a result that a recorded step passes on to the
/// next.
///
/// # Shapes
/// `to` and `from` have one shape and dtype.
///
/// # Errors
/// The errors of [`scatter_rows`].
pub fn assign<const D: usize>(to: &mut Tensor<D>, from: Tensor<D>) -> Result<(), KernelError> {
    let check = Check::new("assign", to);
    check.supported()?;
    check.float("to", to)?;
    check.same_dtype("from", &from, "the dtype of the other", to.dtype())?;
    let (shape, count) = (to.dims(), to.dims().iter().product::<usize>());
    check.shape("from", &from, &shape)?;
    if count > 0 {
        let (target, from) = (check.take(to).into_dispatch(), from.into_dispatch());
        *to = Tensor::from_dispatch(<Dispatch as ScatterRowsOps>::assign(target, from));
    }
    Ok(())
}

/// [`assign`] for 32-bit integers.
///
/// # Shapes
/// `to` and `from` have one shape.
///
/// # Errors
/// The errors of [`scatter_rows`].
pub fn assign_ints<const D: usize>(
    to: &mut Tensor<D, Int>,
    from: Tensor<D, Int>,
) -> Result<(), KernelError> {
    let check = Check::new("assign_ints", to);
    check.supported()?;
    check.int("to", to)?;
    check.int("from", &from)?;
    let (shape, count) = (to.dims(), to.dims().iter().product::<usize>());
    check.shape("from", &from, &shape)?;
    if count > 0 {
        let (target, from) = (check.take_ints(to).into_dispatch(), from.into_dispatch());
        *to = Tensor::from_dispatch(<Dispatch as ScatterRowsOps>::assign_ints(target, from));
    }
    Ok(())
}

/// [`assign`] for some rows of a tensor: the rows from `first` on, as many as `rows` has.
///
/// # Shapes
/// `to` `[N, ..]`, `rows` `[n, ..]` of one dtype, `first + n ≤ N`.
///
/// # Errors
/// The errors of [`scatter_rows`].
pub fn assign_rows<const D: usize>(
    to: &mut Tensor<D>,
    first: usize,
    rows: Tensor<D>,
) -> Result<(), KernelError> {
    let check = Check::new("assign_rows", to);
    check.supported()?;
    check.float("to", to)?;
    check.same_dtype("rows", &rows, "the dtype of the other", to.dtype())?;
    check.shape("rows", &rows, &shape_of_rows(to.dims(), first, rows.dims()))?;
    if rows.dims()[0] == 0 {
        return Ok(());
    }
    let all = to.clone().slice_assign(ranges_of_rows(first, rows.dims()), rows);
    assign(to, all)
}

/// [`assign_rows`] for 32-bit integers.
///
/// # Errors
/// The errors of [`scatter_rows`].
pub fn assign_int_rows<const D: usize>(
    to: &mut Tensor<D, Int>,
    first: usize,
    rows: Tensor<D, Int>,
) -> Result<(), KernelError> {
    let check = Check::new("assign_int_rows", to);
    check.supported()?;
    check.int("to", to)?;
    check.int("rows", &rows)?;
    check.shape("rows", &rows, &shape_of_rows(to.dims(), first, rows.dims()))?;
    if rows.dims()[0] == 0 {
        return Ok(());
    }
    let all = to.clone().slice_assign(ranges_of_rows(first, rows.dims()), rows);
    assign_ints(to, all)
}

/// The shape that rows from `first` on may have, at most as many as there are.
fn shape_of_rows<const D: usize>(to: [usize; D], first: usize, rows: [usize; D]) -> [usize; D] {
    let mut shape = to;
    shape[0] = rows[0].min(to[0].saturating_sub(first));
    shape
}

fn ranges_of_rows<const D: usize>(first: usize, rows: [usize; D]) -> [Range<usize>; D] {
    let mut ranges = rows.map(|length| 0..length);
    ranges[0] = first..first + rows[0];
    ranges
}

fn scatter_floats<const D: usize>(
    op: &'static str,
    pool: &mut Tensor<D, Float>,
    slots: Tensor<1, Int>,
    rows: Tensor<D, Float>,
    expected: impl Fn(usize) -> Vec<usize>,
) -> Result<(), KernelError> {
    let check = Check::new(op, pool);
    check.supported()?;
    check.float("pool", pool)?;
    check.int("slots", &slots)?;
    check.shape("rows", &rows, &expected(slots.dims()[0]))?;
    check.same_dtype("rows", &rows, "the pool's dtype", pool.dtype())?;
    *pool = Tensor::from_dispatch(<Dispatch as ScatterRowsOps>::scatter_rows(
        check.take(pool).into_dispatch(),
        slots.into_dispatch(),
        rows.into_dispatch(),
    ));
    Ok(())
}
