//! Graders of the letter that answers a multiple-choice question.
//!
//! Three are public forms: [`longbench_v2`] (LongBench, `pred.py`), [`gpqa_strict`] and
//! [`gpqa_flexible`] (lm-evaluation-harness, `tasks/gpqa`). [`choice`] departs from them on
//! purpose: it reads all of their forms, `\boxed{A}`, `Answer: A`, and a lone letter.

use std::borrow::Cow;
use std::sync::LazyLock;

use regex::{Captures, Regex};

use crate::{GradeError, Grader, boxed, text};

static LETTER: LazyLock<Regex> = LazyLock::new(|| {
    text::pattern(r"\A\s*(?:[(\[]([A-Z])[)\]]\s*(?:\z|[.:,])|([A-Z])\s*(?:\z|[.:,)]))")
});
static MARKUP: LazyLock<Regex> =
    LazyLock::new(|| text::pattern(r"\\(?:text|mathrm|mathbf|textbf|textrm|boxed)\b|[*$_`{}]"));
// A bare `A` or `I` can also be a word, so it needs the end of a sentence after it.
static STATED: LazyLock<Regex> = LazyLock::new(|| {
    text::pattern(concat!(
        r"(?i:\b(?:answer|option|choice)\b(?:\s+is\b)?)\s*:?\s*",
        r"(?i:(?:option|choice)\s+)?",
        r"(?:[(\[]([A-Z])[)\]]|([B-HJ-Z])(?:\W|\z)|([AI])\s*(?:[.,;:)\n]|\z))",
    ))
});
static BRACKETED: LazyLock<Regex> = LazyLock::new(|| text::pattern(r"\(([A-Z])\)"));
static LONGBENCH_BRACKETED: LazyLock<Regex> =
    LazyLock::new(|| text::pattern(r"The correct answer is \(([A-D])\)"));
static LONGBENCH_BARE: LazyLock<Regex> =
    LazyLock::new(|| text::pattern(r"The correct answer is ([A-D])"));
static GPQA_STRICT: LazyLock<Regex> = LazyLock::new(|| text::pattern(r"The answer is (.*)."));
static GPQA_BRACKETED: LazyLock<Regex> = LazyLock::new(|| text::pattern(r"\([A-Z]\)"));
static PUNCTUATION: LazyLock<Regex> = LazyLock::new(|| text::pattern(r"\p{P}"));

/// 1 if the output chooses the reference's letter.
///
/// The first of these that is there says the letter: the last `\boxed{A}`; the last `answer is A`,
/// `Answer: (A)` or `option A`; an output that begins with a lone `A`,
/// `(A).` or `A)`; the last `(A)`.
pub(crate) fn choice(output: &str, reference: &str) -> Result<f64, GradeError> {
    let expected = lone_letter(reference).ok_or_else(|| GradeError::Reference {
        grader: Grader::Choice,
        expected: "a letter from A to Z",
        reference: reference.to_owned(),
    })?;
    Ok(text::score(chosen(output) == Some(expected)))
}

fn chosen(output: &str) -> Option<char> {
    if let Some(letter) = boxed::last_boxed(output).and_then(lone_letter) {
        return Some(letter);
    }
    let output = MARKUP.replace_all(output, "");
    let last = |pattern: &Regex| pattern.captures_iter(&output).last().and_then(captured);
    last(&STATED).or_else(|| lone_letter(&output)).or_else(|| last(&BRACKETED))
}

fn lone_letter(text: &str) -> Option<char> {
    let text = MARKUP.replace_all(text, "");
    LETTER.captures(&text).and_then(captured)
}

/// The letter in the first group that matched.
fn captured(found: Captures<'_>) -> Option<char> {
    found.iter().skip(1).flatten().next()?.as_str().chars().next()
}

/// LongBench v2's score. The letter is after `The correct answer is`, with or without parentheses,
/// in an output without `*`.
pub(crate) fn longbench_v2(output: &str, reference: &str) -> f64 {
    let output = output.replace('*', "");
    let found = LONGBENCH_BRACKETED.captures(&output).or_else(|| LONGBENCH_BARE.captures(&output));
    text::score(found.is_some_and(|found| &found[1] == reference))
}

/// The filter `strict-match` of GPQA: the rest of the line after the first `The answer is `,
/// without its last character.
pub(crate) fn gpqa_strict(output: &str, reference: &str) -> f64 {
    let found = GPQA_STRICT.captures(output);
    let found = found.as_ref().map_or("[invalid]", |found| found.extract::<1>().1[0]);
    exact_match(text::strip(found), reference)
}

/// The filter `flexible-extract` of GPQA: the last `(A)`; else the last text of a choice, in lower
/// case and without punctuation; else the last letter after a colon.
pub(crate) fn gpqa_flexible(output: &str, reference: &str, choices: &[String]) -> f64 {
    let found = last_bracketed(output)
        .or_else(|| last_choice_text(output, choices))
        .or_else(|| last_after_colon(output, choices.len()));
    exact_match(found.as_deref().unwrap_or("[invalid]"), reference)
}

fn last_bracketed(output: &str) -> Option<Cow<'_, str>> {
    GPQA_BRACKETED.find_iter(output).last().map(|found| found.as_str().into())
}

fn last_choice_text<'a>(output: &str, choices: &[String]) -> Option<Cow<'a, str>> {
    let plain = |text: &str| PUNCTUATION.replace_all(&text.to_lowercase(), "").into_owned();
    let choices: Vec<String> = choices.iter().map(|choice| plain(text::strip(choice))).collect();
    let escaped: Vec<String> = choices.iter().map(|choice| regex::escape(choice)).collect();
    let any = Regex::new(&escaped.join("|")).ok()?;
    let output = plain(output);
    let found = text::strip(any.find_iter(&output).last()?.as_str());
    if found.is_empty() {
        return None;
    }
    // Of equal choices the last counts, as in the public code's dictionary.
    let letter = choices.iter().rposition(|choice| choice == found).map(letter);
    Some(letter.map_or_else(|| found.to_owned().into(), |letter| format!("({letter})").into()))
}

fn last_after_colon<'a>(output: &str, choices: usize) -> Option<Cow<'a, str>> {
    let letters: Vec<String> = (0..choices).map(|index| letter(index).to_string()).collect();
    let after_colon = Regex::new(&format!(r":\s*({})", letters.join("|"))).ok()?;
    let found = after_colon.captures_iter(output).last()?;
    Some(format!("({})", &found[1]).into())
}

fn letter(index: usize) -> char {
    char::from(b'A' + u8::try_from(index.min(25)).unwrap_or(25))
}

/// lm-evaluation-harness's `exact_match` that ignores case and ASCII punctuation.
fn exact_match(found: &str, reference: &str) -> f64 {
    let plain = |text: &str| text::without_punctuation(&text.to_lowercase());
    text::score(plain(found) == plain(reference))
}
