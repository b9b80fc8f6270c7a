//! Ops that merge slots into others, where an eviction would drop them.
//!
//! - [`merge_slots`]: groups of slots become one slot each, which gets the group's attention
//!   (KeepKV).
//! - [`merge_nearest`]: one slot of every head is merged into the slot whose key is most alike.
//! - [`nearest_slots`]: for every slot of a list, the most similar slot of another list.

pub(crate) mod merge_nearest;
pub(crate) mod merge_slots;
pub(crate) mod nearest_slots;
pub(crate) mod takes;
