//! Policies that merge what they give up into what they keep.
//!
//! * [`keepkv`]: what another policy evicts is merged so that attention does not change.
//! * [`d2o`]: what H2O evicts is averaged into similar slots.
//! * [`cam`]: the values of what decode steps evict are spread on the tokens that follow.
//! * [`kvmerger`]: similar neighbours become one slot.
//!
//! [`merge_groups`] has what they share: which victims go into which slots.

mod cam;
mod d2o;
mod keepkv;
mod kvmerger;
pub(crate) mod merge_groups;

pub use cam::{Cam, CamAttention, CamOptions, Candidates};
pub use d2o::{D2o, D2oOptions};
pub use keepkv::{
    Archive, KeepKv, KeepKvOptions, Key, Order, Predictor, Transfers, VOTES, VOTES_HIGH,
    perturbation_bound, read_votes,
};
pub use kvmerger::KvMerger;
