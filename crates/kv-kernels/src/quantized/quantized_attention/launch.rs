//! Launches `quantized_attention` on CubeCL devices.

use burn::backend::TensorMetadata;
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::args::QuantizedAttentionArgs;
use super::kernel_args::{Blueprint, QuantizedRangesLaunch};
use super::{QuantizedStrategy, plain, tensor_core};
use crate::attention::continued::combine::PartTensors;
use crate::backend::client::{elem_type, grid, planes_of, processors};
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
    let parts = PartTensors::empty(&args.query, total_kv_heads, splits, group);
    let dtype = elem_type(args.query.dtype);
    let pool = args.pool;
    let room = client.properties().hardware.max_shared_memory_size / size_of::<f32>();
    let planes = planes_of(&client, plain::UNITS);
    let blueprint = Blueprint { group, head_dim, bits: pool.bits, planes, room };
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
                parts.launched(),
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
                parts.launched(),
                blueprint,
                dtype,
            );
        }
    }
    parts.combine(args.output, args.log_sum_exp)
}
