//! Sentinels: numbers that stand for "none" or infinity, and the bounds by which kernels recognise
//! them. Each meaning has a constant of its own.
//!
//! All are finite: WGSL has no literal for infinity, and compilers may assume that there are no
//! infinities. Sentinels keep the order of the numbers that they are compared with: those for −∞
//! are −3e38, and stay below −1e38 when a logit is added.

/// The logit of a slot that is not attended to, and the maximum over no logits. It is below every
/// logit that carries weight.
#[cfg(feature = "gpu")]
pub(crate) const LOWEST_LOGIT: f32 = -3.0e38;

/// The largest logit that carries no weight. All lower ones down to −∞ carry none either.
pub(crate) const WEIGHTLESS_LOGIT: f32 = -1.0e38;

/// The log-sum-exp of a query that does not count: `exp` of any logit less this number is 0.
#[cfg(feature = "cuda")]
pub(crate) const UNCOUNTED_LOG_SUM: f32 = 3.0e38;

/// The logarithm of a weight, a score or a mass of 0.
pub(crate) const LOG_OF_ZERO: f32 = -3.0e38;

/// The largest logarithm that stands for a mass of 0. All lower ones down to −∞ do too.
#[cfg(feature = "gpu")]
pub(crate) const MASSLESS_LOG: f32 = -1.0e38;

/// The logarithm of the norm of a value of zeros. It is finite, so that all devices can write and
/// compare it.
pub const LOWEST_NORM: f32 = -3.0e38;

/// The logarithm of the importance of a slot of weight 0, which is never evicted.
pub(crate) const INFINITE_IMPORTANCE: f32 = f32::MAX;

/// The record of a slot that no step has scored. It is below the records of all importances, of
/// values of zeros too.
pub const NO_RECORD: f32 = f32::MIN;

/// The minimum over no numbers. It is above every number that an argmin compares.
#[cfg(feature = "gpu")]
pub(crate) const NO_MINIMUM: f32 = f32::MAX;

/// The maximum over no similarities. It is below every product of two keys.
#[cfg(feature = "gpu")]
pub(crate) const NO_SIMILARITY: f32 = -3.0e38;

/// The cosine of a slot that has no partner.
pub(crate) const NO_COSINE: f32 = -2.0;

/// The sort key of no number. It is above the keys of all numbers.
#[cfg(feature = "gpu")]
pub(crate) const NO_SORT_KEY: u32 = u32::MAX;

/// No slot and no token. It is above all indices, so that a minimum prefers any of them.
#[cfg(feature = "gpu")]
pub(crate) const NO_INDEX: i32 = i32::MAX;

/// No slot, place or token in arguments and results of ops, such as after the end of a list that is
/// shorter than others. It is below all indices.
pub const NO_SLOT: i32 = -1;

/// The token that is drawn where logits are NaN.
#[cfg(feature = "gpu")]
pub(crate) const NO_TOKEN: i32 = -1;

/// The length of a token list before its first choice.
pub const NO_LIST: i32 = -1;

/// Stands in place of a shared list's number where a step retrieves a new set.
pub(crate) const NEW_SET: i32 = -1;

/// Stands in place of a shared list's number where a step reads all visible slots: a retrieval
/// would take no fewer.
pub(crate) const ALL_SLOTS: i32 = -2;

/// The block of a range that has taken no step yet. It is before all blocks.
pub(crate) const NO_BLOCK: i32 = -1;

/// No entry of a sketch.
#[cfg(feature = "gpu")]
pub(crate) const NO_ENTRY: u32 = u32::MAX;

/// The score of a token that is not in the sketch.
pub const ABSENT: f32 = -1.0;
