//! Launches products on CubeCL devices.

#[cfg(feature = "cuda")]
use burn::backend::DType;
use burn::backend::{Shape, TensorMetadata};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::args::Epilogue;
use super::epilogue::ProductOutputsLaunch;
#[cfg(feature = "cuda")]
use super::tiling::Tiling;
use super::{LinearStrategy, plain, tensor_core};
#[cfg(feature = "cuda")]
use super::{hopper_skinny, hopper_split, hopper_wide};
use crate::backend::client::{elem_type, empty_like, grid, is_cuda, processors, vector_lanes};
#[cfg(feature = "cuda")]
use crate::backend::optional::OptionalFloat;
#[cfg(feature = "cuda")]
use crate::components::tma::{tiles, with_rows};
#[cfg(feature = "cuda")]
use crate::peers::{PeerArgs, PeerSlotsLaunch};

/// Up to 32 rows `x` `[M, K]` times the transpose of `weight` `[N, K]`, with the epilogue, by the
/// portable kernel or by matrix instructions.
pub(super) fn skinny(
    x: CubeTensor,
    weight: CubeTensor,
    epilogue: Epilogue<CubeBackend>,
    strategy: LinearStrategy,
) -> CubeTensor {
    let [rows, inputs] = x.shape().dims();
    let [outputs, _] = weight.shape().dims();
    let config = epilogue.config;
    let outputs = outputs / config.parts();
    let client = x.client.clone();
    let y = empty_like(&x, Shape::from([rows, outputs]), x.dtype);
    if rows * outputs == 0 {
        return y;
    }
    let (x, weight) = (into_contiguous(x), into_contiguous(weight));
    let bias = epilogue.bias.or_stand_in(&x).into_buffer_arg();
    let residual = epilogue.residual.or_stand_in(&x).into_buffer_arg();
    // SAFETY: shapes were checked, and the kernels guard their writes.
    unsafe {
        if strategy == LinearStrategy::TensorCore {
            let tiles = rows.div_ceil(8);
            let blueprint = tensor_core::Blueprint::new(
                tiles,
                outputs * config.parts(),
                processors(&client),
                is_cuda(&client),
                config,
            );
            tensor_core::tensor_core_kernel::launch_unchecked(
                &client,
                grid(outputs.div_ceil(blueprint.outputs())),
                CubeDim::new_1d(32 * tensor_core::PLANES as u32),
                x.clone().into_buffer_arg(),
                weight.into_buffer_arg(),
                ProductOutputsLaunch::new(
                    bias,
                    residual,
                    y.clone().into_buffer_arg(),
                    rows,
                    outputs,
                ),
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
                ProductOutputsLaunch::new(
                    bias,
                    residual,
                    y.clone().into_buffer_arg(),
                    rows,
                    outputs,
                ),
                inputs / lanes,
                plain::Blueprint { tile: rows.next_power_of_two().min(8), team, epilogue: config },
                elem_type(x.dtype),
            );
        }
    }
    y
}

/// [`skinny`] on Hopper, for f16 and bf16. Where there is a `gain`, the rows are normalised first.
/// Results are added over `peers`.
#[cfg(feature = "cuda")]
pub(super) fn streamed(
    x: CubeTensor,
    weight: CubeTensor,
    gain: OptionalFloat<CubeBackend>,
    epsilon: f32,
    epilogue: Epilogue<CubeBackend>,
    peers: PeerArgs<CubeBackend>,
) -> CubeTensor {
    let [rows, inputs] = x.shape().dims();
    let config = epilogue.config;
    let outputs = weight.shape()[0] / config.parts();
    let y = empty_like(&x, Shape::from([rows, outputs]), x.dtype);
    if rows * outputs == 0 {
        return y;
    }
    let units = outputs.div_ceil(hopper_skinny::unit_outputs(config));
    let cubes = processors(&x.client).min(units);
    let blueprint = hopper_skinny::Blueprint::new(
        [rows, outputs, cubes],
        ptx_name(x.dtype),
        gain.as_ref().is_some(),
        config,
        peers.group,
    );
    let x = with_rows(x);
    let weight = tiles(with_rows(weight), blueprint.weight_rows());
    // SAFETY: shapes were checked, and the kernel guards its writes.
    unsafe {
        hopper_skinny::skinny_kernel::launch_unchecked(
            &x.client.clone(),
            grid(cubes),
            CubeDim::new_1d(hopper_skinny::CUBE as u32),
            tiles(x.clone(), blueprint.rows()),
            weight.with_prefetch(TensorMapPrefetch::B256),
            hopper_skinny::StreamedRowsLaunch::new(
                gain.or_stand_in(&x).into_buffer_arg(),
                epsilon,
                inputs,
                units,
                cubes,
            ),
            ProductOutputsLaunch::new(
                epilogue.bias.or_stand_in(&x).into_buffer_arg(),
                epilogue.residual.or_stand_in(&x).into_buffer_arg(),
                y.clone().into_buffer_arg(),
                rows,
                outputs,
            ),
            PeerSlotsLaunch::new(
                peers.addresses.or_stand_in(&x).into_buffer_arg(),
                peers.turns.or_stand_in(&x).into_buffer_arg(),
            ),
            blueprint,
            elem_type(x.dtype),
        );
    }
    y
}

/// Some rows `x` `[M, K]` times the transpose of `weight` `[N, K]`, with the epilogue, on Hopper.
/// Cubes share the sums of a tile.
#[cfg(feature = "cuda")]
pub(super) fn split(
    x: CubeTensor,
    weight: CubeTensor,
    epilogue: Epilogue<CubeBackend>,
) -> CubeTensor {
    let [rows, inputs] = x.shape().dims();
    let [width, _] = weight.shape().dims();
    let config = epilogue.config;
    let outputs = width / config.parts();
    let y = empty_like(&x, Shape::from([rows, outputs]), x.dtype);
    if rows * outputs == 0 {
        return y;
    }
    let client = x.client.clone();
    let tiling = Tiling::of([rows, width, inputs], processors(&client), true);
    let (parts, dtype) = (tiling.parts, x.dtype);
    let sums = empty_like(&x, Shape::from([parts, rows, width]), DType::F32);
    multiply(x.clone(), weight, sums.clone(), tiling);
    // SAFETY: shapes were checked, and the kernel guards its writes.
    unsafe {
        hopper_split::add_parts_kernel::launch_unchecked(
            &client,
            CubeCount::Static((rows * outputs).div_ceil(hopper_split::UNITS) as u32, 1, 1),
            CubeDim::new_1d(hopper_split::UNITS as u32),
            sums.into_buffer_arg(),
            ProductOutputsLaunch::new(
                epilogue.bias.or_stand_in(&x).into_buffer_arg(),
                epilogue.residual.or_stand_in(&x).into_buffer_arg(),
                y.clone().into_buffer_arg(),
                rows,
                outputs,
            ),
            parts,
            config,
            elem_type(dtype),
        );
    }
    y
}

/// Many rows `x` `[M, K]` times the transpose of `weight` `[N, K]`, on Hopper.
#[cfg(feature = "cuda")]
pub(super) fn wide(x: CubeTensor, weight: CubeTensor) -> CubeTensor {
    let [rows, inputs] = x.shape().dims();
    let [outputs, _] = weight.shape().dims();
    let output = empty_like(&x, Shape::from([rows, outputs]), x.dtype);
    let tiling = Tiling::of([rows, outputs, inputs], processors(&x.client), false);
    multiply(x, weight, output.clone(), tiling);
    output
}

/// Writes the product of `x` `[M, K]` and the transpose of `weight` `[N, K]` to `output`
/// `[parts, M, N]`.
#[cfg(feature = "cuda")]
fn multiply(x: CubeTensor, weight: CubeTensor, output: CubeTensor, tiling: Tiling) {
    let [rows, inputs] = x.shape().dims();
    let [outputs, _] = weight.shape().dims();
    let (client, dtype) = (x.client.clone(), x.dtype);
    let Tiling { rows: high, columns, parts, blocks } = tiling;
    let blueprint = hopper_wide::Blueprint { rows: high, columns, name: ptx_name(dtype) };
    // SAFETY: shapes were checked, and the kernel guards its writes.
    unsafe {
        hopper_wide::product_kernel::launch_unchecked(
            &client,
            CubeCount::Static(tiling.tiles(rows, outputs) as u32, parts as u32, 1),
            CubeDim::new_1d(hopper_wide::UNITS as u32),
            blueprint.sums(),
            tiles(with_rows(x), high),
            tiles(with_rows(weight), columns),
            output.clone().into_buffer_arg(),
            hopper_wide::ProductSizeLaunch::new(
                rows as u32,
                outputs as u32,
                inputs as u32,
                blocks as u32,
            ),
            blueprint,
            elem_type(dtype),
            elem_type(output.dtype),
        );
    }
}

#[cfg(feature = "cuda")]
fn ptx_name(dtype: DType) -> &'static str {
    if dtype == DType::F16 { "f16" } else { "bf16" }
}
