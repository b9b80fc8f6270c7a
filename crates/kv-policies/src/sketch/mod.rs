//! Policies that keep a sketch of what they give up.
//!
//! * [`kvreviver`]: dropped tokens are estimated from count-sketches, and come back where they
//!   matter.

mod kvreviver;

pub use kvreviver::{
    KvReviver, KvReviverOptions, Sketch, SketchHead, SketchOptions, SketchedOutput,
};
