//! RULER's string matches: a reference counts if its lower case is in the output's lower case.
//!
//! Source: RULER, `scripts/eval/synthetic/constants.py`. RULER multiplies by 100 and rounds the
//! mean over all samples to two decimals; the scores here are neither.

use crate::text;

/// `string_match_all`: the fraction of references that are in the output.
pub(crate) fn all(output: &str, references: &[String]) -> f64 {
    matches(output, references).sum::<f64>() / references.len() as f64
}

/// `string_match_part`: 1 if any reference is in the output.
pub(crate) fn part(output: &str, references: &[String]) -> f64 {
    matches(output, references).fold(0.0, f64::max)
}

fn matches(output: &str, references: &[String]) -> impl Iterator<Item = f64> {
    let output = output.to_lowercase();
    references.iter().map(move |reference| text::score(output.contains(&reference.to_lowercase())))
}
