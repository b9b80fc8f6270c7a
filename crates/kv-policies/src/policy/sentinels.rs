//! Values that stand for something that is no number: one constant for each meaning.
//!
//! All are finite, since not every device can write an infinity, and far from what they are
//! compared with.

/// The logarithm of a score or a weight of 0, which is what new slots have. What is added to it, or
/// subtracted, is lost in rounding.
pub(crate) const LOG_OF_NO_SCORE: f32 = -1.0e30;

/// Logarithms of scores up to this number stand for a score of 0.
pub(crate) const SCORELESS_LOG: f32 = LOG_OF_NO_SCORE / 2.0;

/// The threshold of a sequence that has had no victims: below all cosines.
pub(crate) const NO_THRESHOLD: f32 = -2.0;

/// The nearness of a token that is not behind another: below the negated distance of any two
/// tokens.
pub(crate) const NO_NEARNESS: f32 = -1.0e30;
