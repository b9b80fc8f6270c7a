//! Strings as Python treats them, because the public graders are written in Python.

use regex::Regex;

/// Whether `str.split` and `str.strip` of Python treat `c` as white space. Python counts the
/// separators U+001C to U+001F, Unicode's White_Space does not.
fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// `text` without white space at its ends.
pub(crate) fn strip(text: &str) -> &str {
    text.trim_matches(is_space)
}

/// The words of `text`: its parts between runs of white space.
pub(crate) fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(is_space).filter(|word| !word.is_empty())
}

/// `text` without the 32 ASCII punctuation characters.
pub(crate) fn without_punctuation(text: &str) -> String {
    text.chars().filter(|c| !c.is_ascii_punctuation()).collect()
}

/// 1 for true, 0 for false.
pub(crate) fn score(right: bool) -> f64 {
    f64::from(u8::from(right))
}

/// The compiled form of a constant pattern.
///
/// # Panics
/// If it is not a regular expression, which a test of its module finds.
pub(crate) fn pattern(pattern: &'static str) -> Regex {
    Regex::new(pattern).expect("a constant pattern is a regular expression")
}
