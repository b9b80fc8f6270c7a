//! Small conversions between device tensors and host vectors.

use burn::tensor::{Bytes, DType, Device, Int, Tensor, TensorData};
use kv_kernels::NO_SLOT;

use crate::{Error, Result, is_cpu};

/// Reads a float tensor of any float dtype as f32, in row-major order. Waits for the device.
///
/// # Errors
/// [`Error::Read`] where the device fails.
pub fn read_f32<const D: usize>(what: &'static str, tensor: Tensor<D>) -> Result<Vec<f32>> {
    let _work = kv_kernels::device_work();
    tensor.try_into_vec_as::<f32>().map_err(|error| Error::Read { what, reason: error.to_string() })
}

/// Reads an integer tensor as i32, in row-major order. Waits for the device.
///
/// # Errors
/// [`Error::Read`] where the device fails.
pub fn read_i32<const D: usize>(what: &'static str, tensor: Tensor<D, Int>) -> Result<Vec<i32>> {
    let _work = kv_kernels::device_work();
    tensor.try_into_vec_as::<i32>().map_err(|error| Error::Read { what, reason: error.to_string() })
}

/// 32-bit integers on the device.
pub(crate) fn ints<const D: usize>(
    values: Vec<i32>,
    shape: [usize; D],
    device: &Device,
) -> Tensor<D, Int> {
    Tensor::from_data(TensorData::new(values, shape), (device, DType::I32))
}

/// Indices within rows, `[R, W]`, as indices into the pool that rows begin in at `firsts`, `[R]`;
/// −1 from a row's count on (`counts`, `[R]`).
pub(crate) fn listed(
    indices: Tensor<2, Int>,
    firsts: Tensor<1, Int>,
    counts: Tensor<1, Int>,
) -> Tensor<2, Int> {
    let [rows, width] = indices.dims();
    let columns = columns(rows, width, &indices.device());
    listed_by(columns, indices, firsts, counts)
}

/// [`listed`] with the [`columns`] of as many rows and at least as many columns, which are
/// uploaded.
pub(crate) fn listed_by(
    columns: Tensor<2, Int>,
    indices: Tensor<2, Int>,
    firsts: Tensor<1, Int>,
    counts: Tensor<1, Int>,
) -> Tensor<2, Int> {
    let [rows, width] = indices.dims();
    let wide = |numbers: Tensor<1, Int>| numbers.unsqueeze_dim::<2>(1).expand([rows, width]);
    let columns = columns.slice([0..rows, 0..width]);
    (indices + wide(firsts)).mask_fill(columns.greater_equal(wide(counts)), NO_SLOT)
}

/// 0, 1, 2 and so on in every row, `[R, W]`.
pub(crate) fn columns(rows: usize, width: usize, device: &Device) -> Tensor<2, Int> {
    let row = Tensor::<1, Int>::arange(0..width as i64, (device, DType::I32));
    row.unsqueeze_dim::<2>(0).expand([rows, width])
}

/// f32 values on the device.
pub(crate) fn floats<const D: usize>(
    values: Vec<f32>,
    shape: [usize; D],
    device: &Device,
) -> Tensor<D> {
    Tensor::from_data(TensorData::new(values, shape), (device, DType::F32))
}

/// Zeros whose rows follow each other without padding: CUDA pads the rows of tensors that are
/// allocated as matrices, which a pool of slots must not pay for.
pub fn zero_rows(rows: usize, width: usize, device: &Device, dtype: DType) -> Tensor<2> {
    let zeros = match is_cpu(device) {
        true => Tensor::<1>::from_data(untouched_zeros(rows * width, dtype), (device, dtype)),
        false => Tensor::<1>::zeros([rows * width], (device, dtype)),
    };
    zeros.reshape([rows, width])
}

/// Zeros whose pages the system provides when they are first written. The tensor library's own
/// zeros are written at once, to align them, which takes a second for 2 GiB.
fn untouched_zeros(count: usize, dtype: DType) -> TensorData {
    let bytes = match dtype.size() {
        2 => Bytes::from_elems(vec![0u16; count]),
        4 => Bytes::from_elems(vec![0u32; count]),
        size => Bytes::from_elems(vec![0u8; count * size]),
    };
    TensorData::from_bytes(bytes, [count], dtype)
}

/// Rows without padding, which kernels that write in place need; a copy where there is padding.
pub fn packed(rows: Tensor<2>) -> Tensor<2> {
    let [count, width] = rows.dims();
    rows.reshape([count * width]).reshape([count, width])
}
