//! ROUGE as the Python package `rouge-score` 0.1.2 defines it, without stemming.
//!
//! A token is a run of the characters a-z and 0-9 in the lower-cased text. With `h` hits, `n`
//! tokens or n-grams in the output and `m` in the reference: `P = h / n`, `R = h / m`,
//! `F = 2 P R / (P + R)`.
//!
//! It is not the package `rouge` of [`crate::rouge`], which LongBench uses.

use std::collections::{BTreeSet, HashMap};

use crate::lcs;

/// ROUGE-N's F: a hit is an n-gram of both, as often as it occurs in both.
pub(crate) fn rouge_n(output: &str, reference: &str, n: usize) -> f64 {
    let (output, reference) = (tokens(output), tokens(reference));
    let mut left = counts(reference.windows(n));
    let hits = output.windows(n).filter(|gram| take(&mut left, gram)).count();
    f_measure(hits, output.windows(n).len(), reference.windows(n).len())
}

/// Summary-level ROUGE-L's F. Sentences are lines. For each sentence of the reference, the tokens
/// in the union of its longest common subsequences with all sentences of the output are hits, as
/// often as they occur in both texts.
pub(crate) fn rouge_lsum(output: &str, reference: &str) -> f64 {
    let sentences = |text: &str| -> Vec<Vec<String>> { text.split('\n').map(tokens).collect() };
    let (output, reference) = (sentences(output), sentences(reference));
    let mut left = counts(output.iter().flatten());
    let mut hits = 0;
    for sentence in &reference {
        // Of equally long subsequences, the one that the walk back without the reference's last
        // token finds.
        let common = |other: &Vec<String>| {
            lcs::common(sentence, other, |without_x, without_y| without_x >= without_y)
        };
        let union: BTreeSet<usize> = output.iter().flat_map(common).collect();
        hits += union.into_iter().filter(|index| take(&mut left, &sentence[*index])).count();
    }
    let length = |sentences: &[Vec<String>]| sentences.iter().map(Vec::len).sum();
    f_measure(hits, length(&output), length(&reference))
}

fn tokens(text: &str) -> Vec<String> {
    let lower = text.to_lowercase();
    let tokens = lower.split(|c: char| !c.is_ascii_lowercase() && !c.is_ascii_digit());
    tokens.filter(|token| !token.is_empty()).map(str::to_owned).collect()
}

fn counts<'a, T: ?Sized + Eq + std::hash::Hash>(
    items: impl Iterator<Item = &'a T>,
) -> HashMap<&'a T, usize> {
    let mut counts = HashMap::new();
    for item in items {
        *counts.entry(item).or_default() += 1;
    }
    counts
}

/// Takes one `item`, if there is one left.
fn take<T: ?Sized + Eq + std::hash::Hash>(left: &mut HashMap<&T, usize>, item: &T) -> bool {
    match left.get_mut(item) {
        Some(count) if *count > 0 => {
            *count -= 1;
            true
        }
        _ => false,
    }
}

fn f_measure(hits: usize, output: usize, reference: usize) -> f64 {
    if hits == 0 {
        return 0.0;
    }
    let (precision, recall) = (hits as f64 / output as f64, hits as f64 / reference as f64);
    2.0 * precision * recall / (precision + recall)
}
