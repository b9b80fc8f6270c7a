//! Texts of answers, prepared for the grammar.

use std::sync::LazyLock;

use regex::{Captures, Regex};

use crate::text;

/// Longer and deeper answers are compared as text only: the parser's stack grows with both.
const MAX_LENGTH: usize = 1_000;
const MAX_DEPTH: usize = 20;
/// Each bar can open or close, so the parser's work is exponential in their number.
const MAX_BARS: usize = 6;

/// Characters that have a LaTeX form.
const CHARACTERS: [(char, &str); 22] = [
    ('\u{2212}', "-"),
    ('–', "-"),
    ('×', r"\times "),
    ('·', r"\cdot "),
    ('÷', r"\div "),
    ('π', r"\pi "),
    ('θ', r"\theta "),
    ('√', r"\sqrt "),
    ('∞', r"\infty "),
    ('≤', r"\le "),
    ('≥', r"\ge "),
    ('≠', r"\ne "),
    ('±', r"\pm "),
    ('∪', r"\cup "),
    ('∈', r"\in "),
    ('∅', r"\emptyset "),
    ('²', "^2"),
    ('³', "^3"),
    ('½', r"\frac{1}{2}"),
    ('°', ""),
    ('$', ""),
    ('，', ","),
];

static TEXT: LazyLock<Regex> = LazyLock::new(|| {
    text::pattern(
        r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mbox|hbox)\s*\{([^{}]*)\}",
    )
});
static JOINS: LazyLock<Regex> = LazyLock::new(|| {
    text::pattern(r"\\(?:text|textrm|mathrm|mbox)\s*\{[\s,]*(?:or|and)?[\s,]*\}|\b(?:or|and)\b")
});
static UNITS: LazyLock<Regex> = LazyLock::new(|| {
    text::pattern(concat!(
        r"([^\s\\~])(?:(?:\\[ ,;!]|[\s~/.-])*",
        r"\\(?:text|textrm|textnormal|textbf|mathrm|mbox|hbox)\s*\{[^{}]*[A-Za-z][^{}]*\}",
        r"(?:\^\{?-?[1-3]\}?)?)+\z"
    ))
});
// Euler's number and the imaginary unit are not units of measure.
static UPRIGHT: LazyLock<Regex> =
    LazyLock::new(|| text::pattern(r"\\(?:mathrm|text|operatorname)\s*\{\s*([eid])\s*\}"));
// Words after a number, such as `5 square feet`. Two letters can also be a product.
static WORDS: LazyLock<Regex> = LazyLock::new(|| {
    text::pattern(concat!(
        r"([0-9}])\s+(?:(?:[A-Za-z]{3,}|cm|mm|km|kg|ft|in|mi|ml|lb|oz|hr|am|pm|of|a)\b\s*)+",
        r"(?:\^\{?[23]\}?)?\z"
    ))
});
// Between digits of thousands. `10\,000` has a thin space there.
static SEPARATORS: LazyLock<Regex> = LazyLock::new(|| text::pattern(r"\{,\}|,\\!\s*"));
static THIN_SPACES: LazyLock<Regex> =
    LazyLock::new(|| text::pattern(r"\b([0-9]{1,3}(?:(?:\\[, !]|\s)[0-9]{3})+)\b"));
// Some outputs escape each backslash. In a matrix, two end a row.
static DOUBLED: LazyLock<Regex> = LazyLock::new(|| text::pattern(r"\\\\([A-Za-z])"));
static DEGREES: LazyLock<Regex> =
    LazyLock::new(|| text::pattern(r"\^\s*\{?\s*\\circ\s*\}?|\\degree\b|\\(?:left|right)\s*\."));
static SHIFTED_BARS: LazyLock<Regex> = LazyLock::new(|| text::pattern(r"\\(left|right)\s*\|"));
static DELIMITERS: LazyLock<Regex> = LazyLock::new(|| text::pattern(r"\\[()\[\]$]"));
static PLAIN_NAMES: LazyLock<Regex> = LazyLock::new(|| {
    text::pattern(r"(\A|[^\\A-Za-z])(sqrt|pi|infty|arcsin|arccos|arctan|sin|cos|tan|log|ln)\b")
});
static INFINITY: LazyLock<Regex> =
    LazyLock::new(|| text::pattern(r"(\A|[^\\A-Za-z])(?:infinity|inf|oo)\b"));
static THOUSANDS: LazyLock<Regex> =
    LazyLock::new(|| text::pattern(r"(^|[^0-9.])([0-9]{1,3}(?:,[0-9]{3})+)\b"));
// Letters and spaces, with three letters beside each other.
static WORD: LazyLock<Regex> =
    LazyLock::new(|| text::pattern(r"\A[A-Za-z\s]*[A-Za-z]{3}[A-Za-z\s]*\z"));
static SPACES: LazyLock<Regex> = LazyLock::new(|| text::pattern(r"\\[ ,;:!]|[\s~$]"));
static IN_PARENTHESES: LazyLock<Regex> = LazyLock::new(|| text::pattern(r"\A\(([a-z])\)\z"));

/// The letters of an answer in words: lower case, without markup and spaces.
pub(super) fn plain_text(text: &str) -> String {
    let text = TEXT.replace_all(text, "$1");
    let text = SPACES.replace_all(&text, "").to_lowercase();
    let text = text.trim_end_matches('.');
    IN_PARENTHESES.replace(text, "$1").into_owned()
}

/// The forms in which the grammar may read `text`. Words have none.
pub(super) fn readings(text: &str) -> Vec<String> {
    let bars = text.chars().filter(|c| *c == '|').count();
    if text.len() > MAX_LENGTH || depth(text) > MAX_DEPTH || bars > MAX_BARS {
        return Vec::new();
    }
    let cleaned = cleaned(text);
    if cleaned.is_empty() || WORD.is_match(&cleaned) {
        return Vec::new();
    }
    let mut readings = vec![cleaned];
    if readings[0].contains('%') {
        readings.push(readings[0].replace(r"\%", "").replace('%', ""));
    }
    for index in 0..readings.len() {
        if THOUSANDS.is_match(&readings[index]) {
            readings.push(without_thousands(&readings[index]));
        }
    }
    readings
}

/// The largest number of brackets that are open at once.
fn depth(text: &str) -> usize {
    let (mut open, mut deepest) = (0_usize, 0);
    for c in text.chars() {
        match c {
            '(' | '[' | '{' => open += 1,
            ')' | ']' | '}' => open = open.saturating_sub(1),
            _ => {}
        }
        deepest = deepest.max(open);
    }
    deepest
}

fn cleaned(text: &str) -> String {
    let mut text = DELIMITERS.replace_all(text, "").into_owned();
    for (from, to) in CHARACTERS {
        text = text.replace(from, to);
    }
    text = SEPARATORS.replace_all(&text, ",").into_owned();
    text = THIN_SPACES
        .replace_all(&text, |number: &Captures<'_>| {
            number[1].chars().filter(char::is_ascii_digit).collect::<String>()
        })
        .into_owned();
    if !text.contains(r"\begin") {
        text = DOUBLED.replace_all(&text, r"\$1").into_owned();
    }
    text = DEGREES.replace_all(&text, "").into_owned();
    text = SHIFTED_BARS
        .replace_all(
            &text,
            |side: &Captures<'_>| {
                if &side[1] == "left" { r"\lvert " } else { r"\rvert " }
            },
        )
        .into_owned();
    text = JOINS.replace_all(&text, ",").into_owned();
    text = text::strip(&text).trim_end_matches(['.', ',', ' ']).to_owned();
    text = UPRIGHT.replace_all(&text, "{$1}").into_owned();
    text = UNITS.replace(&text, "$1").into_owned();
    text = INFINITY.replace_all(&text, r"$1\infty").into_owned();
    text = PLAIN_NAMES.replace_all(&text, r"$1\$2").into_owned();
    text = WORDS.replace(&text, "$1").into_owned();
    text::strip(&text).to_owned()
}

fn without_thousands(text: &str) -> String {
    THOUSANDS
        .replace_all(text, |number: &Captures<'_>| {
            format!("{}{}", &number[1], number[2].replace(',', ""))
        })
        .into_owned()
}
