//! Products of many rows on Hopper, `c = a bᵀ`. One plane copies tiles of both factors into shared
//! memory by the copy engine. Two groups of four planes multiply by warpgroup instructions, as
//! tiles arrive: each group 64 of 128 rows, or half of the columns of 64 rows.
//!
//! Where the tiles of `c` are fewer than the processors, several cubes share a tile: each sums some
//! blocks of 64 products, and [`hopper_split`](super::hopper_split) adds the parts.

// The compiler does not see that PTX writes variables.
#![allow(unused_assignments)]

use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::{generic_to_shared, tensor_map_address};

use crate::components::tma::{
    TILE_COLUMNS, arrive_expecting, copy_tile, init_barrier, publish_barriers, wait_barrier,
};

/// Tiles of each factor that are being copied or used.
const STAGES: usize = 4;
/// Rows of tiles that neighbouring cubes take together, so that their factors stay in the L2 cache.
const BAND: u32 = 16;
/// Units of a cube: two groups of four planes, and the plane that copies.
pub(super) const UNITS: usize = 288;

/// Comptime configuration of the generated code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Blueprint {
    /// Rows of a cube's result, 64 or 128.
    pub(super) rows: usize,
    /// Columns of a cube's result, 128 or 256.
    pub(super) columns: usize,
    /// The factors' type, as PTX spells it.
    pub(super) name: &'static str,
}

impl Blueprint {
    /// Columns that a group of planes multiplies.
    fn group_columns(self) -> usize {
        self.columns / if self.rows == 64 { 2 } else { 1 }
    }

    /// Sums that a unit holds.
    pub(super) fn sums(self) -> usize {
        self.group_columns() / 2
    }
}

/// The size of a product of an `M` by `K` and an `N` by `K` matrix.
#[derive(CubeType, CubeLaunch)]
pub(super) struct ProductSize {
    m: u32,
    n: u32,
    k: u32,
    /// Blocks of 64 columns of the factors that a part sums.
    blocks: u32,
}

/// `c = a bᵀ`, or parts of its sums. The second dimension of the grid counts the parts.
///
/// # Shapes
/// `a` `[M, K]`, `b` `[N, K]`, `c` `[parts, M, N]` in pairs, of type `O`; `NA` are the sums
/// of a unit.
#[cube(launch_unchecked)]
pub(super) fn product_kernel<E: Float, O: Float, NA: Size>(
    a: &TensorMap<E, Tiled>,
    b: &TensorMap<E, Tiled>,
    c: &mut [Vector<O, Const<2>>],
    size: &ProductSize,
    #[comptime] blueprint: Blueprint,
    #[define(E)] _dtype: ElemType,
    #[define(O)] _output: ElemType,
) {
    let (m, n, k) = (size.m, size.n, size.k);
    let high = blueprint.rows.comptime();
    let width = blueprint.columns.comptime();
    let own = comptime!(blueprint.group_columns());
    let name = blueprint.name.comptime();
    let a_words = (high * TILE_COLUMNS / 2).comptime();
    let b_words = (width * TILE_COLUMNS / 2).comptime();
    let a_bytes = (4 * a_words as u32).comptime();
    let b_bytes = (4 * b_words as u32).comptime();
    let a_tiles = Shared::<[u32]>::new_aligned_slice(comptime!(STAGES * a_words), 1024usize);
    let b_tiles = Shared::<[u32]>::new_aligned_slice(comptime!(STAGES * b_words), 1024usize);
    let barriers = Shared::<[u64]>::new_aligned_slice(comptime!(2 * STAGES), 16usize);
    let a_base = generic_to_shared::<u32>(a_tiles.as_ptr());
    let b_base = generic_to_shared::<u32>(b_tiles.as_ptr());
    let full = generic_to_shared::<u64>(barriers.as_ptr());
    let empty = full + comptime!(8 * STAGES as u32);

    if UNIT_POS == 0 {
        #[unroll]
        for stage in 0..comptime!(STAGES as u32) {
            init_barrier(full + comptime!(8 * stage), 1u32);
            init_barrier(empty + comptime!(8 * stage), 8u32);
        }
        publish_barriers();
    }
    sync_cube();

    let bands_columns = BAND * n.div_ceil(comptime!(width as u32));
    let band = CUBE_POS_X / bands_columns;
    let inside = CUBE_POS_X % bands_columns;
    let height = min(m.div_ceil(comptime!(high as u32)) - band * BAND, BAND);
    let row0 = (band * BAND + inside % height) * comptime!(high as u32);
    let column0 = (inside / height) * comptime!(width as u32);
    let first = CUBE_POS_Y * size.blocks;
    let blocks = min(k.div_ceil(comptime!(TILE_COLUMNS as u32)) - first, size.blocks);

    if UNIT_POS >= 256 {
        if UNIT_POS == 256 {
            let map_a = tensor_map_address(a);
            let map_b = tensor_map_address(b);
            let mut stage = 0u32;
            let mut parity = 1u32;
            for block in 0..blocks {
                wait_barrier(empty + 8 * stage, parity);
                let arrived = full + 8 * stage;
                let x = (first + block) * comptime!(TILE_COLUMNS as u32);
                arrive_expecting(arrived, comptime!(a_bytes + b_bytes).runtime());
                copy_tile(a_base + stage * a_bytes, map_a, x, row0, arrived);
                copy_tile(b_base + stage * b_bytes, map_b, x, column0, arrived);
                stage += 1;
                if stage == comptime!(STAGES as u32) {
                    stage = 0u32;
                    parity ^= 1u32;
                }
            }
        }
    } else {
        let part = UNIT_POS / 128;
        let plane = UNIT_POS % 128 / 32;
        let lane = UNIT_POS % 32;
        // A descriptor holds the address and the leading offset in units of 16 bytes; 8 rows are
        // 1,024 bytes.
        let a_rows = comptime!((high as u32 - 64) * 128);
        let b_rows = comptime!((width - own) as u32 * 128);
        let of_a = ((a_base + part * a_rows) >> 4u32) | 0x1_0000u32;
        let of_b = ((b_base + part * b_rows) >> 4u32) | 0x1_0000u32;
        let leads = select(lane == 0, 1u32, 0u32);
        let a_step = comptime!(a_bytes >> 4);
        let b_step = comptime!(b_bytes >> 4);
        let mut acc = Vector::<f32, NA>::empty();
        // The loop is one piece of PTX: it holds accumulators in registers while products are under
        // way, and no compiler may move them.
        gpu_asm!(
            "{{\n",
            ".reg .pred ready, more, leads, add, past;\n",
            ".reg .b32 stage, parity, block, t, bar, before, la, lb, hi;\n",
            ".reg .b64 da, db;\n",
            "mov.b32 stage, 0;\n mov.b32 parity, 0;\n mov.b32 block, 0;\n",
            "mov.b32 hi, 0x40000040;\n mov.b32 before, {empty};\n",
            "setp.ne.b32 leads, {leads}, 0;\n setp.ne.b32 add, block, 0;\n",
            "LOOP:\n",
            "shl.b32 t, stage, 3;\n add.s32 bar, {full}, t;\n",
            "WAIT:\n mbarrier.try_wait.parity.shared::cta.b64 ready, [bar], parity;\n",
            "@!ready bra WAIT;\n",
            "mad.lo.s32 la, stage, {a_step}, {of_a};\n mad.lo.s32 lb, stage, {b_step}, {of_b};\n",
            "wgmma.fence.sync.aligned;\n",
            "mov.b64 da, {{la, hi}};\n mov.b64 db, {{lb, hi}};\n",
            "wgmma.mma_async.sync.aligned.m64n{own}k16.f32.{name}.{name} {acc}, da, db, add, 1, 1, 0, 0;\n",
            "setp.eq.b32 add, 0, 0;\n",
            "add.s64 da, da, 2;\n add.s64 db, db, 2;\n",
            "wgmma.mma_async.sync.aligned.m64n{own}k16.f32.{name}.{name} {acc}, da, db, add, 1, 1, 0, 0;\n",
            "add.s64 da, da, 2;\n add.s64 db, db, 2;\n",
            "wgmma.mma_async.sync.aligned.m64n{own}k16.f32.{name}.{name} {acc}, da, db, add, 1, 1, 0, 0;\n",
            "add.s64 da, da, 2;\n add.s64 db, db, 2;\n",
            "wgmma.mma_async.sync.aligned.m64n{own}k16.f32.{name}.{name} {acc}, da, db, add, 1, 1, 0, 0;\n",
            "wgmma.commit_group.sync.aligned;\n",
            // All products except this block's are done, so the earlier tiles are free.
            "wgmma.wait_group.sync.aligned 1;\n",
            "setp.gt.s32 past, block, 0;\n and.pred past, past, leads;\n",
            "@past mbarrier.arrive.shared::cta.b64 _, [before];\n",
            "add.s32 before, {empty}, t;\n",
            "add.s32 block, block, 1;\n add.s32 stage, stage, 1;\n",
            "setp.eq.s32 more, stage, {stages};\n",
            "@more mov.b32 stage, 0;\n @more xor.b32 parity, parity, 1;\n",
            "setp.lt.s32 more, block, {blocks};\n",
            "@more bra LOOP;\n",
            "wgmma.wait_group.sync.aligned 0;\n",
            "}}",
            acc = out(_) acc, full = in(_) full, empty = in(_) empty, leads = in(_) leads,
            of_a = in(_) of_a, of_b = in(_) of_b, blocks = in(_) blocks,
            a_step = const a_step, b_step = const b_step, stages = const STAGES
        );
        let row = row0 + part * comptime!(high as u32 - 64) + plane * 16 + lane / 4;
        let column = column0 + part * comptime!((width - own) as u32) + lane % 4 * 2;
        let part_row = (CUBE_POS_Y * m) as usize;
        #[unroll]
        for i in 0..comptime!(own / 8) {
            let at = column + comptime!(8 * i as u32);
            #[unroll]
            for half in 0..2usize {
                let row = row + comptime!(8 * half as u32);
                if at < n && row < m {
                    let mut pair = Vector::<f32, Const<2>>::empty();
                    pair.insert(0usize, acc.extract(comptime!(4 * i + 2 * half)));
                    pair.insert(1usize, acc.extract(comptime!(4 * i + 2 * half + 1)));
                    let to = (part_row + row as usize) * (n as usize / 2) + at as usize / 2;
                    c[to] = Vector::cast_from(pair);
                }
            }
        }
    }
}
