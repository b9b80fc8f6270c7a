//! Softmax of attention logits in memory. Each query sees the keys up to its own key.

mod backend;
#[cfg(feature = "gpu")]
mod kernel;
#[cfg(feature = "gpu")]
mod launch;
#[cfg(feature = "flex")]
mod vectorised;

use burn::backend::Dispatch;
use burn::tensor::Tensor;

use crate::KernelError;
use crate::backend::check::Check;
use backend::CausalSoftmaxOps;

const OP: &str = "causal_softmax";

/// Softmax of each row of logits over the keys that its query sees, and the log-sum-exps. The `N`
/// queries are the last of `T` tokens: query `n` sees the first `T − N + n + 1` keys. The others
/// get 0, whatever their logits are, and so do keys with logits of −∞. Every query has a finite
/// logit.
///
/// The softmax subtracts the maximum, and sums in f32. One launch reads the logits twice, where
/// tensor operations for mask, maximum, exponential, sum and quotient move them ten times.
///
/// # Shapes
/// `logits` `[R, N, T]`, f32, with `N <= T`. Returns `[R, N, T]` and `[R, N]`.
///
/// # Errors
/// [`KernelError`] for logits of another type, for none, and for more queries than keys.
pub fn causal_softmax(logits: Tensor<3>) -> Result<(Tensor<3>, Tensor<2>), KernelError> {
    let check = Check::new(OP, &logits);
    check.supported()?;
    check.f32("logits", &logits)?;
    check.filled("logits", &logits)?;
    check.counted("logits", &logits)?;
    let [_, queries, tokens] = logits.dims();
    if queries > tokens {
        return Err(KernelError::Unsupported {
            op: OP,
            argument: "queries",
            actual: queries.to_string(),
            supported: "at most as many as keys",
        });
    }
    let (weights, log_sums) =
        <Dispatch as CausalSoftmaxOps>::causal_softmax(logits.into_dispatch());
    Ok((Tensor::from_dispatch(weights), Tensor::from_dispatch(log_sums)))
}
