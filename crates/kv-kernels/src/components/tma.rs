//! Hopper instructions that kernels share: asynchronous copies of tiles into shared memory,
//! barriers that count their bytes, and matrix products of four planes (a warpgroup) that read
//! shared memory. CubeCL has no such products, so these kernels contain PTX. Other devices take
//! portable kernels.

// The compiler does not see that PTX writes variables.
#![allow(unused_assignments)]

use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

/// Columns of a tile in shared memory: 128 bytes of 2-byte elements, the width of the swizzle.
pub(crate) const TILE_COLUMNS: usize = 64;

/// Whether tiles of rows of `columns` 2-byte elements can be copied: in pieces of 16 bytes, and at
/// least a tile wide.
pub(crate) fn copies_rows_of(columns: usize) -> bool {
    columns.is_multiple_of(8) && columns >= TILE_COLUMNS
}

/// The tensor as tensor maps need it: its rows are consecutive elements and begin at multiples of
/// 16 bytes. Any other tensor is copied.
pub(crate) fn with_rows(tensor: CubeTensor) -> CubeTensor {
    let strides = tensor.meta.strides();
    let rank = strides.len();
    let bytes = tensor.dtype.size();
    let ordered = strides.windows(2).all(|pair| pair[0] >= pair[1]);
    let aligned = strides[..rank - 1].iter().all(|stride| (stride * bytes).is_multiple_of(16));
    let begins = tensor.handle.offset_start.unwrap_or(0).is_multiple_of(16);
    if strides[rank - 1] == 1 && ordered && aligned && begins {
        return tensor;
    }
    // A contiguous tensor may begin at another address.
    if tensor.is_contiguous() { tensor.copy() } else { into_contiguous(tensor) }
}

/// A tensor map of swizzled tiles, `rows` by 64 columns, of the last two dimensions.
pub(crate) fn tiles(tensor: CubeTensor, rows: usize) -> TensorMapArg<Tiled> {
    let elem = crate::backend::client::elem_type(tensor.dtype);
    let rank = tensor.meta.shape().num_dims();
    let mut tile = vec![1; rank];
    tile[rank - 2] = rows;
    tile[rank - 1] = TILE_COLUMNS;
    let args = TiledArgs { tile_size: tile.into() };
    TensorMapArg::new(args, tensor.into_tensor_arg(), elem).with_swizzle(TensorMapSwizzle::B128)
}

/// Initialises a barrier that `count` arrivals complete.
#[cube]
pub(crate) fn init_barrier(barrier: u32, count: u32) {
    gpu_asm!("mbarrier.init.shared::cta.b64 [{}], {};", in(_) barrier, in(_) count);
}

/// Makes initialised barriers visible to the copy engine. A barrier of all units that use them must
/// follow.
#[cube]
pub(crate) fn publish_barriers() {
    gpu_asm!("fence.mbarrier_init.release.cluster;");
    fence_copies();
}

/// Orders this unit's accesses to shared memory before copies that follow.
#[cube]
pub(crate) fn fence_copies() {
    gpu_asm!("fence.proxy.async.shared::cta;");
}

/// Waits until the barrier's phase of this parity is complete.
#[cube]
pub(crate) fn wait_barrier(barrier: u32, parity: u32) {
    // An operation turns a variable into a value, which `gpu_asm!` needs.
    let parity = parity & 1u32;
    gpu_asm!(
        "{{\n .reg .pred ready;\n",
        "WAIT:\n mbarrier.try_wait.parity.shared::cta.b64 ready, [{}], {};\n",
        "@!ready bra WAIT;\n }}",
        in(_) barrier, in(_) parity
    );
}

/// Arrives at a barrier.
#[cube]
pub(crate) fn arrive(barrier: u32) {
    gpu_asm!("mbarrier.arrive.shared::cta.b64 _, [{}];", in(_) barrier);
}

/// Arrives at a barrier, which then also waits for `bytes` of copies.
#[cube]
pub(crate) fn arrive_expecting(barrier: u32, bytes: u32) {
    gpu_asm!(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [{}], {};", in(_) barrier, in(_) bytes
    );
}

/// Copies the tile at column `x`, row `y` to shared memory.
#[cube]
pub(crate) fn copy_tile(to: u32, map: u64, x: u32, y: u32, barrier: u32) {
    gpu_asm!(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes ",
        "[{to}], [{map}, {{{x}, {y}}}], [{barrier}];",
        to = in(_) to, map = in(_) map, x = in(_) x, y = in(_) y, barrier = in(_) barrier
    );
}

/// Copies the tile at column `x`, row `y` of matrix `z` to shared memory.
#[cube]
pub(crate) fn copy_tile_of(to: u32, map: u64, x: u32, y: u32, z: u32, barrier: u32) {
    gpu_asm!(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes ",
        "[{to}], [{map}, {{{x}, {y}, {z}}}], [{barrier}];",
        to = in(_) to, map = in(_) map, x = in(_) x, y = in(_) y, z = in(_) z,
        barrier = in(_) barrier
    );
}
