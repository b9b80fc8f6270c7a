//! The arguments that the kernels of `signature_scores` share.

use cubecl::prelude::*;

use super::LEAST_LOG_SUM;
use crate::archive::layout::BLOCK;
use crate::select::scored_rows::ScoredRowBuffers;

/// Comptime configuration of the generated code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Blueprint {
    pub(super) group: usize,
    pub(super) head_dim: usize,
}

/// The ranges, and the attention to other slots.
#[derive(CubeType, CubeLaunch)]
pub(super) struct ScoredRanges {
    /// First slots, `[B, Hkv]`.
    offsets: Box<[i32]>,
    /// `[B, Hkv]`
    lengths: Box<[i32]>,
    /// `[B, Hq]`
    log_sum_exp: Box<[f32]>,
    /// The factor of logits.
    pub(super) scale: f32,
    wanted: u32,
    /// Blocks of a row of scores.
    pub(super) blocks: usize,
}

#[cube]
impl ScoredRanges {
    /// The slots of a row that are scored, at most `columns`.
    pub(super) fn length(&self, row: usize, columns: usize) -> usize {
        min(max(self.lengths[row], 0), columns as i32) as usize
    }

    /// The row's block number `own`, counted in the pool.
    pub(super) fn block(&self, row: usize, own: usize) -> usize {
        max(self.offsets[row], 0) as usize / BLOCK.comptime() + own
    }

    /// The log-sum-exp of a query head's attention to other slots.
    pub(super) fn log_sum(&self, head: usize) -> f32 {
        max(self.log_sum_exp[head], LEAST_LOG_SUM.comptime())
    }

    /// Writes the numbers of a row's candidates and wanted slots.
    pub(super) fn write_counts(&self, row: usize, scored: &mut ScoredRowBuffers) {
        scored.candidates[row] = self.length(row, scored.columns) as i32;
        scored.wanted[row] = self.wanted as i32;
    }
}
