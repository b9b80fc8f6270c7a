//! Graders of the last number of an output, for GSM8K and the like.
//!
//! [`strict`] and [`flexible`] are the two filters of lm-evaluation-harness's `gsm8k.yaml`
//! (version 3.0), followed by its `exact_match`: both sides lose `,`, `$`, all before `#### `, and
//! a `.` at the end, and are compared as strings in lower case. There `18.00` is not `18`.
//!
//! [`number`] departs from them on purpose: it compares values, so that `18.00` is `18`; it reads
//! the `-` of `5-3` as an operator, not as a sign; and a `...` at the end is not a number.

use std::sync::LazyLock;

use num_rational::BigRational;
use regex::Regex;

use crate::{GradeError, Grader, boxed, math, text};

static STRICT: LazyLock<Regex> = LazyLock::new(|| text::pattern(r"#### (-?[0-9.,]+)"));
static FLEXIBLE: LazyLock<Regex> = LazyLock::new(|| text::pattern(r"-?[$0-9.,]{2,}|-?[0-9]+"));
static IGNORED: LazyLock<Regex> = LazyLock::new(|| text::pattern(r"[,$]"));
static BEFORE_MARK: LazyLock<Regex> = LazyLock::new(|| text::pattern(r"(?s).*#### "));
// Python's `$` also matches before a newline at the end.
static LAST_POINT: LazyLock<Regex> = LazyLock::new(|| text::pattern(r"\.(\n?)\z"));
static NUMBER: LazyLock<Regex> = LazyLock::new(|| {
    let digits = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+";
    Regex::new(&format!(r"(?:^|[^A-Za-z0-9_)\]}}])(-?)\s?\$?(-?)({digits})"))
        .expect("a constant pattern is a regular expression")
});

/// The filter `strict-match`: the first `#### N`.
pub(crate) fn strict(output: &str, reference: &str) -> f64 {
    let found = STRICT.captures(output).map_or("[invalid]", |found| found.extract::<1>().1[0]);
    exact_match(found, reference)
}

/// The filter `flexible-extract`: the last run of digits, `$`, `.` and `,`.
pub(crate) fn flexible(output: &str, reference: &str) -> f64 {
    let found = FLEXIBLE.find_iter(output).last().map_or("[invalid]", |found| found.as_str());
    exact_match(text::strip(found), reference)
}

fn exact_match(found: &str, reference: &str) -> f64 {
    let plain = |text: &str| {
        let text = IGNORED.replace_all(text, "");
        let text = BEFORE_MARK.replace_all(&text, "");
        LAST_POINT.replace_all(&text, "$1").to_lowercase()
    };
    text::score(plain(found) == plain(reference))
}

/// 1 if the number of the output has the value of the reference's.
pub(crate) fn number(output: &str, reference: &str) -> Result<f64, GradeError> {
    let expected = value(reference).ok_or_else(|| GradeError::Reference {
        grader: Grader::Number,
        expected: "a number",
        reference: reference.to_owned(),
    })?;
    Ok(text::score(value(output) == Some(expected)))
}

/// The number after the first `#### `, else the last in the last `\boxed{}`, else the last.
fn value(text: &str) -> Option<BigRational> {
    if let Some((_, marked)) = text.split_once("#### ") {
        return numbers(marked).next();
    }
    let boxed = boxed::last_boxed(text).and_then(|inside| numbers(inside).last());
    boxed.or_else(|| numbers(text).last())
}

fn numbers(text: &str) -> impl Iterator<Item = BigRational> {
    let text = text.replace('\u{2212}', "-").replace(r"\$", "$").replace("{,}", ",");
    let values: Vec<BigRational> = NUMBER
        .captures_iter(&text)
        .filter_map(|found| {
            let value = math::decimal(&found[3].replace(',', ""))?;
            Some(if found[1].is_empty() && found[2].is_empty() { value } else { -value })
        })
        .collect();
    values.into_iter()
}
