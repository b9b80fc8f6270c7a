//! Policies that merge victims into the slots that stay.
//!
//! * [`keepkv`]: another policy's victims are merged so that attention does not change.
//! * [`d2o`]: H2O's victims are averaged into similar slots.
//! * [`cam`]: the values of decode steps' victims are spread on the tokens that follow.
//! * [`kvmerger`]: similar neighbours become one slot.
//!
//! [`merge_groups`] is common to them: which victims go into which slots.

mod cam;
mod d2o;
mod keepkv;
mod kvmerger;
pub(crate) mod merge_groups;

pub use cam::{Cam, CamAttention, CamOptions, Candidates};
pub use d2o::{D2o, D2oOptions};
pub use keepkv::{
    Archive, KeepKv, KeepKvOptions, Order, Predictor, Transfers, VOTES, VOTES_HIGH,
    perturbation_bound, read_votes,
};
pub use kvmerger::KvMerger;
