//! Which merges a slot takes.
//!
//! One number a slot, f32, so that it can move with the slot as a policy's track.

/// The slot takes victims whose keys are similar enough.
pub const TAKES_SIMILAR: f32 = 0.0;
/// The slot takes no victims.
pub const TAKES_NONE: f32 = 1.0;
/// The slot takes the victims that no other slot takes, whatever their keys.
pub const TAKES_ANY: f32 = 2.0;
