//! Which kernel, and into how many parts each range is split.

use burn::backend::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::features::MmaConfig;
use cubecl::ir::ElemType;

use super::{plain, tensor_core};

/// What launches the attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kernel {
    /// Matrix instructions, with values read in vectors of so many 32-bit words.
    TensorCore { words: usize, planes: usize },
    /// Vectors of so many elements, rows shared by teams of so many units.
    Plain { lanes: usize, team: usize },
}

/// Cubes that a processor works on at a time, about.
const CUBES_EACH: usize = 4;
/// Processors to assume where the device does not tell.
const PROCESSORS: usize = 64;
/// Slots below which a part is not worth a cube.
const SMALLEST_PART: usize = 64;

/// The kernel for a query `[B, Hq, D]`.
pub(super) fn kernel(query: &CubeTensor, head_dim: usize, group: usize) -> Kernel {
    let properties = query.client.properties();
    let hardware = &properties.hardware;
    let elem: ElemType = burn::backend::cubecl::dtype_to_storage_type(query.dtype);
    let product = MmaConfig {
        a_type: elem,
        b_type: elem,
        cd_type: burn::backend::cubecl::dtype_to_storage_type(DType::F32),
        m: 16,
        n: 8,
        k: 16,
    };
    let planes_of_32 = hardware.plane_size_min == 32 && hardware.plane_size_max == 32;
    let multiplies = properties.features.matmul.mma.contains(&product);
    if multiplies && planes_of_32 && head_dim.is_multiple_of(32) {
        let words = if head_dim.is_multiple_of(64) { 4 } else { 2 };
        // More planes a cube leave fewer partial results, as far as registers reach.
        let planes = if head_dim <= 128 { 8 } else { 4 };
        return Kernel::TensorCore { words, planes };
    }
    let lanes = query
        .client
        .properties()
        .io_optimized_vector_sizes(query.dtype.size())
        .find(|lanes| head_dim.is_multiple_of(*lanes) && *lanes <= 4)
        .unwrap_or(1);
    // Few units a row exchange less; enough of them keep queries and sums in registers.
    let most = (hardware.plane_size_min as usize).min(32);
    let mut team = 8.min(most).min((head_dim / lanes).next_power_of_two());
    while team < most && group * head_dim / team > 64 {
        team *= 2;
    }
    Kernel::Plain { lanes, team: team.max(1) }
}

/// Parts of each of `pairs` ranges of up to `longest` slots.
pub(super) fn splits(query: &CubeTensor, kernel: Kernel, pairs: usize, longest: usize) -> usize {
    let hardware = &query.client.properties().hardware;
    let processors = hardware.num_streaming_multiprocessors.map_or(PROCESSORS, |n| n as usize);
    let (each, part) = match kernel {
        Kernel::TensorCore { planes, .. } => (CUBES_EACH * 4 / planes, planes * tensor_core::TILE),
        Kernel::Plain { .. } => (CUBES_EACH, SMALLEST_PART.max(plain::UNITS / 2)),
    };
    // One part where the ranges alone fill the device.
    if 2 * pairs >= processors * each {
        return 1;
    }
    (processors * each / pairs).min(longest / part).max(1)
}
