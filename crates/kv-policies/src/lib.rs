//! KV-cache compression policies over one cache.
//!
//! A [`Policy`] chooses what to keep of a prompt and keeps the cache within its budget during
//! decode. Most belong to one family, *score → keep the top* ([`KeepTop`]): a [`Scorer`] is one
//! short file in `keep_top/`, and sinks, recents, intervals and allocations are options of the
//! family. [`build`] makes any of them from JSON.
//!
//! Policies work on bare queries, keys and values; a model is not needed. [`CompressedAttention`]
//! holds one with a layer's cache, as a Burn module:
//!
//! ```
//! use burn::tensor::{DType, Device, Distribution, Int, Tensor};
//! use kv_core::CacheOptions;
//! use kv_policies::{CompressedAttention, Observation, Step, build};
//!
//! # fn main() -> Result<(), kv_policies::PolicyError> {
//! let device = Device::flex();
//! let policy = build(&serde_json::json!({"policy": "knorm", "budget": 0.25}))?;
//!
//! // One layer's prompt: 2 sequences, 2 key-value heads, 64 tokens, head dim 16.
//! let keys = Tensor::<4>::random([2, 2, 64, 16], Distribution::Default, &device);
//! let values = keys.clone();
//! let positions = Tensor::<1, Int>::arange(0..64, (&device, DType::I32));
//! let positions = positions.unsqueeze::<2>().repeat_dim(0, 2);
//! let observation = Observation::new(&keys, &values, &positions).with_seeds(&[0, 1]);
//! let mut attention = CompressedAttention::new(policy, observation.layer);
//! attention.prefill(&observation, 8, CacheOptions::new(&device, DType::F32))?;
//! assert_eq!(attention.cache().unwrap().layout().lengths(), [16, 16, 16, 16]);
//!
//! // A decode step: 4 query heads in groups of 2.
//! let random = |heads| Tensor::<3>::random([2, heads, 16], Distribution::Default, &device);
//! let position = Tensor::full([2], 64, (&device, DType::I32));
//! let step = Step::new(random(4), random(2), random(2), position);
//! let output = attention.forward(step)?;
//! assert_eq!(output.dims(), [2, 4, 16]);
//! # Ok(())
//! # }
//! ```

pub mod certificates;
mod combine;
mod compressed_attention;
mod full;
mod keep_top;
mod merging;
mod overwriting;
mod policy;
mod prefill;
mod reading;
mod registry;
mod sampling;
mod sketch;

pub use certificates::depth_bounds::{KeyDrift, Recency, mass_bound};
pub use certificates::eviction::{Certificate, certify};
pub use combine::Combine;
pub use compressed_attention::CompressedAttention;
pub use full::Full;
pub use keep_top::{
    Decoding, ExpectedAttention, Family, FamilyDefaults, H2o, KNorm, KeepTop, KeyDiff, LagKv,
    QUERIES, RAW_QUERIES, RKv, Random, RecentAttention, Rerotated, SCORE, Scorer, SnapKv,
    StreamingLlm, Tova, VALUE_NORMS, Vatp,
};
pub use merging::{
    Archive, Cam, CamAttention, CamOptions, Candidates, D2o, D2oOptions, KeepKv, KeepKvOptions,
    Key, KvMerger, Order, Predictor, Transfers, VOTES, VOTES_HIGH, perturbation_bound, read_votes,
};
pub use overwriting::{DuoAttention, Gates, LongFlow, Scope};
pub use policy::attention_scores::{Pooling, Reduction, pool_scores, window_attention};
pub use policy::board::ListBoard;
pub use policy::error::{PolicyError, Result};
pub use policy::evictor::EvictionPolicy;
pub use policy::lists::SlotList;
pub use policy::notice::warn_of_remarks;
pub use policy::observation::{LayerContext, Observation, Observed};
pub use policy::prompt::{FrozenTokens, Reuse, VisibleWindow};
pub use policy::reads::Reads;
pub use policy::step::{LayerInput, NewHeads, Step};
pub use policy::step_plan::{
    Attended, DecodeView, Eviction, EvictionRule, OwnAttention, OwnUpdate, SlotScores,
    StepAttention, StepOutput, StepPlan, StepUpdate, TokenSlot, VictimChoice,
};
pub use policy::{Capabilities, Needs, Plan, Policy};
pub use prefill::{Etf, Psaw, PyramidInfer};
pub use reading::{
    ChannelStatistic, Channels, Choosers, Cis, CisIndex, CisOptions, Compared, Cpe, DoubleSparsity,
    GroupScore, GroupSimilarity, HShare, LastPage, Neighbours, PageBounds, Quest, SetsOf,
    Similarity, TopKOracle, by_importance, copies, share_map,
};
pub use registry::{Entry, POLICIES, build, build_named};
pub use sampling::{
    AnchorRule, BalanceKv, BalanceKvStream, Centring, OfficialList, OfficialWalk, Uniform,
};
pub use sketch::{KvReviver, KvReviverOptions, Sketch, SketchHead, SketchOptions, SketchedOutput};
