//! LongBench's `code_sim_score`: how similar the first line of code is to the reference.
//!
//! The line is the first, after leading newlines, that has none of `` ` ``, `#` and `//` in it.
//! `score = round(100 ratio) / 100`, with halves rounded to even. fuzzywuzzy's `ratio` is 1 for
//! equal texts and 0 if just one is empty. Otherwise it depends on what is installed beside it:
//!
//! - without python-Levenshtein, as LongBench's `requirements.txt` has it, it is `difflib`'s ratio;
//! - with python-Levenshtein, it is `2 L / (|a| + |b|)`, with `L` the length of the longest common
//!   subsequence of characters (1 minus the normalised indel distance).
//!
//! The two differ by several points on some lines, so both are here.

use rapidfuzz::distance::indel;

use crate::ratcliff;

/// The score with `difflib`'s ratio.
pub(crate) fn difflib(output: &str, reference: &str) -> f64 {
    similarity(line_of_code(output), reference, ratcliff::ratio)
}

/// The score with python-Levenshtein's ratio.
pub(crate) fn indel(output: &str, reference: &str) -> f64 {
    let ratio = |a: &str, b: &str| indel::normalized_similarity(a.chars(), b.chars());
    similarity(line_of_code(output), reference, ratio)
}

fn line_of_code(output: &str) -> &str {
    let is_code = |line: &&str| !line.contains(['`', '#']) && !line.contains("//");
    output.trim_start_matches('\n').split('\n').find(is_code).unwrap_or_default()
}

fn similarity(a: &str, b: &str, ratio: impl Fn(&str, &str) -> f64) -> f64 {
    if a == b {
        1.0
    } else if a.is_empty() || b.is_empty() {
        0.0
    } else {
        (100.0 * ratio(a, b)).round_ties_even() / 100.0
    }
}
