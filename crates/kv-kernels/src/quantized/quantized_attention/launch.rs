//! Launches `quantized_attention` on CubeCL devices.

use burn::backend::{DType, Shape, TensorMetadata};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::calculate_cube_count_elemwise;
use cubecl::prelude::*;

use super::args::QuantizedAttentionArgs;
use super::combine::{AttendedLaunch, combine_kernel};
use super::kernel_args::{Blueprint, PartsLaunch, QuantizedRangesLaunch};
use super::{QuantizedStrategy, plain, tensor_core};
use crate::backend::client::{elem_type, empty_like, grid, planes_of, processors};
use crate::quantized::layout::BLOCK;
use crate::quantized::pool::kernel::{QuantizedPairsLaunch, QuantizedSlotsLaunch};

/// Cubes of a processor, about: as many as fit on an H200's.
const CUBES_EACH: usize = 8;

/// Attends to the parts, and combines them.
pub(super) fn run(args: QuantizedAttentionArgs<CubeBackend>) -> (CubeTensor, CubeTensor) {
    let [batch, query_heads, head_dim] = args.query.shape().dims();
    let [_, kv_heads] = args.offsets.shape().dims();
    let (group, total_kv_heads) = (query_heads / kv_heads, batch * kv_heads);
    let client = args.query.client.clone();
    let fill = processors(&client) * CUBES_EACH / total_kv_heads.max(1);
    let matrix = args.strategy == QuantizedStrategy::TensorCore;
    // A part has a block, or the two of a round of the portable kernel, at least.
    let least = if matrix { BLOCK } else { plain::UNITS };
    let splits = fill.clamp(1, (args.longest / least).max(1));
    let part = |width: usize| {
        let shape = Shape::from([total_kv_heads * splits * group, width]);
        empty_like(&args.query, shape, DType::F32)
    };
    let (values, stats) = (part(head_dim), part(2));
    let dtype = elem_type(args.query.dtype);
    let output = empty_like(&args.query, args.query.shape(), args.query.dtype);
    let log_sum_exp = empty_like(&args.query, Shape::from([batch, query_heads]), DType::F32);
    let pool = args.pool;
    let room = client.properties().hardware.max_shared_memory_size / size_of::<f32>();
    let planes = planes_of(&client, plain::UNITS);
    let blueprint = Blueprint { group, head_dim, bits: pool.bits, planes, room };
    let numbers = batch * query_heads * head_dim;
    let cube_dim = CubeDim::new(&client, numbers);
    let query = into_contiguous(args.query);
    let ranges = QuantizedRangesLaunch::new(
        into_contiguous(args.offsets).into_buffer_arg(),
        into_contiguous(args.lengths).into_buffer_arg(),
        total_kv_heads,
        splits,
    );
    let [key_codes, key_scales, value_codes, value_scales] =
        [pool.key_codes, pool.key_scales, pool.value_codes, pool.value_scales]
            .map(|tensor| into_contiguous(tensor).into_buffer_arg());
    let parts = PartsLaunch::new(values.clone().into_buffer_arg(), stats.clone().into_buffer_arg());
    let cubes = grid(total_kv_heads * splits);
    // SAFETY: shapes were checked; ranges are the caller's, within the pool.
    unsafe {
        if matrix {
            tensor_core::quantized_tiles_kernel::launch_unchecked(
                &client,
                cubes,
                CubeDim::new_1d(tensor_core::UNITS as u32),
                query.into_buffer_arg(),
                args.scale,
                ranges,
                QuantizedPairsLaunch::new(key_codes, key_scales, value_codes, value_scales),
                parts,
                blueprint,
                dtype,
            );
        } else {
            plain::quantized_attention_kernel::launch_unchecked(
                &client,
                cubes,
                CubeDim::new_1d(plain::UNITS as u32),
                query.into_buffer_arg(),
                args.scale,
                ranges,
                QuantizedSlotsLaunch::new(key_codes, key_scales, value_codes, value_scales),
                parts,
                blueprint,
                dtype,
            );
        }
        combine_kernel::launch_unchecked(
            &client,
            calculate_cube_count_elemwise(&client, numbers, cube_dim),
            cube_dim,
            PartsLaunch::new(values.into_buffer_arg(), stats.into_buffer_arg()),
            AttendedLaunch::new(
                into_contiguous(args.output).into_buffer_arg(),
                into_contiguous(args.log_sum_exp).into_buffer_arg(),
                output.clone().into_buffer_arg(),
                log_sum_exp.clone().into_buffer_arg(),
            ),
            splits,
            numbers,
            group,
            head_dim,
            dtype,
        );
    }
    (output, log_sum_exp)
}
