//! Choices of slots: which to keep, to evict, or to read in a step.
//!
//! - [`top_slots`]: the highest scores of every row, by number or from a bound on.
//! - [`argmin_slots`]: the slot of the lowest score in every range, which an eviction removes.
//! - [`rankings`]: scores as rankings, and the order of groups that compete as one.
//! - [`pages`]: bounds of the keys of every page, and the pages that a query chooses (Quest).
//! - [`labels`]: approximate logits from a few channels (Double Sparsity, HShare).
//! - [`lists`]: token lists that heads and layers share for several steps (HShare).
//! - [`scored_rows`]: rows of scored candidates, as `pages` and `labels` return them.
//! - [`window_starts`]: where windows begin whose start moves on with the sequence (PSAW).

pub(crate) mod argmin_slots;
pub(crate) mod labels;
pub(crate) mod lists;
pub(crate) mod pages;
pub(crate) mod rankings;
pub(crate) mod scored_rows;
pub(crate) mod top_slots;
pub(crate) mod window_starts;
