//! Attention over slots in parts, continued from the attention over other slots.
//!
//! The attention over the other slots is one output `o₀` and one log-sum-exp `l₀` a query head. A
//! part has the maximum `m` of its logits, the sum `s` of its weights `exp(x − m)`, and the values
//! `v`, weighted and summed. With the largest maximum `M` taken out first, the output over all is
//!
//! ```text
//! (exp(l₀ − M) o₀ + Σ exp(m − M) v) / (exp(l₀ − M) + Σ exp(m − M) s)
//! ```

#[cfg(feature = "gpu")]
pub(crate) mod combine;
#[cfg(feature = "flex")]
pub(crate) mod reference;

use burn::tensor::{DType, Tensor};

use crate::KernelError;
use crate::backend::check::Check;

/// The attention over other slots, which is continued.
#[derive(Debug, Clone)]
pub struct AttendedSlots {
    /// `[B, Hq, D]`, in the query's dtype.
    pub output: Tensor<3>,
    /// `[B, Hq]`, f32.
    pub log_sum_exp: Tensor<2>,
}

impl AttendedSlots {
    /// Checks that the tensors belong to a query of this shape and dtype.
    pub(crate) fn check(
        &self,
        check: &Check,
        query: [usize; 3],
        dtype: DType,
    ) -> Result<(), KernelError> {
        let [batch, query_heads, _] = query;
        check.shape("output", &self.output, &query)?;
        check.same_dtype("output", &self.output, "the query's dtype", dtype)?;
        check.shape("log_sum_exp", &self.log_sum_exp, &[batch, query_heads])?;
        check.f32("log_sum_exp", &self.log_sum_exp)
    }
}
