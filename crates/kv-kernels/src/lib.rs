#![doc = include_str!("../README.md")]
//!
//! # Modules
//!
//! Ops are grouped in families, and each op is one folder that holds all of it:
//!
//! - `mod.rs`: the public function, its options and its checks.
//! - `backend.rs`: the op's backend trait, and its implementations for CubeCL devices and the CPU.
//! - `launch.rs`: which kernel is launched, and how.
//! - `kernel.rs` and others: the CubeCL source that CUDA, Vulkan, Metal and WGSL share.
//! - `reference.rs`: plain loops, which run on the CPU and are the oracle of the kernel's tests.
//! - `vectorised.rs`: in its place, for the ops that take most of a step's time on a CPU, loops by
//!   vector instructions on all cores. Their tests have formulas in f64 of their own.
//!
//! `components` holds parts of kernels that several ops share. `backend` holds their host code:
//! checks, errors, devices and buffers.
//!
//! # Forcing a kernel
//!
//! An op that has several kernels chooses one from the device and the call's shape. Its options
//! name the kernels (`strategy`), and `Auto`, the default, chooses. A forced kernel that cannot run
//! the call is refused with [`KernelError::Unavailable`]:
//!
//! ```
//! use burn::tensor::{DType, Device, Distribution, Tensor};
//! use kv_kernels::{
//!     DecodeAttentionOptions, DecodeStrategy, KernelError, SlotRanges, decode_attention,
//! };
//!
//! # fn main() -> Result<(), KernelError> {
//! let device = Device::flex();
//! // 2 key-value heads of 8 slots each, and 4 query heads.
//! let query = Tensor::<3>::random([1, 4, 16], Distribution::Default, &device);
//! let keys = Tensor::<2>::random([16, 16], Distribution::Default, &device);
//! let ranges = SlotRanges {
//!     offsets: Tensor::from_data([[0, 8]], (&device, DType::I32)),
//!     lengths: Tensor::from_data([[8, 8]], (&device, DType::I32)),
//! };
//! let attend = |strategy| {
//!     let options = DecodeAttentionOptions { strategy, ..Default::default() };
//!     decode_attention(query.clone(), keys.clone(), keys.clone(), None, &ranges, options)
//! };
//! assert_eq!(attend(DecodeStrategy::Auto)?.output.dims(), [1, 4, 16]);
//! // On a GPU this is the portable kernel. A CPU has no kernels, but a reference.
//! let refused = attend(DecodeStrategy::Portable).unwrap_err();
//! assert!(matches!(refused, KernelError::Unavailable { op: "decode_attention", .. }));
//! # Ok(())
//! # }
//! ```

mod archive;
mod attention;
mod backend;
mod balance;
mod cis;
mod components;
mod layers;
mod merge;
#[cfg(feature = "cuda")]
mod peers;
mod quantized;
mod select;
mod share;
mod sketch;
mod slots;

pub use crate::merge::merge_nearest::{MergingSlots, NearestOptions, StepScores, merge_nearest};
pub use crate::merge::merge_slots::VOTES_RADIX;
pub use archive::archive_slots::archive_slots;
pub use archive::archived_attention::{ArchivedAttentionOptions, archived_attention};
pub use archive::host_words::HostWords;
pub use archive::pool::ArchivePool;
pub use archive::signature_scores::{SignatureScoresOptions, SignatureStrategy, signature_scores};
pub use attention::causal_softmax::causal_softmax;
pub use attention::continued::AttendedSlots;
pub use attention::decode::{
    AttentionOutput, DecodeAttentionOptions, DecodeStrategy, SlotView, decode_attention,
};
pub use attention::evicting::{
    EvictingOutput, EvictionOptions, EvictionScope, EvictionStrategy, Guard, HeldSlots,
    LOWEST_NORM, Memory, NO_RECORD, Ties, evicting_attention,
};
pub use attention::prefill::{
    PrefillOptions, PrefillOutput, PrefillStrategy, PrefillWindow, prefill_attention,
};
pub use attention::sketch::{SketchAttention, SketchStrategy, SketchedTokens, sketch_attention};
pub use backend::error::KernelError;
pub use backend::graph::{DeviceWork, Recording, StepGraph, awaited_device_work, device_work};
pub use backend::limits::{free_memory, largest_tensor};
pub use backend::reading::Reading;
pub use balance::{BalanceOptions, BalanceStrategy, Balanced, Centre, Draws, balance};
pub use cis::{
    CisSelectOptions, CisStrategy, Dilation, Earlier, IndexSets, RangeSets, ScoreReduction,
    SetRule, SimilarityReduction, SteerOptions, cis_attention, cis_select, steer_sets,
};
pub use components::sentinels::{NO_LIST, NO_SLOT};
pub use layers::heads::{
    HeadLayout, HeadNorms, Placement, RotaryTable, split_heads, split_keys_values, write_heads,
};
pub use layers::linear::{LinearOptions, LinearStrategy, RowNorm, linear};
pub use layers::random::{uniform, uniforms};
pub use layers::rms_norm::{add_rms_norm, rms_norm};
pub use layers::sample::{DrawSettings, DrawState, draw};
pub use layers::swiglu::swiglu;
pub use merge::merge_slots::{
    GUARD, KeyRule, MergeLists, MergeOptions, Merged, merge_slots, reference as merge_reference,
};
pub use merge::nearest_slots::{
    Nearest, NearestSlotsOptions, NearestSlotsStrategy, SlotLists, nearest_slots,
};
pub use merge::takes::{TAKES_ANY, TAKES_NONE, TAKES_SIMILAR};
#[cfg(feature = "cuda")]
pub use peers::{HANDLE as INBOX_HANDLE, Inbox, MOST_PEER_BYTES, PeerError, PeerSums};
pub use quantized::pool::{QuantizedBits, QuantizedPool};
pub use quantized::quantize_slots::quantize_slots;
pub use quantized::quantized_attention::{
    QuantizedAttentionOptions, QuantizedStrategy, quantized_attention,
};
pub use select::argmin_slots::{Protected, argmin_slots};
pub use select::labels::{RefreshRows, copy_labels, label_scores};
pub use select::lists::{HEADER as LIST_HEADER, ListTable, keep_lists, list_slots};
pub use select::pages::{
    PageHeads, PageOptions, PageSpan, page_bounds, page_rows, page_scores, page_slots,
};
pub use select::pooled_rows::{RowPool, pool_rows};
pub use select::range_slots::range_slots;
pub use select::rankings::{group_priority_ranks, rankings};
pub use select::scored_rows::ScoredRows;
pub use select::top_slots::{Choice, Chosen, top_slots};
pub use select::window_starts::window_starts;
pub use share::Share;
pub use sketch::count_sketch::{
    HEAD_FIELDS, MAX_BUCKETS, SketchHashes, SketchPool, SketchSource, sketch_insert, sketch_query,
};
pub use sketch::update_sketch::{
    ABSENT, SketchScores, SketchUpdateOptions, StepLogits, update_sketch,
};
pub use slots::add_probabilities::{GroupReduction, add_contributions, add_probabilities};
pub use slots::average_scores::{AverageWeights, average_scores};
pub use slots::move_slots::{KeepLists, compact_slots, copy_slots, drop_slots, reset_last};
pub use slots::norms::{log_norms, value_norms};
pub use slots::pool::{SlotPool, SlotRanges, SlotSource};
pub use slots::scatter_rows::{
    assign, assign_int_rows, assign_ints, assign_rows, scatter_ints, scatter_rows, scatter_scalars,
};
