//! Ops that choose slots: to keep, to evict, or to read in a step.
//!
//! - [`top_slots`]: the highest scores of every row, a given number of them or all from a bound on.
//! - [`argmin_slots`]: the slot of the lowest score in every range, which an eviction removes.
//! - [`rankings`]: ranks of scores, and ranks where groups of entries compete.
//! - [`pages`]: bounds of the keys of every page, and the pages that a query attends to (Quest).
//! - [`labels`]: approximate logits from a few channels (Double Sparsity, HShare), and these
//!   channels of queries and newest keys (CIS with labels).
//! - [`lists`]: token lists that heads and layers share for several steps (HShare).
//! - [`pooled_rows`]: scores pooled over neighbouring tokens.
//! - [`range_slots`]: the slots of every range by their numbers.
//! - [`scored_rows`]: rows of scored candidates, which `pages` and `labels` return.
//! - [`window_starts`]: the first slots of windows whose start moves on with the sequence (PSAW).

pub(crate) mod argmin_slots;
pub(crate) mod labels;
pub(crate) mod lists;
pub(crate) mod pages;
pub(crate) mod pooled_rows;
pub(crate) mod range_slots;
pub(crate) mod rankings;
pub(crate) mod scored_rows;
pub(crate) mod top_slots;
pub(crate) mod window_starts;
