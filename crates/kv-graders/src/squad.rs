//! Word overlap, with the normalisation of SQuAD.
//!
//! `F1 = 2 P R / (P + R)`, with `P` the fraction of the output's words that are in the reference
//! and `R` the fraction of the reference's words that are in the output. Words count as often as
//! they occur in both.
//!
//! Sources: LongBench, `LongBench/metrics.py`, for [`f1`]; transformers,
//! `data/metrics/squad_metrics.py`, for [`squad_f1`] and [`squad_exact`]; lm-evaluation-harness,
//! `tasks/coqa/utils.py`, for [`leave_one_out`].

use std::collections::HashMap;
use std::sync::LazyLock;

use regex::{Captures, Regex};

use crate::text;

// What Python's `\b` bounds. Rust's also counts combining marks as parts of words.
static WORD: LazyLock<Regex> = LazyLock::new(|| text::pattern(r"[\p{L}\p{N}_]+"));

/// `text` in lower case, without ASCII punctuation and the articles `a`, `an` and `the`, in words.
fn normalised(text: &str) -> Vec<String> {
    let plain = text::without_punctuation(&text.to_lowercase());
    let without_articles = WORD.replace_all(&plain, |word: &Captures<'_>| match &word[0] {
        "a" | "an" | "the" => " ".to_owned(),
        other => other.to_owned(),
    });
    text::words(&without_articles).map(str::to_owned).collect()
}

fn overlap_f1(output: &[String], reference: &[String]) -> f64 {
    let mut left: HashMap<&str, usize> = HashMap::new();
    for word in reference {
        *left.entry(word).or_default() += 1;
    }
    let mut same = 0;
    for word in output {
        if let Some(count) = left.get_mut(word.as_str()).filter(|count| **count > 0) {
            *count -= 1;
            same += 1;
        }
    }
    if same == 0 {
        return 0.0;
    }
    let precision = f64::from(same) / output.len() as f64;
    let recall = f64::from(same) / reference.len() as f64;
    2.0 * precision * recall / (precision + recall)
}

/// LongBench's `qa_f1_score`. Without a common word the score is 0, also when both are empty.
pub(crate) fn f1(output: &str, reference: &str) -> f64 {
    overlap_f1(&normalised(output), &normalised(reference))
}

/// SQuAD 2.0's F1: if either has no words, 1 when both have none, else 0.
pub(crate) fn squad_f1(output: &str, reference: &str) -> f64 {
    let (output, reference) = (normalised(output), normalised(reference));
    if output.is_empty() || reference.is_empty() {
        return text::score(output == reference);
    }
    overlap_f1(&output, &reference)
}

/// SQuAD's exact match: 1 if the normalised texts are equal.
pub(crate) fn squad_exact(output: &str, reference: &str) -> f64 {
    text::score(normalised(output) == normalised(reference))
}

/// CoQA's rule for several references: the mean, over the references, of the highest score against
/// the others. It makes the scores of models comparable with those of people, who are compared with
/// the other people's answers.
pub(crate) fn leave_one_out(references: &[String], score: impl Fn(&str) -> f64) -> f64 {
    let scores: Vec<f64> = references.iter().map(|reference| score(reference)).collect();
    if let [only] = scores[..] {
        return only;
    }
    let best_without = |left_out: usize| {
        let others = scores.iter().enumerate().filter(|(index, _)| *index != left_out);
        others.map(|(_, score)| *score).fold(0.0, f64::max)
    };
    (0..scores.len()).map(best_without).sum::<f64>() / scores.len() as f64
}
