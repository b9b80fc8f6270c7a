//! The launch on CubeCL devices.

use burn::backend::{DType, Shape, TensorMetadata};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::kernel::{Blueprint, sketch_attention_kernel};
use super::{pairs, sums};
use crate::decode_attention::launch::combine;
use crate::extension::{SketchAttended, SketchTokens};
use crate::gpu::{elem_type, empty_like, grid, multiplies, processors};

/// Tokens below which a part is not worth a cube.
const SMALLEST_PART: usize = 128;
/// Rows that a team takes at a time, at most: as many as registers allow.
const AHEAD: usize = 4;
/// Cubes on a processor, about, where little shared memory is taken.
const CUBES_EACH: usize = 4;
/// The same, of those that multiply by matrix instructions, which take more registers.
const PAIRED_EACH: usize = 3;
/// Units of a cube that has a processor to itself, and of others.
const UNITS: [usize; 2] = [512, 128];

#[allow(clippy::too_many_arguments)]
pub(crate) fn run(
    query: CubeTensor,
    keys: CubeTensor,
    values: CubeTensor,
    offsets: CubeTensor,
    lengths: CubeTensor,
    tokens: SketchTokens<CubeBackend>,
    scale: f32,
    longest: usize,
) -> SketchAttended<CubeBackend> {
    let [query, keys, values, offsets, lengths] =
        [query, keys, values, offsets, lengths].map(into_contiguous);
    let client = query.client.clone();
    let [batch, query_heads, head_dim] = query.shape().dims();
    let [slots, _] = keys.shape().dims();
    let [count] = tokens.scores.shape().dims();
    let pairs = offsets.shape().num_elements();
    let group = batch * query_heads / pairs;
    let sketch = tokens.sketch;
    let plan = Plan::new(&query, group, sketch.most_entries, sketch.config.buckets);
    let splits = plan.splits(&query, pairs, longest + tokens.longest);
    let split = splits > 1;

    let floats = |shape: Shape| empty_like(&query, shape, DType::F32);
    let output = empty_like(&query, query.shape(), query.dtype);
    let log_sum_exp = floats(Shape::from([batch, query_heads]));
    let slot_logits = floats(Shape::from([slots, group]));
    let token_logits = floats(Shape::from([count, group]));
    let parts = if split { pairs * splits * group } else { 1 };
    let partial = floats(Shape::from([parts * head_dim]));
    let stats = floats(Shape::from([parts * 2]));
    let shape = sums::Shape {
        group,
        columns: head_dim / plan.lanes,
        team: plan.team,
        ahead: match plan.paired {
            true => pairs::ROWS,
            false => (plan.team / group.next_power_of_two()).clamp(1, AHEAD),
        },
        paired: plan.paired,
    };
    // SAFETY: shapes were checked; the kernel stays within the slots, entries and tokens that ranges and
    // heads name.
    unsafe {
        sketch_attention_kernel::launch_unchecked(
            &client,
            grid(pairs * splits),
            CubeDim::new_1d(plan.units as u32),
            plan.lanes,
            query.clone().into_buffer_arg(),
            keys.into_buffer_arg(),
            values.into_buffer_arg(),
            offsets.into_buffer_arg(),
            lengths.into_buffer_arg(),
            into_contiguous(sketch.keys).into_buffer_arg(),
            into_contiguous(sketch.values).into_buffer_arg(),
            into_contiguous(sketch.heads).into_buffer_arg(),
            into_contiguous(sketch.hashes).into_buffer_arg(),
            into_contiguous(tokens.scores).into_buffer_arg(),
            into_contiguous(tokens.newest).into_buffer_arg(),
            output.clone().into_buffer_arg(),
            log_sum_exp.clone().into_buffer_arg(),
            slot_logits.clone().into_buffer_arg(),
            token_logits.clone().into_buffer_arg(),
            partial.clone().into_buffer_arg(),
            stats.clone().into_buffer_arg(),
            pairs,
            pairs / batch,
            splits,
            scale,
            Blueprint {
                shape,
                units: plan.units,
                plane: plan.plane,
                joined: plan.joined,
                lanes: plan.lanes,
                split,
                staged: plan.staged,
                sketch: sketch.config,
            },
            elem_type(query.dtype),
        );
    }
    if split {
        combine([&partial, &stats], [&output, &log_sum_exp], pairs, splits, true);
    }
    SketchAttended { output, log_sum_exp, slot_logits, token_logits }
}

/// How a call is laid out on the device.
struct Plan {
    /// Elements of a vector.
    lanes: usize,
    team: usize,
    units: usize,
    plane: usize,
    joined: usize,
    /// Whether matrix instructions multiply keys by queries.
    paired: bool,
    /// Entries in shared memory, if any.
    staged: usize,
}

impl Plan {
    fn new(query: &CubeTensor, group: usize, most_entries: usize, buckets: usize) -> Self {
        let [_, _, head_dim] = query.shape().dims();
        let hardware = &query.client.properties().hardware;
        let size = query.dtype.size();
        // Rows in pieces of 16 bytes, where the device has them; entries come in fours.
        let lanes = query
            .client
            .properties()
            .io_optimized_vector_sizes(size)
            .find(|lanes| head_dim.is_multiple_of(*lanes) && lanes.is_multiple_of(4))
            .unwrap_or(4);
        // Few units a row exchange less; enough of them keep queries and sums in registers.
        let plane = (hardware.plane_size_min as usize).clamp(1, 32);
        let most = plane.min((head_dim / lanes).next_power_of_two());
        let mut team = 8.min(most);
        while team < most && group * head_dim / team > 32 {
            team *= 2;
        }
        let paired = multiplies(query)
            && lanes == pairs::LANES
            && (2..=pairs::HEADS).contains(&group)
            && [64, 128].contains(&head_dim);
        if paired {
            team = pairs::TEAM;
        }
        let room = hardware.max_shared_memory_size;
        // All heads' rows at once, where they leave room for as much again.
        let rows = UNITS[1] / plane * group * head_dim * size_of::<f32>();
        let joined = if 2 * rows <= room { group } else { 1 };
        let bytes = |units: usize, entries: usize| {
            let rows = units / plane * (joined * head_dim + 2 * group) * size_of::<f32>();
            let places = units * buckets * size_of::<u32>();
            rows + places + 2 * entries * head_dim * size
        };
        let entries = most_entries.next_multiple_of(16);
        let fits = |units: usize, cubes: usize| bytes(units, entries) * cubes <= room;
        let [many, few] = UNITS;
        let many = many.min(hardware.max_units_per_cube as usize);
        let (units, staged) = if fits(few, CUBES_EACH) {
            (few, entries)
        } else if fits(many, 1) {
            (many, entries)
        } else {
            (few, 0)
        };
        Self { lanes, team, units, plane, joined, paired, staged }
    }

    /// Parts of each of `pairs` ranges of up to `longest` rows.
    fn splits(&self, query: &CubeTensor, pairs: usize, longest: usize) -> usize {
        let processors = processors(&query.client);
        let each = match self.paired {
            _ if self.units > UNITS[1] => 1,
            true => PAIRED_EACH,
            false => CUBES_EACH,
        };
        if 2 * pairs >= processors * each {
            return 1;
        }
        (processors * each / pairs).min(longest / SMALLEST_PART).max(1)
    }
}
