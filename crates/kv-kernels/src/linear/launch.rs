//! Launches products on CubeCL devices.

#[cfg(feature = "cuda")]
use burn::backend::DType;
use burn::backend::ops::FloatTensorOps;
use burn::backend::{Shape, TensorMetadata};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

#[cfg(feature = "cuda")]
use super::hopper;
use super::skinny;
use crate::gpu::{elem_type, empty_like, grid, multiplies};

/// Up to 32 rows `x` `[M, K]` times the transpose of `weight` `[N, K]`.
pub(crate) fn skinny(x: CubeTensor, weight: CubeTensor) -> CubeTensor {
    let [rows, inputs] = x.shape().dims();
    let [outputs, _] = weight.shape().dims();
    if !multiplies(&x) || !inputs.is_multiple_of(32) {
        return CubeBackend::float_matmul(x, CubeBackend::float_transpose(weight));
    }
    let x = into_contiguous(x);
    let y = empty_like(&x, Shape::from([rows, outputs]), x.dtype);
    // SAFETY: shapes were checked, and the kernel guards its writes.
    unsafe {
        skinny::skinny_kernel::launch_unchecked(
            &x.client.clone(),
            grid(outputs.div_ceil(skinny::OUTPUTS)),
            CubeDim::new_1d(32 * skinny::planes(rows.div_ceil(8)) as u32),
            x.clone().into_buffer_arg(),
            into_contiguous(weight).into_buffer_arg(),
            y.clone().into_buffer_arg(),
            rows,
            outputs,
            inputs,
            rows.div_ceil(8),
            elem_type(x.dtype),
        );
    }
    y
}

/// Many rows `x` `[M, K]` times the transpose of `weight` `[N, K]`, on Hopper.
#[cfg(feature = "cuda")]
pub(crate) fn wide(x: CubeTensor, weight: CubeTensor) -> CubeTensor {
    use crate::hopper::{tiles, with_rows};
    let [rows, inputs] = x.shape().dims();
    let [outputs, _] = weight.shape().dims();
    let output = empty_like(&x, Shape::from([rows, outputs]), x.dtype);
    let processors =
        x.client.properties().hardware.num_streaming_multiprocessors.unwrap_or(1) as usize;
    let bands = rows.div_ceil(hopper::ROWS);
    // Wide results read their factors least; narrow ones keep more processors busy.
    let columns = if bands * outputs.div_ceil(256) >= processors { 256 } else { 128 };
    let name = if x.dtype == DType::F16 { "f16" } else { "bf16" };
    // SAFETY: shapes were checked, and the kernel guards its writes.
    unsafe {
        hopper::product_kernel::launch_unchecked(
            &x.client.clone(),
            CubeCount::Static((bands * outputs.div_ceil(columns)) as u32, 1, 1),
            CubeDim::new_1d(hopper::UNITS as u32),
            columns / 2,
            tiles(with_rows(x.clone()), hopper::ROWS),
            tiles(with_rows(weight), columns),
            output.clone().into_buffer_arg(),
            rows as u32,
            outputs as u32,
            inputs as u32,
            hopper::Blueprint { columns, name },
            elem_type(x.dtype),
        );
    }
    output
}
