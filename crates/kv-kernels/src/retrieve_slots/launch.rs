//! Launches on CubeCL devices.

use burn::backend::{DType, Shape, TensorMetadata};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::SteerOptions;
use super::kernel::{Blueprint, retrieve_kernel};
use super::steer::steer_kernel;
use crate::decode_attention::plan::PROCESSORS;
use crate::extension::Retrieval;
use crate::gpu::{elem_type, empty_like, grid, is_cuda, vector_lanes};

/// Slots that a cube scores, at most: one range that retrieves must not keep all others waiting.
const PART: usize = 4_096;
/// Slots below which a part is not worth a cube.
const SMALLEST_PART: usize = 128;
/// Cubes on a processor, about.
const CUBES_EACH: usize = 4;
/// Units of a cube that scores, and of one that chooses among many.
const UNITS: usize = 256;
const MOST_UNITS: usize = 1_024;

/// Changes the table in its own buffer.
pub(crate) fn steer(table: CubeTensor, dropped: CubeTensor, options: SteerOptions) -> CubeTensor {
    const UNITS: u32 = 64;
    let (table, dropped) = (into_contiguous(table), into_contiguous(dropped));
    let [pairs, row] = table.shape().dims();
    let [_, group] = dropped.shape().dims();
    // SAFETY: shapes were checked.
    unsafe {
        steer_kernel::launch_unchecked(
            &table.client.clone(),
            grid(pairs.div_ceil(UNITS as usize)),
            CubeDim::new_1d(UNITS),
            table.clone().into_buffer_arg(),
            dropped.into_buffer_arg(),
            pairs,
            row,
            group,
            options.target,
            options.gain,
            options.most as f32,
        );
    }
    table
}

/// Changes table and vectors in their own buffers; returns them with log-sums `[P, G]`.
pub(crate) fn run(retrieval: Retrieval<CubeBackend>) -> (CubeTensor, CubeTensor, CubeTensor) {
    let config = retrieval.config;
    let options = config.options;
    let [query, vectors, keys, set_vectors] =
        [retrieval.query, retrieval.vectors, retrieval.keys, retrieval.set_vectors]
            .map(into_contiguous);
    let [offsets, lengths, newest, table] =
        [retrieval.offsets, retrieval.lengths, retrieval.newest, retrieval.table]
            .map(into_contiguous);
    let client = query.client.clone();
    let hardware = &client.properties().hardware;
    let [batch, query_heads, head_dim] = query.shape().dims();
    let [_, parts, length] = vectors.shape().dims();
    let pairs = offsets.shape().num_elements();
    let group = batch * query_heads / pairs;
    let longest = config.longest.max(1);
    let processors = hardware.num_streaming_multiprocessors.map_or(PROCESSORS, |n| n as usize);
    let fill = (processors * CUBES_EACH / pairs.max(1)).clamp(1, longest.div_ceil(SMALLEST_PART));
    // Where ranges fill the device, parts are joined for nothing.
    let fill = if 2 * pairs >= processors { 1 } else { fill };
    let splits = fill.max(longest.div_ceil(PART));
    let lanes = vector_lanes(&keys, head_dim, head_dim);
    let columns = head_dim / lanes;
    let most = (hardware.plane_size_min as usize).min(32);
    let mut team = 8.min(most).min(columns.next_power_of_two());
    // Few units a row exchange less; enough of them keep queries in registers.
    while team < most && group * head_dim / team > 64 {
        team *= 2;
    }
    let widest = (hardware.max_units_per_cube as usize).min(MOST_UNITS);
    let whole = splits == 1;
    let chooser = if longest > 2 * PART { widest } else { UNITS.min(widest) };
    let blueprint = |units: usize, scores: bool, chooses: bool| Blueprint {
        group,
        columns,
        team,
        units,
        parts,
        length,
        sets: config.sets,
        width: config.width,
        reduction: options.reduction,
        similarity: options.similarity,
        shares: options.block > 1,
        certified: options.certified,
        measures: config.measures,
        scores,
        chooses,
        // CUDA's barrier orders all memory for its cube.
        fenced: !is_cuda(&client),
    };
    let scratch =
        |numbers: usize, dtype: DType| empty_like(&query, Shape::from([numbers.max(4)]), dtype);
    let stride = longest;
    let logits = scratch(pairs * group * stride, DType::F32);
    let ordered = scratch(pairs * stride, DType::U32);
    let norms = scratch(pairs * splits, DType::F32);
    let log_sum_exp = empty_like(&query, Shape::from([pairs, group]), DType::F32);
    let launch = |splits: usize, scored_parts: usize, blueprint: Blueprint| {
        // SAFETY: shapes were checked; the kernel stays within slots, sets and scratch, given ranges that end
        // within the pool and are no longer than the longest.
        unsafe {
            retrieve_kernel::launch_unchecked(
                &client,
                grid(pairs * splits),
                CubeDim::new_1d(blueprint.units as u32),
                lanes,
                query.clone().into_buffer_arg(),
                keys.clone().into_buffer_arg(),
                vectors.clone().into_buffer_arg(),
                set_vectors.clone().into_buffer_arg(),
                offsets.clone().into_buffer_arg(),
                lengths.clone().into_buffer_arg(),
                newest.clone().into_buffer_arg(),
                table.clone().into_buffer_arg(),
                logits.clone().into_buffer_arg(),
                ordered.clone().into_buffer_arg(),
                norms.clone().into_buffer_arg(),
                log_sum_exp.clone().into_buffer_arg(),
                pairs,
                pairs / batch,
                splits,
                scored_parts,
                stride,
                options.radius,
                options.block,
                options.hidden.bits(),
                config.scale,
                blueprint,
                elem_type(query.dtype),
            );
        }
    };
    let units = UNITS.min(widest);
    if whole {
        launch(1, 1, blueprint(units, true, true));
    } else {
        launch(splits, splits, blueprint(units, true, false));
        launch(1, splits, blueprint(chooser, false, true));
    }
    (table, set_vectors, log_sum_exp)
}
