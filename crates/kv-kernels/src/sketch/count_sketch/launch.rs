//! Launches the ops on count-sketches on CubeCL devices.

use burn::backend::{DType, Shape, TensorMetadata};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::calculate_cube_count_elemwise;
use cubecl::prelude::*;

use super::args::{InsertArgs, SketchTensors};
use super::kernel_args::{SketchLaunch, TokenRowsLaunch};
use super::{insert, query};
use crate::backend::client::{elem_type, empty_like, grid};

/// Adds tokens in the sketches' own buffers.
pub(super) fn insert(args: InsertArgs<CubeBackend>) -> (CubeTensor, CubeTensor) {
    let InsertArgs { sketch, tokens, keys, values, sign } = args;
    let (sketch_keys, sketch_values) =
        (into_contiguous(sketch.keys), into_contiguous(sketch.values));
    let [_, head_dim] = sketch_keys.shape().dims();
    let most = sketch.most_entries;
    let [ranges, count] = tokens.shape().dims();
    // SAFETY: shapes were checked; the kernel stays within the entries that the heads name.
    unsafe {
        insert::insert_kernel::launch_unchecked(
            &sketch_keys.client.clone(),
            grid(ranges * most),
            CubeDim::new_1d(insert::UNITS as u32),
            SketchLaunch::new(
                sketch_keys.clone().into_buffer_arg(),
                sketch_values.clone().into_buffer_arg(),
                into_contiguous(sketch.heads).into_buffer_arg(),
                into_contiguous(sketch.hashes).into_buffer_arg(),
            ),
            TokenRowsLaunch::new(
                into_contiguous(tokens).into_buffer_arg(),
                into_contiguous(keys.clone()).into_buffer_arg(),
                into_contiguous(values).into_buffer_arg(),
                ranges,
                count,
            ),
            sign,
            most,
            head_dim / 4,
            sketch.config,
            elem_type(keys.dtype),
        );
    }
    (sketch_keys, sketch_values)
}

/// Estimates keys and values `[P, M, D]` of tokens `[P, M]`.
pub(super) fn query(
    sketch: SketchTensors<CubeBackend>,
    tokens: CubeTensor,
    dtype: DType,
) -> (CubeTensor, CubeTensor) {
    let [_, head_dim] = sketch.keys.shape().dims();
    let [ranges, count] = tokens.shape().dims();
    let shape = Shape::from([ranges, count, head_dim]);
    let [keys, values] = [0, 1].map(|_| empty_like(&sketch.keys, shape.clone(), dtype));
    let client = keys.client.clone();
    let units = ranges * count * head_dim / 4;
    let cube_dim = CubeDim::new(&client, units);
    // SAFETY: as in `insert`.
    unsafe {
        query::query_kernel::launch_unchecked(
            &client,
            calculate_cube_count_elemwise(&client, units, cube_dim),
            cube_dim,
            SketchLaunch::new(
                into_contiguous(sketch.keys).into_buffer_arg(),
                into_contiguous(sketch.values).into_buffer_arg(),
                into_contiguous(sketch.heads).into_buffer_arg(),
                into_contiguous(sketch.hashes).into_buffer_arg(),
            ),
            TokenRowsLaunch::new(
                into_contiguous(tokens).into_buffer_arg(),
                keys.clone().into_buffer_arg(),
                values.clone().into_buffer_arg(),
                ranges,
                count,
            ),
            head_dim / 4,
            sketch.config,
            elem_type(dtype),
        );
    }
    (keys, values)
}
