//! Launches products on CubeCL devices.

#[cfg(feature = "cuda")]
use burn::backend::DType;
use burn::backend::{Shape, TensorMetadata};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

#[cfg(feature = "cuda")]
use super::hopper;
use super::{plain, tensor_core};
use crate::extension::Epilogue;
use crate::gpu::{elem_type, empty_like, grid, is_cuda, multiplies, vector_lanes};

/// Up to 32 rows `x` `[M, K]` times the transpose of `weight` `[N, K]`, and the epilogue.
pub(crate) fn skinny(
    x: CubeTensor,
    weight: CubeTensor,
    epilogue: Epilogue<CubeBackend>,
) -> CubeTensor {
    let [rows, inputs] = x.shape().dims();
    let [outputs, _] = weight.shape().dims();
    let config = epilogue.config;
    let outputs = outputs / config.parts();
    let (x, weight) = (into_contiguous(x), into_contiguous(weight));
    let client = x.client.clone();
    let y = empty_like(&x, Shape::from([rows, outputs]), x.dtype);
    if rows * outputs == 0 {
        return y;
    }
    let bias = into_contiguous(epilogue.bias).into_buffer_arg();
    let residual = into_contiguous(epilogue.residual).into_buffer_arg();
    // SAFETY: shapes were checked, and the kernels guard their writes.
    unsafe {
        if multiplies(&x) && inputs.is_multiple_of(32) {
            let tiles = rows.div_ceil(8);
            let processors = client.properties().hardware.num_streaming_multiprocessors;
            let blueprint = tensor_core::Blueprint::new(
                tiles,
                outputs * config.parts(),
                processors.unwrap_or(1) as usize,
                is_cuda(&client),
                config,
            );
            tensor_core::tensor_core_kernel::launch_unchecked(
                &client,
                grid(outputs.div_ceil(blueprint.outputs())),
                CubeDim::new_1d(32 * tensor_core::PLANES as u32),
                x.clone().into_buffer_arg(),
                weight.into_buffer_arg(),
                bias,
                residual,
                y.clone().into_buffer_arg(),
                rows,
                outputs,
                inputs,
                blueprint,
                elem_type(x.dtype),
            );
        } else {
            let lanes = vector_lanes(&x, inputs, inputs).min(4);
            let hardware = &client.properties().hardware;
            let team = (hardware.plane_size_min as usize).clamp(1, 32);
            plain::plain_kernel::launch_unchecked(
                &client,
                grid(outputs.div_ceil(plain::UNITS / team)),
                CubeDim::new_1d(plain::UNITS as u32),
                lanes,
                x.clone().into_buffer_arg(),
                weight.into_buffer_arg(),
                bias,
                residual,
                y.clone().into_buffer_arg(),
                rows,
                outputs,
                inputs / lanes,
                rows.next_power_of_two().min(8),
                team,
                config,
                elem_type(x.dtype),
            );
        }
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
