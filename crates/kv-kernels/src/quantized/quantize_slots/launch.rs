//! Launches `quantize_slots` on CubeCL devices.

use burn::backend::TensorMetadata;
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::args::QuantizeArgs;
use super::kernel::{Blueprint, SourceSlotsLaunch, UNITS, quantize_kernel};
use crate::backend::client::{elem_type, grid};
use crate::quantized::layout::BLOCK;
use crate::quantized::pool::kernel::QuantizedSlotsLaunch;

/// Quantises in the pool's own buffers.
pub(super) fn run(
    args: QuantizeArgs<CubeBackend>,
) -> (CubeTensor, CubeTensor, CubeTensor, CubeTensor) {
    let QuantizeArgs { pool, keys, values, from, to } = args;
    let [_, head_dim] = keys.shape().dims();
    let [lists, count] = from.shape().dims();
    let blocks = count / BLOCK;
    let dtype = elem_type(keys.dtype);
    let client = keys.client.clone();
    let [key_codes, key_scales, value_codes, value_scales] =
        [pool.key_codes, pool.key_scales, pool.value_codes, pool.value_scales].map(into_contiguous);
    // SAFETY: shapes were checked; slots and blocks are the caller's, within their pools.
    unsafe {
        quantize_kernel::launch_unchecked(
            &client,
            grid(lists * blocks),
            CubeDim::new_1d(UNITS as u32),
            SourceSlotsLaunch::new(
                into_contiguous(keys).into_buffer_arg(),
                into_contiguous(values).into_buffer_arg(),
                into_contiguous(from).into_buffer_arg(),
                into_contiguous(to).into_buffer_arg(),
                lists,
                blocks,
            ),
            QuantizedSlotsLaunch::new(
                key_codes.clone().into_buffer_arg(),
                key_scales.clone().into_buffer_arg(),
                value_codes.clone().into_buffer_arg(),
                value_scales.clone().into_buffer_arg(),
            ),
            Blueprint { head_dim, bits: pool.bits },
            dtype,
        );
    }
    (key_codes, key_scales, value_codes, value_scales)
}
