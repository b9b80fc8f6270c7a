//! Arguments of the attention kernels: queries, pools of slots, head ranges and outputs.

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
    /// The factor of `q · k`.
    pub(crate) scale: f32,
}

/// A layer's pool of slots, and the weights of its slots.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct WeightedPool<K: CubePrimitive, V: CubePrimitive> {
    /// `[S, D]`, in the kernel's vectors or words.
    pub(crate) keys: Box<[K]>,
    /// `[S, D]`, in the kernel's vectors or words.
    pub(crate) values: Box<[V]>,
    /// Logarithms of weights, `[S]`; read where the kernel's features have `weighted`.
    pub(crate) log_weights: Box<[f32]>,
    /// Weights of the values alone, `[S]`; read where the kernel's features have `numerators`.
    pub(crate) numerators: Box<[f32]>,
    /// `S`
    pub(crate) slots: usize,
}

/// The head ranges of a launch, the slots that queries see of each range, and the number of cubes
/// that share a range.
///
/// On CUDA, a kernel's pointers and then its scalars lie in constant memory, in the order of the
/// arguments. The first read of each 64-byte line costs time. A kernel needs the number of heads
/// and the number of splits first. So ranges stand before the pool among the arguments: both
/// numbers then share a line with the pointers.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct AttendedRanges {
    /// First slots, `[B, Hkv]`.
    pub(super) offsets: Box<[i32]>,
    /// Live slots of each range, or slots of its list, `[B, Hkv]`.
    pub(super) lengths: Box<[i32]>,
    /// `[B, Hkv, width]`: starts of windows, listed slots, or rows of index sets.
    pub(super) view: Box<[i32]>,
    /// `B * Hkv`
    pub(super) total_kv_heads: usize,
    /// Cubes that share a range.
    pub(super) splits: usize,
    /// Numbers of `view` for each range.
    pub(super) width: usize,
    /// Slots at the start of a range that queries see besides the window.
    pub(super) sinks: usize,
}

#[cube]
impl AttendedRanges {
    /// The slots that the queries of the range `kv_head` see.
    pub(super) fn indexer(&self, kv_head: usize, #[comptime] kind: ViewKind) -> SlotIndexer {
        let (width, sinks) = (self.width, self.sinks);
        SlotIndexer::new(&self.view, &self.offsets, &self.lengths, kv_head, width, sinks, kind)
    }

    /// The part of a range that cube number `cube` takes, in the kernel for matrix instructions.
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
            sequence: Sequence::of(
                &self.offsets,
                &self.lengths,
                eviction,
                kv_head,
                total_kv_heads,
                logits,
            ),
        }
    }
}

/// The output of query heads: whole, or in parts that `combine.rs` combines.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct HeadOutputs<O: CubePrimitive, P: CubePrimitive> {
    /// `[B, Hkv, G, D]`, in the kernel's vectors.
    pub(crate) output: Box<[O]>,
    /// `[B, Hkv, G]`, written where log-sum-exps are wanted.
    pub(crate) log_sum_exp: Box<[f32]>,
    /// Weighted sums of values of the parts, before the division, `[B, Hkv, splits, G, D]`, in the
    /// kernel's vectors. Written where ranges are split.
    pub(crate) partial: Box<[P]>,
    /// Largest logit and sum of weights of the parts, `[B, Hkv, splits, G, 2]`. Written where
    /// ranges are split.
    pub(crate) stats: Box<[f32]>,
}

/// The outputs of decode attention.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct DecodeOutputs<O: CubePrimitive, P: CubePrimitive> {
    pub(crate) heads: HeadOutputs<O, P>,
    /// Logits of slots, `[S, G]`, written where they are wanted.
    pub(crate) scores: Box<[f32]>,
}
