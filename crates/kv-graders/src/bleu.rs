//! BLEU of one sentence as sacreBLEU 2.6 defines it, with the tokenizer `intl`, smoothing `exp`,
//! and four orders always, as lm-evaluation-harness calls it for TruthfulQA.
//!
//! `BLEU = min(1, exp(1 - r / c)) (p_1 p_2 p_3 p_4)^(1/4)`, with `c` and `r` the tokens of output
//! and reference, and `p_n` the fraction of the output's n-grams that are in the reference. The
//! `k`-th `p_n` without a hit is `1 / (2^k N_n)`, with `N_n` n-grams in the output. Without any
//! hit, and for outputs of less than four tokens, BLEU is 0.

use std::collections::HashMap;
use std::sync::LazyLock;

use regex::Regex;

use crate::text;

const ORDER: usize = 4;

static AFTER_NO_NUMBER: LazyLock<Regex> = LazyLock::new(|| text::pattern(r"(\P{N})(\p{P})"));
static BEFORE_NO_NUMBER: LazyLock<Regex> = LazyLock::new(|| text::pattern(r"(\p{P})(\P{N})"));
static SYMBOL: LazyLock<Regex> = LazyLock::new(|| text::pattern(r"\p{S}"));

/// BLEU, from 0 to 1; sacreBLEU's is 100 times this.
pub(crate) fn bleu(output: &str, reference: &str) -> f64 {
    let (output, reference) = (tokens(output), tokens(reference));
    let mut log_sum = 0.0;
    let (mut any, mut smoothing) = (false, 1.0);
    for n in 1..=ORDER {
        let total = output.windows(n).len();
        if total == 0 {
            return 0.0;
        }
        let correct = hits(&output, &reference, n);
        any |= correct > 0;
        let precision = if correct == 0 {
            smoothing *= 2.0;
            1.0 / (smoothing * total as f64)
        } else {
            correct as f64 / total as f64
        };
        log_sum += precision.ln();
    }
    if !any {
        return 0.0;
    }
    let brevity = (1.0 - reference.len() as f64 / output.len() as f64).min(0.0).exp();
    (brevity * (log_sum / ORDER as f64).exp()).min(1.0)
}

/// Splits at punctuation that has no digit on one of its sides, and around symbols.
fn tokens(text: &str) -> Vec<String> {
    let text = AFTER_NO_NUMBER.replace_all(text.trim_end(), "$1 $2 ");
    let text = BEFORE_NO_NUMBER.replace_all(&text, " $1 $2");
    let text = SYMBOL.replace_all(&text, " $0 ");
    text::words(&text).map(str::to_owned).collect()
}

fn hits(output: &[String], reference: &[String], n: usize) -> usize {
    let mut left: HashMap<&[String], usize> = HashMap::new();
    for gram in reference.windows(n) {
        *left.entry(gram).or_default() += 1;
    }
    let mut hits = 0;
    for gram in output.windows(n) {
        if let Some(count) = left.get_mut(gram).filter(|count| **count > 0) {
            *count -= 1;
            hits += 1;
        }
    }
    hits
}
