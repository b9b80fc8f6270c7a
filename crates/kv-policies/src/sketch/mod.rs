//! Policies that keep a sketch of the tokens that they drop.
//!
//! * [`kvreviver`]: dropped tokens are estimated from count-sketches, and come back where they
//!   matter.

mod kvreviver;

pub use kvreviver::{
    BlockReviver, BlockReviverOptions, KvReviver, KvReviverOptions, Sketch, SketchHead,
    SketchOptions, SketchedOutput, VagueForm, VagueHead, VaguePool, VagueTokens,
};

pub(crate) use kvreviver::VAGUE;
