//! How many cubes share each head range (split-KV), by which kernel, and how much shared memory a
//! cube takes.

use std::ops::RangeInclusive;

use burn_cubecl::tensor::CubeTensor;

use super::{blueprint, plain};
use crate::backend::strategy::DeviceTraits;
use crate::components::cluster::LARGEST_CLUSTER;

/// A kernel and the width of its reads and teams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kernel {
    /// Matrix instructions: `planes` planes a cube, which read values in vectors of `words` 32-bit
    /// words.
    TensorCore { words: usize, planes: usize },
    /// Vector instructions: teams of `team` units share a row, in vectors of `lanes` elements.
    Plain { lanes: usize, team: usize },
}

/// Cubes that run on a processor at once: two of the kernel for matrix instructions, which takes
/// shared memory for that, and about five of the portable kernel.
const CUBES_EACH: [usize; 2] = [2, 5];
/// How many times all cubes of ranges of different lengths fill the device, about; and the most
/// parts of a range. More parts end more evenly, but each takes some microseconds to begin, and
/// lengths are not known where a step is recorded: ranges may be short.
const UNEVEN_WAVES: usize = 6;
const MOST_UNEVEN: usize = 8;
/// The fewest slots of a part: below that a cube is not worthwhile.
const SMALLEST_PART: usize = 64;

/// The portable kernel for a query `[B, Hq, D]`.
pub(super) fn portable(query: &CubeTensor, head_dim: usize, group: usize) -> Kernel {
    let hardware = &query.client.properties().hardware;
    let lanes = query
        .client
        .properties()
        .io_optimized_vector_sizes(query.dtype.size())
        .find(|lanes| head_dim.is_multiple_of(*lanes) && *lanes <= 4)
        .unwrap_or(1);
    // A small team exchanges less. A large team keeps queries and sums in registers.
    let most = (hardware.plane_size_min as usize).min(32);
    let mut team = 8.min(most).min((head_dim / lanes).next_power_of_two());
    while team < most && group * head_dim / team > 64 {
        team *= 2;
    }
    // Each team leaves one row in shared memory.
    let shared = hardware.max_shared_memory_size / size_of::<f32>();
    while team < most && plain::UNITS / team.max(1) * (head_dim + 2) > shared {
        team *= 2;
    }
    Kernel::Plain { lanes, team: team.max(1) }
}

/// The kernel for matrix instructions in a head dim that it serves.
pub(crate) fn tensor_core(head_dim: usize) -> Kernel {
    let words = if head_dim.is_multiple_of(64) { 4 } else { 2 };
    Kernel::TensorCore { words, planes: blueprint::PLANES }
}

/// The 32-bit numbers of shared memory that a cube takes. With a third of the memory and a little
/// more, only two cubes fit on a processor. A cube that has a processor to itself takes half.
pub(crate) fn room(device: &DeviceTraits, kernel: Kernel) -> usize {
    let most = device.shared_memory / size_of::<f32>();
    match kernel {
        Kernel::TensorCore { planes, .. } if planes > blueprint::PLANES => most / 2,
        _ => most / 3,
    }
}

/// The parts of each range, and the kernel that attends to them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Layout {
    /// Parts of a range.
    pub(crate) splits: usize,
    pub(crate) kernel: Kernel,
    /// The 32-bit numbers of shared memory that a cube takes, at least.
    pub(crate) room: usize,
}

impl Layout {
    /// The layout in which a launch behind joins the parts of a range, where there are several.
    pub(crate) fn of(
        device: &DeviceTraits,
        kernel: Kernel,
        total_kv_heads: usize,
        longest: usize,
    ) -> Self {
        let (splits, kernel) = splits(device.processors, kernel, total_kv_heads, longest);
        Self { splits, kernel, room: room(device, kernel) }
    }

    /// The layout for ranges of very different lengths in a pool of `slots` slots, such as
    /// sequences that come and go; `None` where lengths may be alike. Each range has several parts,
    /// so that no cube reads much longer than the others.
    pub(crate) fn uneven(
        device: &DeviceTraits,
        kernel: Kernel,
        total_kv_heads: usize,
        longest: usize,
        slots: usize,
    ) -> Option<Self> {
        let Kernel::TensorCore { .. } = kernel else { return None };
        let cubes = UNEVEN_WAVES * CUBES_EACH[0] * device.processors;
        let splits = (cubes / total_kv_heads.max(1)).min(MOST_UNEVEN);
        let differ = 2 * slots < total_kv_heads * longest;
        (differ && splits > 1).then(|| Self { splits, kernel, room: room(device, kernel) })
    }

    /// The layout in which clusters join the parts of a range in the attention's launch; `None`
    /// where the device or the ranges do not allow clusters.
    pub(crate) fn clustered(
        device: &DeviceTraits,
        kernel: Kernel,
        total_kv_heads: usize,
        longest: usize,
    ) -> Option<Self> {
        let Kernel::TensorCore { words, .. } = kernel else { return None };
        let splits = cluster(device, total_kv_heads, longest)?;
        let kernel = Kernel::TensorCore { words, planes: CLUSTER_PLANES };
        Some(Self { splits, kernel, room: room(device, kernel) })
    }

    /// Whether shared memory holds the sums of all planes and the logits of a part.
    pub(crate) fn holds_logits(&self, group: usize, head_dim: usize, longest: usize) -> bool {
        let Kernel::TensorCore { planes, .. } = self.kernel else { return false };
        // Logits lie in whole tiles, with a gap between query heads.
        let part = longest.div_ceil(self.splits).next_multiple_of(blueprint::MMA_KEYS);
        (planes * head_dim + blueprint::stride_of(part)) * group <= self.room
    }
}

/// How many parts each of `total_kv_heads` ranges of up to `longest` slots has, and the kernel with
/// its planes a cube.
pub(crate) fn splits(
    processors: usize,
    kernel: Kernel,
    total_kv_heads: usize,
    longest: usize,
) -> (usize, Kernel) {
    match kernel {
        Kernel::TensorCore { words, planes } => {
            match parts(processors, total_kv_heads, longest) {
                // One cube of twice the planes reads as fast as two parts, and has no parts to
                // combine.
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

/// How many parts each range has, for cubes of [`blueprint::PLANES`] planes.
pub(super) fn parts(processors: usize, total_kv_heads: usize, longest: usize) -> usize {
    // Two tiles a plane, at least: with one, combining parts costs more than reading them.
    let part = 2 * blueprint::PLANES * blueprint::MMA_KEYS;
    filling(processors * CUBES_EACH[0], part, total_kv_heads, longest)
}

/// How many parts of at least `part` slots each range has, so that all ranges make about `cubes`
/// cubes.
fn filling(cubes: usize, part: usize, total_kv_heads: usize, longest: usize) -> usize {
    // The ranges alone nearly fill the device.
    if 2 * total_kv_heads >= cubes {
        return 1;
    }
    (cubes / total_kv_heads).min(longest / part).max(1)
}

/// Cluster sizes to try. The largest that fits is taken.
const CLUSTERS: RangeInclusive<usize> = 2..=LARGEST_CLUSTER;
/// By how many slots a cube's part may exceed the part it would have on a device without idle
/// processors: for bare ranges, and where a list or weights are read too. Reading that many slots
/// takes as long as the launch that combines parts. On an H200 (docs/results/kernels.md) clusters
/// take 9.41 µs instead of 9.73 at 1x32x8x4096 (264 more slots) and 17.2 instead of 17.9 at
/// 4x32x8x3200 (291), but 23.7 instead of 21.5 at 1x32x8x16384 (1,055). With weights they take 11.4
/// instead of 11.9 at 2x32x8x3200 (146), but 9.28 instead of 8.98 at 1x32x8x3200 (206).
const MOST_MORE: [usize; 2] = [300, 200];

/// Planes of a cube of a cluster. Such a cube has a processor to itself.
const CLUSTER_PLANES: usize = 2 * blueprint::PLANES;

/// The cubes of a cluster that joins the parts of a range in one launch; `None` where the device or
/// the ranges do not allow clusters.
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

/// Whether `clusters` clusters of `cubes` cubes run at once, one cube a processor. Processors come
/// in pairs, and a larger cluster must find its processors within a group of sixteen or eighteen,
/// of which some are missing. A second wave would double the time.
pub(crate) fn fit_clusters(processors: usize, cubes: usize, clusters: usize) -> bool {
    clusters <= if cubes == 2 { processors / 2 } else { processors / cubes * 7 / 8 }
}

/// Whether clusters of `cubes` cubes are faster, despite the processors that they leave idle.
/// `reads_more`: whether a list or weights are read too.
pub(super) fn pays(
    processors: usize,
    cubes: usize,
    total_kv_heads: usize,
    longest: usize,
    reads_more: bool,
) -> bool {
    let most_more = MOST_MORE[usize::from(reads_more)];
    longest / cubes <= total_kv_heads * longest / processors + most_more
}

/// The fewest list entries for which shared memory is taken.
const SMALLEST_LIST: usize = 1_024;
/// Planes of the kernel for matrix instructions that the registers of a processor suffice for.
const PLANES_EACH: usize = 12;

/// The plan where cubes choose their own lists of up to `longest` slots, and heads are many. Cubes
/// have so few planes that all run at once: in a second wave, a cube would have to choose before it
/// could read. (Lists given by the caller are read faster by fewer, wider cubes.) A list takes no
/// more shared memory than it needs, as the rest of it is the first cache, which holds the reads
/// under way.
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
    // Room for one cube more than needed, since compilers and devices take shared memory too.
    let most = device.shared_memory / size_of::<f32>() / (each + 1);
    // Rounded to a power of two, since each size compiles a kernel of its own.
    let room = longest.next_power_of_two().max(SMALLEST_LIST);
    let kernel = Kernel::TensorCore { words, planes: fewer };
    (room <= most).then_some(ChoicePlan { kernel, room, most })
}

/// A kernel whose cubes choose their own slots, and the shared memory of a cube.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ChoicePlan {
    pub(crate) kernel: Kernel,
    /// The 32-bit numbers for a list, and later for sums.
    pub(crate) room: usize,
    /// The most 32-bit numbers that a cube may take in all, so that all cubes run at once.
    pub(crate) most: usize,
}
