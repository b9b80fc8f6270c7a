//! Graders that compare strings as they are.

use crate::text;

/// 1 if output and reference are equal after trimming.
pub(crate) fn exact(output: &str, reference: &str) -> f64 {
    text::score(text::strip(output) == text::strip(reference))
}

/// 1 if the output contains the trimmed reference. Every output contains an empty reference.
pub(crate) fn contains(output: &str, reference: &str) -> f64 {
    text::score(output.contains(text::strip(reference)))
}
