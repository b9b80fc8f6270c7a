//! R-KV (<https://arxiv.org/abs/2505.24133>): importance against redundancy. `RKv::score` is the
//! difference of both, for prompts and for the slots that decode steps cut back.

use burn::tensor::activation::softmax;
use burn::tensor::{DType, Int, Tensor};
use serde::{Deserialize, Serialize};

use super::keydiff::unit_rows;
use crate::policy::attention_scores::{Pooling, check_window, fitted_window, logits};
use crate::{Decoding, KeepTopDefaults, Needs, Observation, Result, Scorer, pool_scores};

/// R-KV (Cai et al., 2025, section 3): importance against redundancy,
/// `lambda * I - (1 - lambda) * P`. `I` is the attention of the last `window` queries, averaged and
/// max-pooled; `P` is how similar a key is to the others (mean cosine, softmaxed), where the latest
/// of similar keys is spared. The window is kept inside the budget. During decode the cache grows
/// by `interval` (128) tokens before it is cut back.
///
/// Logits are maximised over the group before the softmax, as the authors do. Their code zeroes
/// column 0 for keys without a similar one (`official`); the paper zeroes nothing there.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RKv {
    /// Queries observed, and tokens that are always kept.
    pub window: usize,
    /// Width of the max-pooling, odd.
    pub kernel: usize,
    /// Weight of importance.
    pub lambda: f64,
    /// Cosine above which keys count as similar.
    pub threshold: f32,
    /// The authors' code's handling of keys without a similar one.
    pub official: bool,
    /// Whether a window above half of the budget is cut to that half; then the first 4 tokens, at
    /// most a quarter of the budget, are always kept. `false` is the paper's form.
    pub fit_window: bool,
}

impl Default for RKv {
    fn default() -> Self {
        Self {
            window: 8,
            kernel: 7,
            lambda: 0.1,
            threshold: 0.5,
            official: false,
            fit_window: true,
        }
    }
}

impl Scorer for RKv {
    const NAME: &'static str = "r-kv";

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

    fn prefill(&self, observation: &Observation<'_>, _budget: usize) -> Result<Tensor<3>> {
        let queries = observation.last_queries(Self::NAME, self.window)?;
        self.score(&queries, observation.keys)
    }

    fn decoding(&self) -> Decoding {
        Decoding::Rescore { window: self.window, raw_queries: 0 }
    }

    fn defaults() -> KeepTopDefaults {
        KeepTopDefaults { interval: 128, ..KeepTopDefaults::default() }
    }
}

impl RKv {
    /// `[B, Hkv, T]`, with the window at +∞.
    fn score(&self, queries: &Tensor<4>, keys: &Tensor<4>) -> Result<Tensor<3>> {
        let [batch, kv_heads, tokens, _] = keys.dims();
        let [_, heads, window, _] = queries.dims();
        let device = keys.device();
        let infinite =
            |count| Tensor::full([batch, kv_heads, count], f32::INFINITY, (&device, DType::F32));
        if window >= tokens {
            return Ok(infinite(tokens));
        }
        let past = tokens - window;
        // The window is left out of the softmax, so that no mask is needed.
        let logits =
            logits(queries, keys).reshape([batch, kv_heads, heads / kv_heads, window, tokens]);
        let logits = logits.max_dim(2).reshape([batch, kv_heads, window, tokens]);
        let attention = softmax(logits.narrow(3, 0, past), 3).mean_dim(2);
        let attention = attention.reshape([batch, kv_heads, past]);
        let importance = pool_scores(attention, Pooling::Max, self.kernel);
        let redundancy = self.redundancy(keys).narrow(2, 0, past);
        let scores = importance.mul_scalar(self.lambda) - redundancy.mul_scalar(1.0 - self.lambda);
        Ok(Tensor::cat(vec![scores, infinite(window)], 2))
    }

    /// Softmax over the tokens of each key's mean cosine to the others, `[B, Hkv, T]`.
    ///
    /// Rows go in blocks, so that the `T x T` matrix is never whole.
    pub fn redundancy(&self, keys: &Tensor<4>) -> Tensor<3> {
        const ROWS: usize = 256;
        let [batch, kv_heads, tokens, _] = keys.dims();
        let device = keys.device();
        let unit = unit_rows(keys);
        let unit_t = unit.clone().swap_dims(2, 3);
        let column = Tensor::<1, Int>::arange(0..tokens as i64, (&device, DType::I32));
        let mut sums = Tensor::<3>::zeros([batch, kv_heads, tokens], (&device, DType::F32));
        for start in (0..tokens).step_by(ROWS) {
            let rows = ROWS.min(tokens - start);
            let shape = [batch, kv_heads, rows, tokens];
            let column = column.clone().reshape([1, 1, 1, tokens]).expand(shape);
            let own = Tensor::<1, Int>::arange(
                start as i64..(start + rows) as i64,
                (&device, DType::I32),
            );
            let own = own.reshape([1, 1, rows, 1]).expand(shape);
            let cosine = unit.clone().narrow(2, start, rows).matmul(unit_t.clone());
            let cosine = cosine.mask_fill(column.clone().equal(own), 0.0);
            // The most recent similar key of each row is spared: 1 + its column, 0 for none.
            let similar = cosine.clone().greater_scalar(self.threshold);
            let latest = column.clone().add_scalar(1).mask_fill(similar.bool_not(), 0).max_dim(3);
            let latest = if self.official { latest.clamp_min(1) } else { latest };
            let spared = column.add_scalar(1).equal(latest.expand(shape));
            let cosine = cosine.mask_fill(spared, 0.0);
            sums = sums + cosine.sum_dim(2).squeeze_dim(2);
        }
        softmax(sums.div_scalar(tokens as f64), 2)
    }
}
