//! Which kernel, and into how many parts each range is split.

use std::ops::RangeInclusive;

use burn_cubecl::tensor::CubeTensor;

use super::{DecodeStrategy, blueprint, plain};
use crate::backend::strategy::DeviceTraits;
use crate::components::cluster::LARGEST_CLUSTER;

/// What launches the attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kernel {
    /// Matrix instructions, with values read in vectors of so many 32-bit words, by so many planes.
    TensorCore { words: usize, planes: usize },
    /// Vectors of so many elements, rows shared by teams of so many units.
    Plain { lanes: usize, team: usize },
}

/// Cubes on a processor: of the kernel for matrix instructions, which takes the room for two, and
/// of the portable one, about.
const CUBES_EACH: [usize; 2] = [2, 5];
/// Slots below which a part is not worth a cube.
const SMALLEST_PART: usize = 64;

/// The kernel of a chosen strategy for a query `[B, Hq, D]`.
pub(crate) fn kernel(
    query: &CubeTensor,
    strategy: DecodeStrategy,
    head_dim: usize,
    group: usize,
) -> Kernel {
    let hardware = &query.client.properties().hardware;
    if strategy != DecodeStrategy::Portable {
        return tensor_core(head_dim);
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
    // Teams leave a row each in shared memory.
    let shared = hardware.max_shared_memory_size / size_of::<f32>();
    while team < most && plain::UNITS / team.max(1) * (head_dim + 2) > shared {
        team *= 2;
    }
    Kernel::Plain { lanes, team: team.max(1) }
}

/// The kernel for matrix instructions, for rows of head dims that it serves.
pub(crate) fn tensor_core(head_dim: usize) -> Kernel {
    let words = if head_dim.is_multiple_of(64) { 4 } else { 2 };
    Kernel::TensorCore { words, planes: blueprint::PLANES }
}

/// Numbers of shared memory that a cube takes: as many as let no third find room on a processor, or
/// as leave the half where a cube is alone there.
pub(crate) fn room(device: &DeviceTraits, kernel: Kernel) -> usize {
    let most = device.shared_memory / size_of::<f32>();
    match kernel {
        Kernel::TensorCore { planes, .. } if planes > blueprint::PLANES => most / 2,
        _ => most / 3,
    }
}

/// Parts of each of `total_kv_heads` ranges of up to `longest` slots, and with how many planes a
/// cube.
pub(crate) fn splits(
    processors: usize,
    kernel: Kernel,
    total_kv_heads: usize,
    longest: usize,
) -> (usize, Kernel) {
    match kernel {
        Kernel::TensorCore { words, planes } => {
            match parts(processors, total_kv_heads, longest) {
                // Twice the planes do what two parts would, and nothing is to be joined.
                2 => (1, Kernel::TensorCore { words, planes: 2 * planes }),
                splits => (splits, kernel),
            }
        }
        Kernel::Plain { .. } => {
            let part = SMALLEST_PART.max(plain::UNITS / 2);
            (filling(processors * CUBES_EACH[1], part, total_kv_heads, longest), kernel)
        }
    }
}

/// Parts of each range for cubes of [`blueprint::PLANES`] planes.
pub(super) fn parts(processors: usize, total_kv_heads: usize, longest: usize) -> usize {
    // Two tiles a plane: of parts as small as one, joining costs more than reading.
    let part = 2 * blueprint::PLANES * blueprint::MMA_KEYS;
    filling(processors * CUBES_EACH[0], part, total_kv_heads, longest)
}

/// Parts of ranges, of at least `part` slots each, that make about so many `cubes`.
fn filling(cubes: usize, part: usize, total_kv_heads: usize, longest: usize) -> usize {
    // One part where the ranges alone fill the device.
    if 2 * total_kv_heads >= cubes {
        return 1;
    }
    (cubes / total_kv_heads).min(longest / part).max(1)
}

/// Cubes that a cluster may have, of which the most that fit are taken.
const CLUSTERS: RangeInclusive<usize> = 2..=LARGEST_CLUSTER;
/// Slots that a cube may read more than if no processor were idle, of a range and of a list:
/// reading them takes as long as another launch, which joins parts that are written.
const MOST_MORE: [usize; 2] = [100, 200];

/// Planes of a cube of a cluster, which has a processor to itself.
pub(super) const CLUSTER_PLANES: usize = 2 * blueprint::PLANES;

/// Cubes of a cluster that join the parts of each range in one launch, where a device can do that.
pub(super) fn cluster(
    device: &DeviceTraits,
    total_kv_heads: usize,
    longest: usize,
) -> Option<usize> {
    let fits = |&cubes: &usize| {
        fit_clusters(device.processors, cubes, total_kv_heads)
            && longest >= cubes * CLUSTER_PLANES * blueprint::MMA_KEYS
    };
    CLUSTERS.rev().find(fits).filter(|_| device.clusters)
}

/// Whether so many `clusters` of `cubes`, of which each takes a processor, are under way at once.
/// Processors come in pairs, and larger clusters must find theirs within a group of sixteen or
/// eighteen, not all of which are there: a second wave would take as long again.
pub(crate) fn fit_clusters(processors: usize, cubes: usize, clusters: usize) -> bool {
    clusters <= if cubes == 2 { processors / 2 } else { processors / cubes * 7 / 8 }
}

/// Whether clusters of so many `cubes` are worth the processors that they leave idle.
pub(super) fn pays(
    processors: usize,
    cubes: usize,
    total_kv_heads: usize,
    longest: usize,
    listed: bool,
) -> bool {
    let most_more = MOST_MORE[usize::from(listed)];
    longest / cubes <= total_kv_heads * longest / processors + most_more
}

/// The fewest places for which shared memory is taken.
const SMALLEST_LIST: usize = 1_024;
/// Planes of the kernel for matrix instructions that a processor has registers for.
const PLANES_EACH: usize = 12;

/// For lists of up to `longest` places that cubes choose themselves, where heads are many: cubes of
/// so few planes that all are under way at once, as one behind another would have to choose first.
/// (Given lists are read faster by fewer, wider cubes.) Their places take no more shared memory
/// than needed, since reads under way take the rest of it, which is the first cache.
pub(crate) fn for_choices(
    device: &DeviceTraits,
    kernel: Kernel,
    total_kv_heads: usize,
    longest: usize,
) -> Option<ChoicePlan> {
    let Kernel::TensorCore { words, planes } = kernel else { return None };
    let each = total_kv_heads.div_ceil(device.processors);
    let fewer = PLANES_EACH / each.max(1);
    if fewer >= planes || fewer < 2 {
        return None;
    }
    // A cube less than would fit, for what compilers and devices take.
    let most = device.shared_memory / size_of::<f32>() / (each + 1);
    // One of few sizes, as each is a kernel of its own.
    let room = longest.next_power_of_two().max(SMALLEST_LIST);
    let kernel = Kernel::TensorCore { words, planes: fewer };
    (room <= most).then_some(ChoicePlan { kernel, room, most })
}

/// A kernel for choices, and the numbers of shared memory of its cubes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ChoicePlan {
    pub(crate) kernel: Kernel,
    /// For places and sums.
    pub(crate) room: usize,
    /// The most that a cube may take in all, so that none waits for another to end.
    pub(crate) most: usize,
}
