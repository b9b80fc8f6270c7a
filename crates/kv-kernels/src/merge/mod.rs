//! Slots merged into others, instead of dropped.
//!
//! - [`merge_slots`]: groups of slots become one slot each, of the same attention (KeepKV).
//! - [`merge_nearest`]: one slot of every head merged into the one whose key is most alike.
//! - [`nearest_slots`]: for every slot of a list, the most similar slot of another list.

pub(crate) mod merge_nearest;
pub(crate) mod merge_slots;
pub(crate) mod nearest_slots;
