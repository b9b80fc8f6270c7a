//! Ops on count-sketches of tokens (KVReviver).
//!
//! - [`count_sketch`]: adds tokens to a sketch, and estimates them from it.
//! - [`update_sketch`]: the end of a step: adds attention to scores, and moves tokens between slots
//!   and sketch.

pub(crate) mod count_sketch;
pub(crate) mod update_sketch;
