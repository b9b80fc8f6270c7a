//! The arguments that the kernels of `quantized_attention` share.

use cubecl::prelude::*;

use crate::quantized::layout::BLOCK;
use crate::quantized::pool::QuantizedBits;

/// Comptime configuration of the generated code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Blueprint {
    pub(super) group: usize,
    pub(super) head_dim: usize,
    pub(super) bits: QuantizedBits,
    /// The most planes that a cube may have.
    pub(super) planes: usize,
    /// Numbers that shared memory has room for.
    pub(super) room: usize,
}

/// Ranges of quantised slots, and how many cubes share each.
#[derive(CubeType, CubeLaunch)]
pub(super) struct QuantizedRanges {
    /// First slots, `[B, Hkv]`.
    pub(super) offsets: Box<[i32]>,
    /// `[B, Hkv]`
    pub(super) lengths: Box<[i32]>,
    /// `B * Hkv`
    pub(super) total_kv_heads: usize,
    pub(super) splits: usize,
}

/// The part of a range that a cube takes, in blocks.
#[derive(CubeType, Clone, Copy)]
pub(super) struct PartBlocks {
    pub(super) kv_head: usize,
    /// The number of the part.
    pub(super) split: usize,
    /// The range's first block in the pool, and the range's slots.
    pub(super) offset: usize,
    pub(super) length: usize,
    /// The part's first block, and the block behind its last, counted from the range's first block.
    pub(super) first: usize,
    pub(super) end: usize,
}

#[cube]
impl QuantizedRanges {
    /// The part that cube number `cube` takes.
    pub(super) fn part(&self, cube: usize) -> PartBlocks {
        let (kv_head, split) = (cube / self.splits, cube % self.splits);
        let length = max(self.lengths[kv_head], 0) as usize;
        let blocks = length.div_ceil(BLOCK.comptime());
        let share = blocks.div_ceil(self.splits);
        let first = min(split * share, blocks);
        PartBlocks {
            kv_head,
            split,
            offset: max(self.offsets[kv_head], 0) as usize / BLOCK.comptime(),
            length,
            first,
            end: min(first + share, blocks),
        }
    }
}
