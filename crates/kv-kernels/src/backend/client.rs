//! CubeCL devices: their properties, grids of cubes, vector widths, and new tensors.

use burn::backend::{DType, Shape};
use burn_cubecl::CubeDevice;
use burn_cubecl::ops::numeric::{empty_device_contiguous_dtype, zeros_client};
use burn_cubecl::ops::reshape;
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use cubecl::features::MmaConfig;
use cubecl::prelude::*;

/// Assumed processors of a device that does not report them, as through wgpu. The number is large:
/// too many parts cost a small device less than idle processors cost a large one.
const UNKNOWN_PROCESSORS: usize = 128;

/// Processors of the device, which run cubes.
pub(crate) fn processors(client: &Client) -> usize {
    client
        .properties()
        .hardware
        .num_streaming_multiprocessors
        .map_or(UNKNOWN_PROCESSORS, |count| count as usize)
}

/// The most planes of a cube of `units` units.
pub(crate) fn planes_of(client: &Client, units: usize) -> usize {
    units.div_ceil((client.properties().hardware.plane_size_min as usize).max(1))
}

/// The most units of a plane of a software driver, which runs a plane as one vector of a CPU.
const CPU_PLANE: u32 = 8;

/// How many turns of a loop a kernel unrolls, so that the reads of all of them are under way at
/// once: `most` on a GPU, and one on a software driver. There, reads under way at once hide no
/// latency, and the code of each further turn takes the driver about as long to compile as the code
/// of the first.
pub(crate) fn unrolled(client: &Client, most: usize) -> usize {
    if client.properties().hardware.plane_size_max <= CPU_PLANE { 1 } else { most }
}

/// The units of the widest cube, a power of two, and the most planes that it has.
pub(crate) fn widest_cube(client: &Client) -> (usize, usize) {
    let hardware = &client.properties().hardware;
    let most = (hardware.max_units_per_cube as usize).min(1024);
    let units = 1 << most.ilog2();
    (units, units / (hardware.plane_size_min as usize).clamp(1, units))
}

/// A grid of at least `count` cubes, folded where a grid dimension has its limit. Kernels end the
/// surplus cubes.
pub(crate) fn grid(count: usize) -> CubeCount {
    const LIMIT: usize = 65_535;
    let rows = count.div_ceil(LIMIT).max(1);
    CubeCount::Static(count.div_ceil(rows) as u32, rows as u32, 1)
}

/// The widest vector (16 bytes at most, on devices that have it) that divides a row and its stride.
pub(crate) fn vector_lanes(tensor: &CubeTensor, width: usize, stride: usize) -> usize {
    tensor
        .client
        .properties()
        .io_optimized_vector_sizes(tensor.dtype.size())
        .find(|lanes| width.is_multiple_of(*lanes) && stride.is_multiple_of(*lanes))
        .unwrap_or(1)
}

/// Whether the device has the matrix instructions that kernels use for a dtype, in planes of 32:
/// products of 16 by 16 and 16 by 8, summed in f32.
pub(crate) fn multiplies(client: &Client, dtype: DType) -> bool {
    if !matches!(dtype, DType::F16 | DType::BF16) {
        return false;
    }
    let properties = client.properties();
    let hardware = &properties.hardware;
    let elem = elem_type(dtype);
    let product = MmaConfig {
        a_type: elem,
        b_type: elem,
        cd_type: elem_type(DType::F32),
        m: 16,
        n: 8,
        k: 16,
    };
    let planes_of_32 = hardware.plane_size_min == 32 && hardware.plane_size_max == 32;
    planes_of_32 && properties.features.matmul.mma.contains(&product)
}

/// Whether kernels may contain PTX for compute capability 9.0.
pub(crate) fn is_hopper(client: &Client) -> bool {
    client.properties().identity.fingerprint == "ptx_sm90"
}

/// Whether kernels may contain PTX.
pub(crate) fn is_cuda(client: &Client) -> bool {
    client.properties().identity.fingerprint.starts_with("ptx_sm")
}

pub(crate) fn elem_type(dtype: DType) -> ElemType {
    burn::backend::cubecl::dtype_to_storage_type(dtype)
}

pub(crate) fn empty_like(like: &CubeTensor, shape: Shape, dtype: DType) -> CubeTensor {
    empty_device_contiguous_dtype(like.client.clone(), like.device.clone(), shape, dtype)
}

/// A buffer that a kernel binds and does not read, as long as any vector.
pub(crate) fn unread_like(like: &CubeTensor) -> CubeTensor {
    empty_like(like, Shape::from([16]), DType::F32)
}

/// Zeros without padding between rows: the tensor is allocated flat, then reshaped.
pub(crate) fn zeros_like(like: &CubeTensor, shape: [usize; 2]) -> CubeTensor {
    let flat = Shape::from([shape.iter().product::<usize>()]);
    let (client, device) = (like.client.clone(), CubeDevice::clone(&like.device));
    reshape(zeros_client(client, device, flat, DType::F32), Shape::from(shape))
}
