//! Slots of a cache: the pool that holds them, and the ops that write and move them.
//!
//! - [`pool`]: the tensors of a pool, and the ranges of slots that belong to each head.
//! - [`move_slots`]: slots copied into another pool, compacted within one pool, or dropped.
//! - [`scatter_rows`]: rows, numbers and integers written into given slots.
//! - [`add_probabilities`]: attention probabilities added to a running sum of each slot.
//! - [`average_scores`]: running averages of the scores that queries give slots.
//! - [`norms`]: norms of values, and their logarithms.

pub(crate) mod add_probabilities;
pub(crate) mod average_scores;
pub(crate) mod move_slots;
pub(crate) mod norms;
pub(crate) mod pool;
pub(crate) mod scatter_rows;
