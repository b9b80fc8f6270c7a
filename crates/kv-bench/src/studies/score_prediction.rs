//! How well a slot's past scores predict its future scores, in the full cache, over held-out text
//! (KeepKV, figure 2 d).

use anyhow::{Context, ensure};
use burn::tensor::{DType, Tensor};
use kv_core::{counted, read_f32};
use kv_models::PrefillPass;
use kv_policies::{KeepKvOptions, Needs, Observation};

use super::SUITE;
use crate::bench::ModelBench;
use crate::options::PaperOptions;
use crate::progress::Progress;
use crate::prompts;
use crate::record::{Case, metric};

/// Steps ahead.
const DISTANCES: [usize; 3] = [1, 8, 32];
/// Scores that a sliding mean has.
const WIDTH: usize = 32;

/// A rule that predicts future scores from past scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Predictor {
    /// A moving average over the samples that it has seen.
    Ema,
    /// The moving average, corrected as if it had seen all since the text's first token (equation
    /// 8).
    EmaAbsoluteStep,
    /// The mean of all scores, as in policies that accumulate them.
    Cumulative,
    /// The mean of the last [`WIDTH`] scores.
    Sliding,
    /// The last score.
    Last,
}

const PREDICTORS: [(Predictor, &str); 5] = [
    (Predictor::Ema, "moving average"),
    (Predictor::EmaAbsoluteStep, "moving average absolute-step"),
    (Predictor::Cumulative, "cumulative mean"),
    (Predictor::Sliding, "sliding mean"),
    (Predictor::Last, "last score"),
];

/// A slot's scores so far.
struct History<'a> {
    /// The scores since its token came, the latest score last.
    scores: &'a [f64],
    /// The number of latest scores that a moving average has seen.
    seen: usize,
    /// Tokens of the text so far.
    step: usize,
}

impl Predictor {
    fn predict(self, history: &History<'_>) -> f64 {
        let History { scores, seen, step } = *history;
        let alpha = KeepKvOptions::default().alpha;
        let last = |count: usize| &scores[scores.len() - count.min(scores.len())..];
        let mean = |scores: &[f64]| scores.iter().sum::<f64>() / scores.len() as f64;
        let averaged = |count: usize| {
            let sum = last(seen).iter().fold(0.0, |sum, score| alpha * sum + (1.0 - alpha) * score);
            sum / (1.0 - alpha.powi(count as i32))
        };
        match self {
            Self::Ema => averaged(last(seen).len()),
            Self::EmaAbsoluteStep => averaged(step),
            Self::Cumulative => mean(scores),
            Self::Sliding => mean(last(WIDTH)),
            Self::Last => scores.last().copied().unwrap_or(f64::NAN),
        }
    }
}

/// Errors of one predictor at one distance.
#[derive(Default)]
struct Errors {
    all: Vec<f32>,
    /// Weighted by attention.
    sum: f64,
    weight: f64,
}

/// One error for every predictor at every distance.
type Table = Vec<Vec<Errors>>;

/// Measures at some `steps` of the second half of a text of at most so many tokens.
///
/// # Errors
/// For texts that are too short.
pub(crate) fn run(
    bench: &mut ModelBench<'_>,
    name: &str,
    options: &PaperOptions,
    most: usize,
    steps: usize,
) -> anyhow::Result<()> {
    let (source, text) = prompts::text(options.text.as_deref())?;
    let mut tokens = bench.model.encode(&text)?;
    tokens.truncate(most.min(bench.model.config().max_positions));
    let ahead = DISTANCES[DISTANCES.len() - 1];
    ensure!(tokens.len() >= 4 * ahead, "{source} is too short to predict {ahead} steps ahead");
    let layers = bench.model.config().num_layers;
    let mut progress = Progress::new(layers, &format!("{name}, predictors"));
    let mut table: Table =
        PREDICTORS.iter().map(|_| DISTANCES.iter().map(|_| Errors::default()).collect()).collect();
    let pass = PrefillPass {
        needs: Needs { window: usize::MAX, ..Needs::default() },
        ..PrefillPass::default()
    };
    // A prefill has the queries that decode steps would have if this text were fed to them.
    bench.observe(&tokens, pass, &mut |observation| {
        progress.step();
        measure(observation, steps, &mut table)
    })?;
    progress.finish();
    let count = tokens.len();
    let [of_steps, of_tokens] = [(steps, "step"), (count, "token")].map(|(n, of)| counted(n, of));
    bench.note(format!("scores: {of_steps} of {of_tokens}, {source}, all layers and heads"));
    for (at, distance) in DISTANCES.into_iter().enumerate() {
        let steps = counted(distance, "step");
        let case = Case::of(format!("{name} predictors, {steps} ahead")).samples_of(&source, count);
        for ((_, name), errors) in PREDICTORS.iter().zip(&mut table) {
            let errors = &mut errors[at];
            let mean = errors.sum / errors.weight;
            let setup = (*name, None);
            let median = median(&mut errors.all);
            bench.record(SUITE, &case, setup, metric::PREDICTION_MEDIAN, median);
            bench.record(SUITE, &case, setup, metric::PREDICTION_MEAN, mean);
        }
    }
    Ok(())
}

/// Predicts the scores of one layer's slots, at some steps of the text's second half.
fn measure(observation: &Observation<'_>, steps: usize, table: &mut Table) -> anyhow::Result<()> {
    let queries = observation.window.as_ref().context("queries were not observed")?;
    let (kv_heads, tokens) = (observation.dims()[1], observation.tokens());
    let prompt = tokens / 2;
    let last = tokens - 1 - DISTANCES[DISTANCES.len() - 1];
    let steps = steps.min(last - prompt + 1);
    for head in 0..kv_heads {
        let scores = scores(queries, observation.keys, head)?;
        for index in 0..steps {
            let now = prompt + (last - prompt) * index / (steps - 1).max(1);
            predict_scores(&scores, prompt, now, table);
        }
    }
    Ok(())
}

/// Predicts, at step `now`, the scores of all slots there are.
fn predict_scores(scores: &[Vec<f64>], prompt: usize, now: usize, table: &mut Table) {
    // A moving average begins with the prompt's last queries, as the policy's.
    let begin = prompt.saturating_sub(KeepKvOptions::default().window);
    let sums = DISTANCES.map(|distance| {
        let step = now + distance;
        // The sum over all slots that this step attends to: an error weighs as much as its slot's
        // share of attention.
        (0..=step).map(|slot| scores[slot][step - slot]).sum::<f64>()
    });
    for slot in 0..=now {
        let seen = now + 1 - begin.max(slot);
        let history = History { scores: &scores[slot][..=now - slot], seen, step: now + 1 };
        for ((predictor, _), errors) in PREDICTORS.iter().zip(&mut *table) {
            let predicted = predictor.predict(&history);
            for ((distance, sum), errors) in DISTANCES.iter().zip(sums).zip(errors) {
                let score = scores[slot][now + distance - slot];
                if score > 0.0 {
                    let error = (1.0 - predicted / score).abs();
                    errors.all.push(error as f32);
                    errors.sum += score / sum * error;
                    errors.weight += score / sum;
                }
            }
        }
    }
}

/// Scores `exp(q·k/√D)` of one key-value head's slots, each since its token came: means over the
/// group's query heads, as KeepKV takes them, and all divided by one number.
fn scores(queries: &Tensor<4>, keys: &Tensor<4>, head: usize) -> anyhow::Result<Vec<Vec<f64>>> {
    let [_, heads, tokens, head_dim] = queries.dims();
    let group = heads / keys.dims()[1];
    let scale = 1.0 / (head_dim as f64).sqrt();
    let keys = keys.clone().narrow(1, head, 1).cast(DType::F32);
    let queries = queries.clone().narrow(1, head * group, group).cast(DType::F32);
    let keys = keys.expand([1, group, tokens, head_dim]);
    let logits = keys.matmul(queries.swap_dims(2, 3)).mul_scalar(scale);
    let logits = read_f32("logits", logits)?;
    let behind = |slot: usize, member: usize| {
        let row = &logits[(member * tokens + slot) * tokens..][..tokens];
        &row[slot..]
    };
    let all = (0..tokens).flat_map(|slot| (0..group).flat_map(move |member| behind(slot, member)));
    let top = f64::from(all.copied().fold(f32::NEG_INFINITY, f32::max));
    let of = |slot: usize| {
        let mut mean = vec![0.0; tokens - slot];
        for member in 0..group {
            for (mean, logit) in mean.iter_mut().zip(behind(slot, member)) {
                *mean += (f64::from(*logit) - top).exp() / group as f64;
            }
        }
        mean
    };
    Ok((0..tokens).map(of).collect())
}

fn median(values: &mut [f32]) -> f64 {
    let middle = values.len() / 2;
    if values.is_empty() {
        return f64::NAN;
    }
    f64::from(*values.select_nth_unstable_by(middle, f32::total_cmp).1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constant_scores_are_foretold_exactly_but_by_the_absolute_step() {
        let scores = [0.25; 40];
        for seen in [1, 7, 40] {
            for (predictor, name) in PREDICTORS {
                let history = History { scores: &scores, seen, step: 1_000 };
                let error = (1.0 - predictor.predict(&history) / 0.25).abs();
                match predictor {
                    // It is not corrected for its late start: scores that it has not seen count as
                    // 0.
                    Predictor::EmaAbsoluteStep => {
                        assert!((error - 0.9f64.powi(seen as i32)).abs() < 1e-12, "{error}");
                    }
                    _ => assert!(error < 1e-12, "{name}, {seen} seen: {error}"),
                }
            }
        }
    }

    #[test]
    fn predictors_weigh_scores_as_their_names_say() {
        let scores: Vec<f64> = (1..=64).map(f64::from).collect();
        let predict = |predictor: Predictor| {
            predictor.predict(&History { scores: &scores, seen: 2, step: 2 })
        };
        let moving = (0.09 * 63.0 + 0.1 * 64.0) / 0.19;
        assert!((predict(Predictor::Ema) - moving).abs() < 1e-12);
        assert!((predict(Predictor::EmaAbsoluteStep) - moving).abs() < 1e-12);
        assert_eq!(predict(Predictor::Cumulative), 32.5);
        assert_eq!(predict(Predictor::Sliding), 48.5);
        assert_eq!(predict(Predictor::Last), 64.0);
    }
}
