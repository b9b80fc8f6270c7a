//! MATH's equivalence: equality after a normalisation of strings.
//!
//! Source: MATH, `modeling/math_equivalence.py`.

use std::sync::LazyLock;

use regex::Regex;

use crate::text;

static FRACTION: LazyLock<Regex> =
    LazyLock::new(|| text::pattern(r"\A(0|-?[1-9][0-9]*)/(0|-?[1-9][0-9]*)\z"));

/// Whether MATH's `is_equiv` holds: the normalised strings are equal. If the public code fails on
/// one of them, as it does on `\sqrt` at the end, the strings themselves are compared.
///
/// ```
/// assert!(kv_graders::math_is_equiv(r"\dfrac12", "1/2"));
/// assert!(!kv_graders::math_is_equiv("2/4", "1/2"));
/// ```
pub fn math_is_equiv(answer: &str, reference: &str) -> bool {
    match (normalised(answer), normalised(reference)) {
        (Some(answer), Some(reference)) => answer == reference,
        _ => answer == reference,
    }
}

/// The normal form, or none where the public code fails.
fn normalised(text: &str) -> Option<String> {
    let mut text = text.replace('\n', "").replace(r"\!", "").replace(r"\\", r"\");
    for (from, to) in [
        ("tfrac", "frac"),
        ("dfrac", "frac"),
        (r"\left", ""),
        (r"\right", ""),
        (r"^{\circ}", ""),
        (r"^\circ", ""),
        (r"\$", ""),
    ] {
        text = text.replace(from, to);
    }
    // Only units begin with a space in `\text`, at the right of the answer.
    if let Some((left, right)) = text.split_once(r"\text{ ") {
        if right.contains(r"\text{ ") {
            return None;
        }
        text = left.to_owned();
    }
    text = text.replace(r"\%", "").replace(" .", " 0.").replace("{.", "{0.");
    if text.is_empty() {
        return Some(text);
    }
    if text.starts_with('.') {
        text.insert(0, '0');
    }
    // A name of at most two characters before a single `=`.
    if let Some((name, value)) = text.split_once('=')
        && !value.contains('=')
        && name.chars().count() <= 2
    {
        text = value.to_owned();
    }
    text = roots(&text)?.replace(' ', "");
    text = fractions(&text)?;
    if text == "0.5" {
        text = r"\frac{1}{2}".to_owned();
    }
    Some(FRACTION.replace(&text, r"\frac{$1}{$2}").into_owned())
}

/// `\sqrt3` as `\sqrt{3}`.
fn roots(text: &str) -> Option<String> {
    let mut parts = text.split(r"\sqrt");
    let mut out = parts.next()?.to_owned();
    for part in parts {
        let mut rest = part.chars();
        match rest.next()? {
            '{' => out.push_str(&format!(r"\sqrt{part}")),
            first => out.push_str(&format!(r"\sqrt{{{first}}}{}", rest.as_str())),
        }
    }
    Some(out)
}

/// `\frac12` as `\frac{1}{2}`, and `\frac1{72}` as `\frac{1}{72}`. One character after `\frac`
/// leaves the whole text as it is.
fn fractions(text: &str) -> Option<String> {
    let mut parts = text.split(r"\frac");
    let mut out = parts.next()?.to_owned();
    for part in parts {
        let mut rest = part.chars();
        let above = rest.next()?;
        if above == '{' {
            out.push_str(&format!(r"\frac{part}"));
            continue;
        }
        let Some(below) = rest.next() else { return Some(text.to_owned()) };
        if below == '{' {
            out.push_str(&format!(r"\frac{{{above}}}{{{}", rest.as_str()));
        } else {
            out.push_str(&format!(r"\frac{{{above}}}{{{below}}}{}", rest.as_str()));
        }
    }
    Some(out)
}
