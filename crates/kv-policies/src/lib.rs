#![doc = include_str!("../README.md")]

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

pub use certificates::depth_bounds::{KeyDrift, Recency};
pub use certificates::eviction::{Certificate, certify};
pub use combine::Combine;
pub use compressed_attention::CompressedAttention;
pub use full::Full;
pub use keep_top::{
    Decoding, ExpectedAttention, H2o, KNorm, KeepTop, KeepTopConfig, KeepTopDefaults, KeyDiff,
    LagKv, QUERIES, RAW_QUERIES, RKv, Random, RecentAttention, Rerotated, SCORE, Scorer, SnapKv,
    StreamingLlm, Tova, VALUE_NORMS, Vatp,
};
pub use merging::{
    Archive, Cam, CamAttention, CamOptions, Candidates, D2o, D2oOptions, KeepKv, KeepKvOptions,
    KvMerger, Order, Predictor, Transfers, VOTES, VOTES_HIGH, perturbation_bound, read_votes,
};
pub use overwriting::{DuoAttention, Gates, LongFlow, Scope};
pub use policy::attention_scores::{Pooling, Reduction, pool_scores, window_attention};
pub use policy::board::SharedListBoard;
pub use policy::config::in_json;
pub use policy::error::{PolicyError, Result};
pub use policy::evictor::EvictionPolicy;
pub use policy::lists::SlotList;
pub use policy::notice::{crowded_sketch, warn_of_remarks};
pub use policy::observation::{HeadPart, KnownScores, LayerContext, Observation, OwnedObservation};
pub use policy::prompt::{FrozenTokens, Reuse, VisibleWindow};
pub use policy::reads::Reads;
pub use policy::step::{LayerInput, Qkv, Step};
pub use policy::step_plan::{
    Attended, DecodeView, Eviction, EvictionRule, Merge, OwnAttention, OwnUpdate, SlotScores,
    StepAttention, StepOutput, StepPlan, StepUpdate, TokenSlot, VictimChoice,
};
pub use policy::write_slots::WriteSlots;
pub use policy::{Capabilities, Composition, Needs, Plan, Policy, SlotWeights};
pub use prefill::{Etf, Psaw, PyramidInfer};
pub use reading::{
    ChannelStatistic, Channels, Cis, CisIndex, CisOptions, Cpe, DoubleSparsity, HShare, LastPage,
    PageBounds, Quest, SetsOf, Similarity, StepQueries, TopKOracle, by_importance, copies,
    share_map,
};
pub use registry::description::{Description, describe};
pub use registry::{
    Entry, POLICIES, Treatment, build, build_named, entry, leaves_budget_open, with_budget,
};
pub use sampling::{
    AnchorRule, BalanceKv, BalanceKvStream, Centring, OfficialList, OfficialWalk, SurvivorWeights,
    Uniform,
};
pub use sketch::{
    BlockReviver, BlockReviverOptions, KvReviver, KvReviverOptions, Sketch, SketchHead,
    SketchOptions, SketchedOutput, VagueForm, VagueHead, VaguePool, VagueTokens,
};
