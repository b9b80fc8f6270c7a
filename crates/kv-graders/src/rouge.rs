//! ROUGE-L as the Python package `rouge` 1.0.1 defines it, which LongBench uses.
//!
//! A text is split into sentences at each `.`, and a sentence into words at white space. Let `U` be
//! the set of distinct words in the longest common subsequences of all pairs of an output's and a
//! reference's sentence. With `n` distinct words in the output and `m` in the reference:
//!
//! `P = |U| / n`, `R = |U| / m`, `F = 2 P R / (P + R + 1e-8)`.
//!
//! So β is 1, a repeated word counts once, and equal texts score slightly less than 1. Text is not
//! lower-cased, and punctuation other than `.` stays in the words. A text without sentences scores
//! 0, as in LongBench.
//!
//! Departure: the public code walks back through the table of subsequences by recursion. Where that
//! exceeds Python's limit of 1,000 frames, LongBench catches the error and scores 0; here the text
//! is scored.

use std::collections::HashSet;

use crate::{lcs, text};

/// The F-measure of ROUGE-L.
pub(crate) fn rouge_l(output: &str, reference: &str) -> f64 {
    let (output, reference) = (sentences(output), sentences(reference));
    if output.is_empty() || reference.is_empty() {
        return 0.0;
    }
    let mut union = HashSet::new();
    for reference in &reference {
        for output in &output {
            // Of equally long subsequences, the one that the walk back without the output's last
            // word finds.
            let common =
                lcs::common(reference, output, |without_x, without_y| without_x > without_y);
            union.extend(common.into_iter().map(|index| reference[index].as_str()));
        }
    }
    let distinct =
        |sentences: &[Vec<String>]| sentences.iter().flatten().collect::<HashSet<_>>().len() as f64;
    let recall = union.len() as f64 / distinct(&reference);
    let precision = union.len() as f64 / distinct(&output);
    2.0 * (precision * recall / (precision + recall + 1e-8))
}

/// The words of each sentence. A sentence of white space has one empty word, as in the public code,
/// which splits the joined words at single spaces.
fn sentences(text: &str) -> Vec<Vec<String>> {
    let sentence = |sentence: &str| {
        let words: Vec<String> = text::words(sentence).map(str::to_owned).collect();
        if words.is_empty() { vec![String::new()] } else { words }
    };
    text.split('.').filter(|part| !part.is_empty()).map(sentence).collect()
}
