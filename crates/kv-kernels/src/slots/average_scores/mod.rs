//! Running averages of the scores that queries give to slots, the exponentials of their logits.

mod args;
mod backend;
#[cfg(feature = "gpu")]
pub(crate) mod kernel;
#[cfg(feature = "gpu")]
mod launch;
pub(crate) mod reference;

use burn::backend::Dispatch;
use burn::tensor::Tensor;

use crate::KernelError;
use crate::backend::check::Check;
use args::AverageScoresArgs;
use backend::AverageScoresOps;

const OP: &str = "average_scores";

/// The factors of a new score and of the sum so far, as logarithms.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AverageWeights {
    /// The logarithm of the new score's factor.
    pub new: f32,
    /// The logarithm of the factor of the sum so far.
    pub old: f32,
}

/// Adds a step's scores to every slot's running sum, in place: `S ← old S + new s`, with `s` the
/// mean of the group's scores, and the sum of factors `N ← old N + new`. All numbers are
/// logarithms; the average is `S / N`.
///
/// # Shapes
/// `logits` `[S, G]` as [`crate::AttentionOutput::logits`] has them, the slots' `log_weights` `[S]`
/// included, which are taken out of the scores again; `log_scores` and `log_samples` `[S]`; f32.
///
/// # Errors
/// [`KernelError`] where shapes, dtypes or devices do not fit; nothing is changed.
pub fn average_scores(
    log_scores: &mut Tensor<1>,
    log_samples: &mut Tensor<1>,
    logits: Tensor<2>,
    log_weights: Option<Tensor<1>>,
    weights: AverageWeights,
) -> Result<(), KernelError> {
    let check = Check::new(OP, log_scores);
    check.supported()?;
    let [slots] = log_scores.dims();
    check.filled("log_scores", log_scores)?;
    check.f32("log_scores", log_scores)?;
    check.shape("log_samples", log_samples, &[slots])?;
    check.f32("log_samples", log_samples)?;
    let [_, group] = logits.dims();
    check.shape("logits", &logits, &[slots, group])?;
    check.filled("logits", &logits)?;
    check.f32("logits", &logits)?;
    if let Some(log_weights) = &log_weights {
        check.shape("log_weights", log_weights, &[slots])?;
        check.f32("log_weights", log_weights)?;
    }
    let args = AverageScoresArgs {
        log_scores: check.take(log_scores).into_dispatch(),
        log_samples: check.take(log_samples).into_dispatch(),
        logits: logits.into_dispatch(),
        log_weights: log_weights.into(),
        weights,
    };
    let (scores, samples) = <Dispatch as AverageScoresOps>::average_scores(args);
    *log_scores = Tensor::from_dispatch(scores);
    *log_samples = Tensor::from_dispatch(samples);
    Ok(())
}
