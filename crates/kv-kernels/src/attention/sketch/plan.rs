//! How many cubes share each range, and how many planes or units a cube has.

use burn_cubecl::tensor::CubeTensor;

use super::shape::SketchShape;
use crate::attention::decode::blueprint::{KvSplit, MMA_KEYS};
use crate::attention::decode::plan::fit_clusters;
use crate::backend::client::processors;
use crate::backend::strategy::DeviceTraits;
use crate::components::cluster::LARGEST_CLUSTER;

/// The layout of a call on the device.
#[derive(Debug, Clone, Copy)]
pub(super) struct Plan {
    pub(super) kernel: Kernel,
    /// Parts of each range, and where their sums go.
    pub(super) splits: usize,
    pub(super) parts: KvSplit,
    /// Entries that shared memory has room for, or 0.
    pub(super) staged: usize,
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Kernel {
    /// Matrix instructions, with `planes` planes a cube.
    Tiles {
        planes: usize,
    },
    Plain(Plain),
}

/// The portable kernel's sizes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Plain {
    /// Elements of a vector.
    pub(super) lanes: usize,
    /// Units that share a row.
    pub(super) team: usize,
    pub(super) units: usize,
    pub(super) plane: usize,
    /// Query heads whose rows are reduced in shared memory at a time.
    pub(super) joined: usize,
}

/// Planes of a cube for matrix instructions, and cubes on a processor: the registers of twelve
/// planes fill it. Fewer cubes read a range's sketch fewer times.
const LAYOUTS: [(usize, usize); 3] = [(12, 1), (6, 2), (4, 3)];
/// [`LAYOUTS`] for wide head dims, whose rows take more registers.
const WIDE: [(usize, usize); 2] = [(8, 1), (4, 2)];
/// The widest head dim of [`LAYOUTS`].
const NARROW: usize = 128;
/// The cost of combining parts, in halves of the time of a plane's tile: by the cubes of a cluster,
/// and by a launch.
const JOINING: [usize; 2] = [1, 2];

/// Units of a cube of the portable kernel. The widest cube that has room is taken: it has a
/// processor to itself, and reads its range's sketch once.
const UNITS: [usize; 3] = [512, 256, 128];
/// Ranges for each processor from which on the narrowest cubes are taken: one cube begins or ends
/// while others multiply.
const MANY: usize = 6;
/// How many of the narrowest cubes run on a processor at once.
const NARROWEST_EACH: usize = 3;
/// The fewest tokens of a part of the portable kernel: below that a cube is not worthwhile.
const SMALLEST_PART: usize = 128;
/// The cost of combining parts by another launch, in tokens that a cube reads in that time.
const LAUNCH: usize = 256;
/// The most waves of cubes in which parts may fill processors that the last wave leaves idle.
const MOST_WAVES: usize = 4;

impl Plan {
    /// The layout and number of parts with the fewest tiles one after another, among those whose
    /// parts meet in a way that `serves`; `None` where there is none.
    pub(super) fn tiles(
        device: &DeviceTraits,
        shape: &SketchShape,
        serves: impl Fn(KvSplit) -> bool,
    ) -> Option<Self> {
        let SketchShape { head_dim, total_kv_heads, group, longest, .. } = *shape;
        let room = device.shared_memory;
        // One entry more, of zeros.
        let entries = (shape.entries + 1).next_multiple_of(16);
        let layouts = if head_dim <= NARROW { &LAYOUTS[..] } else { &WIDE[..] };
        let bytes = |planes: usize, staged: usize| {
            // Sums of the planes, and sums that a cluster's cubes send each other, rounded up.
            let rows = (planes + 1) * group * head_dim;
            let heads = (16 * planes + 2 * group) + (2 * group + 1) * LARGEST_CLUSTER;
            (rows + heads) * size_of::<f32>() + 2 * staged * head_dim * shape.size
        };
        let fits = |(planes, each): (usize, usize), staged| bytes(planes, staged) * each <= room;
        let staged = if layouts.iter().any(|&layout| fits(layout, entries)) { entries } else { 0 };
        let tiles = longest.div_ceil(MMA_KEYS).max(1);
        let joins = |splits: usize, each: usize| {
            let clusters = device.clusters && each == 1 && splits <= LARGEST_CLUSTER;
            clusters && fit_clusters(device.processors, splits, total_kv_heads)
        };
        let (mut best, mut fewest) = (None, usize::MAX);
        for &(planes, each) in layouts.iter().filter(|&&layout| fits(layout, staged)) {
            let at_once = device.processors * each;
            for splits in 1..=(at_once / total_kv_heads).min(tiles.div_ceil(planes)).max(1) {
                let waves = (total_kv_heads * splits).div_ceil(at_once);
                let steps = 2 * waves * tiles.div_ceil(splits * planes);
                let ways = match splits {
                    1 => [Some((KvSplit::None, 0)), None],
                    _ => [
                        joins(splits, each).then_some((KvSplit::Cluster(splits), JOINING[0])),
                        Some((KvSplit::Global, JOINING[1])),
                    ],
                };
                for (parts, joining) in ways.into_iter().flatten() {
                    if serves(parts) && steps + joining < fewest {
                        fewest = steps + joining;
                        let kernel = Kernel::Tiles { planes };
                        best = Some(Self { kernel, splits, parts, staged });
                    }
                }
            }
        }
        best
    }

    /// The layout and number of parts of the portable kernel.
    pub(super) fn plain(query: &CubeTensor, shape: &SketchShape) -> Self {
        let SketchShape { head_dim, size, total_kv_heads, group, entries, buckets, longest } =
            *shape;
        let hardware = &query.client.properties().hardware;
        // Rows are read in pieces of 16 bytes, where the device has them; entries in vectors of
        // four.
        let lanes = query
            .client
            .properties()
            .io_optimized_vector_sizes(size)
            .find(|lanes| head_dim.is_multiple_of(*lanes) && lanes.is_multiple_of(4))
            .unwrap_or(4);
        // A small team exchanges less. A large team keeps queries and sums in registers.
        let plane = (hardware.plane_size_min as usize).clamp(1, 32);
        let most = plane.min((head_dim / lanes).next_power_of_two());
        let mut team = 8.min(most);
        while team < most && group * head_dim / team > 32 {
            team *= 2;
        }
        let room = hardware.max_shared_memory_size;
        let rows = |units: usize, heads: usize| units / plane * heads * head_dim * size_of::<f32>();
        // The rows of all heads at once, where they take at most half of the shared memory.
        let joined = |units: usize| if 2 * rows(units, group) <= room { group } else { 1 };
        let bytes = |units: usize, entries: usize| {
            let sums = units / plane * 2 * group * size_of::<f32>();
            let places = units * buckets * size_of::<u32>();
            rows(units, joined(units)) + sums + places + 2 * entries * head_dim * size
        };
        let widest = hardware.max_units_per_cube as usize;
        let entries = entries.next_multiple_of(16);
        let processors = processors(&query.client);
        let narrowest = UNITS[UNITS.len() - 1];
        let many = total_kv_heads >= MANY * processors
            && bytes(narrowest, entries) * NARROWEST_EACH <= room;
        let able = |entries: usize| {
            let fits = |units: usize| units <= widest && bytes(units, entries) <= room;
            UNITS
                .into_iter()
                .filter(|&units| !many || units == narrowest)
                .find(|&units| fits(units))
        };
        let (units, staged) = match able(entries) {
            Some(units) => (units, entries),
            None => (able(0).unwrap_or(narrowest), 0),
        };
        // The registers of a processor serve as many units as the widest cube has.
        let at_once = processors * UNITS[0] / units;
        let most_splits =
            (longest / SMALLEST_PART).min(MOST_WAVES * at_once / total_kv_heads).max(1);
        // Takes the fewest tokens one after another, and among equals the fewest parts.
        let tokens = |splits: usize| {
            let joining = if splits > 1 { LAUNCH } else { 0 };
            (total_kv_heads * splits).div_ceil(at_once) * longest.div_ceil(splits) + joining
        };
        let splits = (1..=most_splits).min_by_key(|&splits| tokens(splits)).unwrap_or(1);
        let parts = if splits > 1 { KvSplit::Global } else { KvSplit::None };
        let joined = joined(units);
        let kernel = Kernel::Plain(Plain { lanes, team, units, plane, joined });
        Self { kernel, splits, parts, staged }
    }
}
