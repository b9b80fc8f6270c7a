//! Graders of the numbers in an output: LongBench's `count_score` and `retrieval_score`.
//!
//! `score = right / N`, with `N` the number of runs of digits in the output and `right` the number
//! of those that are equal to the reference, character by character (`007` is not `7`). The score
//! is 0 for an output without digits.
//!
//! Source: LongBench, `LongBench/metrics.py`.

use std::sync::LazyLock;

use regex::Regex;

use crate::{GradeError, Grader, text};

static DIGITS: LazyLock<Regex> = LazyLock::new(|| text::pattern(r"\d+"));
static PARAGRAPH: LazyLock<Regex> = LazyLock::new(|| text::pattern(r"Paragraph (\d+)"));
static PARAGRAPH_ZH: LazyLock<Regex> = LazyLock::new(|| text::pattern(r"段落(\d+)"));

/// `count_score`.
pub(crate) fn count(output: &str, reference: &str) -> f64 {
    let numbers: Vec<&str> = DIGITS.find_iter(output).map(|found| found.as_str()).collect();
    let right = numbers.iter().filter(|number| **number == reference).count();
    if numbers.is_empty() { 0.0 } else { right as f64 / numbers.len() as f64 }
}

/// `retrieval_score`: the reference says `Paragraph N`.
pub(crate) fn retrieval(output: &str, reference: &str) -> Result<f64, GradeError> {
    match PARAGRAPH.captures(reference) {
        Some(found) => Ok(count(output, &found[1])),
        None => Err(GradeError::Reference {
            grader: Grader::Retrieval,
            expected: "`Paragraph N`",
            reference: reference.to_owned(),
        }),
    }
}

/// `retrieval_zh_score`: the reference says `段落N`.
pub(crate) fn retrieval_zh(output: &str, reference: &str) -> Result<f64, GradeError> {
    match PARAGRAPH_ZH.captures(reference) {
        Some(found) => Ok(count(output, &found[1])),
        None => Err(GradeError::Reference {
            grader: Grader::RetrievalZh,
            expected: "`段落N`",
            reference: reference.to_owned(),
        }),
    }
}
