//! Values that stand for something that is no number, and the bounds by which kernels know them:
//! one constant for each meaning.
//!
//! All are finite, since WGSL cannot write infinities down, and compilers may assume that there are
//! none. Values that are compared with each other keep their order: stand-ins for −∞ are at −3e38,
//! and what was added to them is still below −1e38.

/// The logit of a slot that is not attended to, and the maximum of no logits: below every logit
/// that carries weight.
#[cfg(feature = "gpu")]
pub(crate) const LOWEST_LOGIT: f32 = -3.0e38;

/// Logits from here down to −∞ carry no weight.
pub(crate) const WEIGHTLESS_LOGIT: f32 = -1.0e38;

/// What is subtracted from the logits of a query that does not count: no power of two is left of
/// them.
#[cfg(feature = "cuda")]
pub(crate) const UNCOUNTED_LOG_SUM: f32 = 3.0e38;

/// The logarithm of a weight, a score or a mass of 0.
pub(crate) const LOG_OF_ZERO: f32 = -3.0e38;

/// Logarithms of masses from here down to −∞ are those of 0.
#[cfg(feature = "gpu")]
pub(crate) const MASSLESS_LOG: f32 = -1.0e38;

/// The logarithm of the norm of a value of zeros, finite so that all devices can write and compare
/// it.
pub const LOWEST_NORM: f32 = -3.0e38;

/// The logarithm of the importance of a slot of weight 0, which is never given up.
pub(crate) const INFINITE_IMPORTANCE: f32 = f32::MAX;

/// The minimum of no numbers: above every number that an argmin compares.
#[cfg(feature = "gpu")]
pub(crate) const NO_MINIMUM: f32 = f32::MAX;

/// The maximum of no similarities: below every product of two keys.
#[cfg(feature = "gpu")]
pub(crate) const NO_SIMILARITY: f32 = -3.0e38;

/// The cosine of a slot that has no other to be paired with.
pub(crate) const NO_COSINE: f32 = -2.0;

/// The sort key of no number: above the keys of all numbers.
#[cfg(feature = "gpu")]
pub(crate) const NO_SORT_KEY: u32 = u32::MAX;

/// No slot and no token: above all indices of either, so that a minimum prefers any.
#[cfg(feature = "gpu")]
pub(crate) const NO_INDEX: i32 = i32::MAX;

/// No slot, place or token in what ops take and return, such as behind the slots of a list that is
/// shorter than others: below all indices.
pub const NO_SLOT: i32 = -1;

/// What is drawn of logits that are no numbers.
#[cfg(feature = "gpu")]
pub(crate) const NO_TOKEN: i32 = -1;

/// The length of a list of tokens that was never chosen.
pub const NO_LIST: i32 = -1;

/// In the place of a shared list's number: the step retrieves a new set.
pub(crate) const NEW_SET: i32 = -1;

/// In the place of a shared list's number: the step reads all visible slots, which are no more than
/// a set would have.
pub(crate) const ALL_SLOTS: i32 = -2;

/// The block of a range that has taken no step yet: before all blocks.
pub(crate) const NO_BLOCK: i32 = -1;

/// No entry of a sketch.
#[cfg(feature = "gpu")]
pub(crate) const NO_ENTRY: u32 = u32::MAX;

/// The score of a token that is in no sketch.
pub const ABSENT: f32 = -1.0;
