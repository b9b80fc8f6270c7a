//! SnapKV (<https://arxiv.org/abs/2404.14469>): the attention of a prompt's last queries, pooled,
//! says which tokens stay. [`Scorer::prefill`] is the whole method: it acts on prompts only.

use burn::tensor::{DType, Tensor};
use serde::{Deserialize, Serialize};

use crate::policy::attention_scores::window_weights;
use crate::policy::attention_scores::{Pooling, check_window, fitted_window};
use crate::{Needs, Observation, Reduction, Result, Scorer, pool_scores};

/// SnapKV (Li et al., 2024, section 4): attention of the last `window` queries, averaged, pooled
/// over neighbouring tokens; the window itself is always kept. Prefill only: decoded tokens
/// accumulate.
///
/// The authors' experiments have a window of 32 and a kernel of 7. Average pooling is the default
/// of their code and of kvpress.
///
/// Under grouped queries scores are averaged over the group after pooling, as kvpress does; AdaKV's
/// and KVCache-Factory's order is `reduce_before_pooling`.
///
/// A budget below the window would keep the last tokens alone, and lose the first ones, which
/// attention falls back on. So a window takes at most half of the budget, and first tokens are
/// protected where it is cut (`fit_window`).
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SnapKv {
    /// Queries observed, and tokens that are always kept.
    pub window: usize,
    /// Width of the pooling, odd.
    pub kernel: usize,
    /// Kind of pooling.
    pub pooling: Pooling,
    /// How a group's query heads become one score.
    pub reduction: Reduction,
    /// Whether scores are reduced over the group before pooling.
    pub reduce_before_pooling: bool,
    /// Whether a window above half of the budget is cut to that half; then the first 4 tokens, at
    /// most a quarter of the budget, are always kept. `false` is the paper's form.
    pub fit_window: bool,
}

impl Default for SnapKv {
    fn default() -> Self {
        Self {
            window: 32,
            kernel: 7,
            pooling: Pooling::Avg,
            reduction: Reduction::Mean,
            reduce_before_pooling: false,
            fit_window: true,
        }
    }
}

impl Scorer for SnapKv {
    const NAME: &'static str = "snapkv";

    fn needs(&self) -> Needs {
        Needs { window: self.window, ..Needs::default() }
    }

    fn validate(&self) -> std::result::Result<(), String> {
        check_window(self.window, self.kernel)
    }

    fn window(&self) -> usize {
        self.window
    }

    fn fitted(&self, budget: usize) -> Self {
        let window = if self.fit_window { fitted_window(self.window, budget) } else { self.window };
        Self { window, ..*self }
    }

    fn prefill(&self, observation: &Observation<'_>, budget: usize) -> Result<Tensor<3>> {
        let queries = observation.last_queries(Self::NAME, self.window)?;
        let [batch, kv_heads, tokens, _] = observation.dims();
        let (heads, window) = (queries.dims()[1], queries.dims()[2]);
        let device = queries.device();
        // Of a window that is longer than the budget, the last tokens are protected.
        let count = window.min(budget.max(1));
        let shape = |count| [batch, kv_heads, count];
        let full = |value: f32, count| Tensor::full(shape(count), value, (&device, DType::F32));
        let mut protected = full(f32::INFINITY, count);
        if count < window {
            protected = Tensor::cat(vec![full(0.0, window - count), protected], 2);
        }
        if window == tokens {
            return Ok(protected);
        }
        let attention = window_weights(&queries, observation.keys)?;
        let past = tokens - window;
        let mean = attention.narrow(3, 0, past).mean_dim(2).reshape([batch, heads, past]);
        let pool = |scores| pool_scores(scores, self.pooling, self.kernel);
        let scores = if self.reduce_before_pooling {
            pool(self.reduction.groups(mean, kv_heads))?
        } else {
            self.reduction.groups(pool(mean)?, kv_heads)
        };
        Ok(Tensor::cat(vec![scores, protected], 2))
    }
}
