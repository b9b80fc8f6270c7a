//! Count-sketches of tokens (KVReviver).
//!
//! - [`count_sketch`]: tokens added to a sketch, and estimated out of it again.
//! - [`update_sketch`]: a step's end: scores grow, and tokens move between slots and sketch.

pub(crate) mod count_sketch;
pub(crate) mod update_sketch;
