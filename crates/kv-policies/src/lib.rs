//! KV-cache compression policies over one cache.
//!
//! A [`Policy`] chooses what to keep of a prompt and keeps the cache within its budget during
//! decode. Most belong to one family, *score → keep the top* ([`KeepTop`]): a [`Scorer`] is one
//! short file in `scorers/`, and sinks, recents, intervals and allocations are options of the
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

mod attention;
mod balancekv;
mod cam;
pub mod certificates;
mod channels;
mod cis;
mod combine;
mod compressed_attention;
mod cpe;
mod d2o;
mod depth;
mod depth_bounds;
mod double_sparsity;
mod duo_attention;
mod ends;
mod error;
mod etf;
mod evictor;
mod full;
mod hshare;
mod keep_top;
mod keepkv;
mod kvmerger;
mod kvreviver;
mod lists;
mod longflow;
mod merge_groups;
mod notice;
mod observed;
mod policy;
mod prompt;
mod psaw;
mod pyramid_infer;
mod quest;
mod reads;
mod registry;
mod rerotated;
mod rescore;
mod scorer;
mod scorers;
mod set_parts;
mod step;
mod subset;
mod top_k_oracle;
mod uniform;

pub use attention::{Pooling, Reduction, pool_scores, window_attention};
pub use balancekv::{AnchorRule, BalanceKv, BalanceKvStream, Centring, OfficialList, OfficialWalk};
pub use cam::{Cam, CamAttention, CamOptions, Candidates};
pub use channels::{ChannelStatistic, Channels, by_importance};
pub use cis::{
    Cis, CisIndex, CisOptions, Compared, GroupScore, GroupSimilarity, Neighbours, SetsOf,
    Similarity,
};
pub use combine::Combine;
pub use compressed_attention::CompressedAttention;
pub use cpe::Cpe;
pub use d2o::{D2o, D2oOptions};
pub use depth_bounds::{KeyDrift, Recency, mass_bound};
pub use double_sparsity::DoubleSparsity;
pub use duo_attention::{DuoAttention, Gates};
pub use error::PolicyError;
pub use etf::Etf;
pub use evictor::{Attended, Due, Evictor};
pub use full::Full;
pub use hshare::{HShare, ListBoard, copies, share_map};
pub use keep_top::{Family, KeepTop};
pub use keepkv::{
    Archive, KeepKv, KeepKvOptions, Key, Order, Predictor, Transfers, VOTES, VOTES_HIGH,
    perturbation_bound, read_votes,
};
pub use kvmerger::KvMerger;
pub use kvreviver::{
    KvReviver, KvReviverOptions, Sketch, SketchHead, SketchOptions, SketchedOutput,
};
pub use lists::SlotList;
pub use longflow::{Certificate, LongFlow, Scope, certify};
pub use notice::warn_of_remarks;
pub use observed::Observed;
pub use policy::{Capabilities, LayerContext, Needs, Observation, Plan, Policy};
pub use prompt::{FrozenTokens, Reuse, VisibleWindow};
pub use psaw::Psaw;
pub use pyramid_infer::PyramidInfer;
pub use quest::{Choosers, LastPage, PageBounds, Quest};
pub use reads::Reads;
pub use registry::{Entry, POLICIES, build, build_named};
pub use rerotated::Rerotated;
pub use scorer::{
    DecodeView, Decoding, FamilyDefaults, QUERIES, RAW_QUERIES, SCORE, Scorer, VALUE_NORMS,
};
pub use scorers::*;
pub use step::{LayerInput, NewHeads, Step};
pub use top_k_oracle::TopKOracle;
pub use uniform::Uniform;

/// `Result` with this crate's [`PolicyError`].
pub type Result<T> = std::result::Result<T, PolicyError>;
