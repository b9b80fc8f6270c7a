//! Attention over compressed KV caches, and the slot operations around it.
//!
//! Kernels work on bare Burn tensors and know no cache, policy or model. Each op is one folder:
//! `mod.rs` (the public function: validate, choose, launch), `kernel.rs` (the CubeCL source that
//! CUDA, Vulkan, Metal and WGSL share) and `reference.rs` (plain loops: what runs on the CPU, and
//! the oracle of the kernel's tests).
//!
//! Dimension letters: `B` batch, `Hq`/`Hkv` query and key-value heads, `G = Hq/Hkv`, `S` slots of
//! a pool, `D` head dim.

mod add_probabilities;
mod argmin_slots;
mod average_scores;
mod balance;
#[cfg(feature = "gpu")]
mod barrier;
mod check;
#[cfg(feature = "gpu")]
mod cluster;
mod count_sketch;
mod decode_attention;
mod error;
mod evicting_attention;
mod extension;
#[cfg(feature = "flex")]
mod flex;
#[cfg(feature = "gpu")]
mod gpu;
mod graph;
mod heads;
#[cfg(feature = "cuda")]
mod hopper;
mod labels;
mod limits;
mod linear;
mod lists;
mod merge_nearest;
mod merge_slots;
mod move_slots;
mod nearest_slots;
mod norms;
#[cfg(feature = "gpu")]
mod nvidia;
mod pages;
mod prefill_attention;
mod random;
mod rankings;
mod reading;
mod retrieve_slots;
mod revise_sketch;
mod rms_norm;
mod sample;
#[cfg(feature = "gpu")]
mod scan;
mod scatter_rows;
#[cfg(feature = "gpu")]
mod select;
mod share;
mod sketch_attention;
mod slots;
mod swiglu;
mod top_slots;
mod window_starts;

pub use add_probabilities::{GroupReduction, add_contributions, add_probabilities};
pub use argmin_slots::{Protected, argmin_slots};
pub use average_scores::{AverageWeights, average_scores};
pub use balance::{BalanceOptions, Balanced, Centre, Draws, balance};
pub use count_sketch::{
    HEAD_FIELDS, MAX_BUCKETS, SketchHashes, SketchPool, SketchSource, sketch_insert, sketch_query,
};
pub use decode_attention::{
    AttentionOutput, DecodeAttentionOptions, SlotView, decode_attention,
    reference as decode_reference,
};
pub use error::KernelError;
pub use evicting_attention::{
    EvictingOutput, EvictionOptions, EvictionScope, Guard, HeldSlots, LOWEST_NORM,
    evicting_attention,
};
pub use graph::{DeviceWork, Recording, StepGraph, awaited_device_work, device_work};
pub use heads::{
    HeadLayout, HeadNorms, Placement, RotaryTable, split_heads, split_keys_values, write_heads,
};
pub use labels::{DueRows, ScoredRows, label_scores};
pub use limits::largest_tensor;
pub use linear::{LinearOptions, RowNorm, linear};
pub use lists::{HEADER as LIST_HEADER, ListTable, keep_lists, list_slots};
pub use merge_nearest::{MergingSlots, NearestOptions, StepScores, VOTES_RADIX, merge_nearest};
pub use merge_slots::{
    GUARD, KeyRule, MergeLists, MergeOptions, Merged, merge_slots, reference as merge_reference,
};
pub use move_slots::{KeepLists, compact_slots, copy_slots, drop_slots, reset_last};
pub use nearest_slots::{Nearest, SlotLists, nearest_slots};
pub use norms::{log_norms, value_norms};
pub use pages::{
    PageHeads, PageOptions, PageSpan, page_bounds, page_rows, page_scores, page_slots,
};
pub use prefill_attention::{PrefillOptions, PrefillOutput, PrefillWindow, prefill_attention};
pub use random::{uniform, uniforms};
pub use rankings::{rankings, turns_of_groups};
pub use reading::Reading;
pub use retrieve_slots::{
    Dilation, Earlier, IndexSets, RangeSets, RetrieveOptions, ScoreReduction, SetRule,
    SimilarityReduction, SteerOptions, retrieve_slots, retrieving_attention, steer_sets,
};
pub use revise_sketch::{ABSENT, ReviseOptions, RevisedScores, StepLogits, revise_sketch};
pub use rms_norm::{add_rms_norm, rms_norm};
pub use sample::{DrawSettings, DrawState, draw};
pub use scatter_rows::{assign, assign_ints, scatter_ints, scatter_rows, scatter_scalars};
pub use share::Share;
pub use sketch_attention::{SketchAttention, SketchedTokens, sketch_attention};
pub use slots::{SlotPool, SlotRanges, SlotSource};
pub use swiglu::swiglu;
pub use top_slots::{Choice, Chosen, top_slots};
pub use window_starts::window_starts;
