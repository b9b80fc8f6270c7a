//! Policies that keep a sketch of the tokens that they drop.
//!
//! * [`kvreviver`]: dropped tokens are estimated from count-sketches, and come back where they
//!   matter.

mod kvreviver;

pub use kvreviver::{
    KvReviver, KvReviverOptions, QuantizedHead, QuantizedReviver, QuantizedReviverOptions,
    QuantizedTokens, Sketch, SketchHead, SketchOptions, SketchedOutput,
};

pub(crate) use kvreviver::VAGUE;
