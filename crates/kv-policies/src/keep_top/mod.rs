//! Policies that score tokens and keep the highest ([`KeepTop`]). A policy's file has its
//! parameters and the one step that its paper adds ([`Scorer`]).
//!
//! * [`streaming_llm`]: attention sinks and the most recent tokens.
//! * [`snapkv`]: attention of the last queries, pooled.
//! * [`pyramidkv`]: SnapKV with budgets that fall with depth.
//! * [`adakv`]: SnapKV whose heads compete for slots.
//! * [`h2o`]: heavy hitters by accumulated attention, and recents.
//! * [`vatp`]: H2O times the value's norm.
//! * [`tova`]: the last query's attention.
//! * [`r_kv`]: importance against redundancy.
//! * [`knorm`]: small key norms.
//! * [`keydiff`]: keys unlike the mean key.
//! * [`expected_attention`]: attention that future queries would give.
//! * [`lagkv`]: spread of keys and values relative to the next chunk.
//! * [`recent_attention`]: PyramidInfer's tokens, without pruning hidden states.
//! * [`random`]: tokens at random.
//!
//! What they share:
//!
//! * [`scorer`]: the trait that they implement.
//! * [`policy`]: the policy around a scorer and its evictions; [`options`]: its options; [`build`]:
//!   both from JSON.
//! * [`rescore`]: scores of a cache's slots, as if they were a prompt.
//! * [`rerotated`]: positions without gaps.

pub(crate) mod adakv;
pub(crate) mod build;
mod expected_attention;
mod h2o;
mod keydiff;
mod knorm;
mod lagkv;
mod options;
mod policy;
pub(crate) mod pyramidkv;
mod r_kv;
mod random;
pub(crate) mod recent_attention;
mod rerotated;
pub(crate) mod rescore;
mod scorer;
mod snapkv;
mod streaming_llm;
mod tova;
mod vatp;

pub use expected_attention::ExpectedAttention;
pub use h2o::H2o;
pub use keydiff::KeyDiff;
pub use knorm::KNorm;
pub use lagkv::LagKv;
pub use options::KeepTopConfig;
pub use policy::KeepTop;
pub use r_kv::RKv;
pub use random::Random;
pub use recent_attention::RecentAttention;
pub use rerotated::Rerotated;
pub use scorer::{Decoding, KeepTopDefaults, QUERIES, RAW_QUERIES, SCORE, Scorer, VALUE_NORMS};
pub use snapkv::SnapKv;
pub use streaming_llm::StreamingLlm;
pub use tova::Tova;
pub use vatp::Vatp;
