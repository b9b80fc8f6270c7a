//! What the kernels of attention take: queries, pools of slots, head ranges, and outputs.

use cubecl::prelude::*;

use super::ViewKind;
use super::blueprint::Blueprint;
use super::eviction::Eviction;
use super::range_part::{RangePart, Sequence};
use super::slot_indexer::SlotIndexer;

/// The queries of a step.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Queries<Q: CubePrimitive> {
    /// `[B, Hkv, G, D]`, in the kernel's vectors or words.
    pub(crate) rows: Box<[Q]>,
    /// What products with keys are multiplied by.
    pub(crate) scale: f32,
}

/// A layer's pool of slots, with what weighs them.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct WeightedPool<K: CubePrimitive, V: CubePrimitive> {
    /// `[S, D]`, in the kernel's vectors or words.
    pub(crate) keys: Box<[K]>,
    /// `[S, D]`, in the kernel's vectors or words.
    pub(crate) values: Box<[V]>,
    /// Logarithms of weights, `[S]`, where the kernel's features name weights.
    pub(crate) log_weights: Box<[f32]>,
    /// Weights of values alone, `[S]`, where the kernel's features name them.
    pub(crate) numerators: Box<[f32]>,
    /// `S`
    pub(crate) slots: usize,
}

/// The head ranges that a launch attends to, the slots of them that queries see, and the parts that
/// cubes take of them.
///
/// On CUDA, pointers and then scalars lie in constant memory in the order of a kernel's arguments,
/// and each line of 64 bytes costs a first read. A kernel needs the number of heads and the splits
/// before all other scalars. So ranges stand before the pool among a kernel's arguments: both
/// numbers then lie in the line of the pointers.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct AttendedRanges {
    /// First slots, `[B, Hkv]`.
    pub(super) offsets: Box<[i32]>,
    /// Live slots, or listed ones, `[B, Hkv]`.
    pub(super) lengths: Box<[i32]>,
    /// `[B, Hkv, width]`: starts of windows, listed slots, or rows of index sets.
    pub(super) view: Box<[i32]>,
    /// `B * Hkv`
    pub(super) total_kv_heads: usize,
    /// Cubes that share a range.
    pub(super) splits: usize,
    /// Numbers of the view for each range.
    pub(super) width: usize,
    /// First slots of a range that queries see whatever the window.
    pub(super) sinks: usize,
}

#[cube]
impl AttendedRanges {
    /// The slots that the queries of the range `kv_head` see.
    pub(super) fn indexer(&self, kv_head: usize, #[comptime] kind: ViewKind) -> SlotIndexer {
        let (width, sinks) = (self.width, self.sinks);
        SlotIndexer::new(&self.view, &self.offsets, &self.lengths, kv_head, width, sinks, kind)
    }

    /// The part of a range that `cube` has, where the kernel for matrix instructions attends.
    pub(super) fn part(
        &self,
        eviction: &ComptimeOption<Eviction>,
        cube: usize,
        #[comptime] blueprint: Blueprint,
    ) -> RangePart {
        let (total_kv_heads, splits) = (self.total_kv_heads, self.splits);
        let kv_head = cube / splits;
        let logits = blueprint.logits.comptime();
        RangePart {
            kv_head,
            length: self.lengths[kv_head],
            split: cube % splits,
            splits,
            indexer: self.indexer(kv_head, blueprint.features.view),
            sequence: Sequence::of(&self.lengths, eviction, kv_head, total_kv_heads, logits),
        }
    }
}

/// Where the output of query heads goes: whole, or in parts that a kernel behind combines.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct HeadOutputs<O: CubePrimitive, P: CubePrimitive> {
    /// `[B, Hkv, G, D]`, in the kernel's vectors.
    pub(crate) output: Box<[O]>,
    /// `[B, Hkv, G]`, where it is wanted.
    pub(crate) log_sum_exp: Box<[f32]>,
    /// Sums of the parts, not divided yet: `[B, Hkv, splits, G, D]`, in the kernel's vectors, where
    /// ranges are split.
    pub(crate) partial: Box<[P]>,
    /// Maximum and sum of weights of the parts, `[B, Hkv, splits, G, 2]`, where ranges are split.
    pub(crate) stats: Box<[f32]>,
}

/// What decode attention writes.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct DecodeOutputs<O: CubePrimitive, P: CubePrimitive> {
    pub(crate) heads: HeadOutputs<O, P>,
    /// Logits, `[S, G]`, where they are wanted.
    pub(crate) scores: Box<[f32]>,
}
