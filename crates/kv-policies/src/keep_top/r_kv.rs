//! R-KV (<https://arxiv.org/abs/2505.24133>): importance against redundancy. `RKv::score` is the
//! difference of both, for prompts and for the slots that decode steps cut back.

use burn::tensor::activation::softmax;
use burn::tensor::{DType, Int, Tensor};
use serde::{Deserialize, Serialize};

use super::keydiff::unit_rows;
use crate::policy::attention_scores::{
    Pooling, ROW, check_window, filled_up, fitted_window, logits,
};
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
        observation.once(&format!("{self:?}"), || {
            let queries = observation.last_queries(Self::NAME, self.window)?;
            self.score(&queries, observation.keys)
        })
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
        let importance = pool_scores(attention, Pooling::Max, self.kernel)?;
        let redundancy = self.redundancy(keys).narrow(2, 0, past);
        let scores = importance.mul_scalar(self.lambda) - redundancy.mul_scalar(1.0 - self.lambda);
        Ok(Tensor::cat(vec![scores, infinite(window)], 2))
    }

    /// Softmax over the tokens of each key's mean cosine to the others, `[B, Hkv, T]`.
    ///
    /// Rows go in blocks, so that the `T x T` matrix is never whole. The zero keys that fill it up
    /// are similar to none.
    pub fn redundancy(&self, keys: &Tensor<4>) -> Tensor<3> {
        /// Bytes that a block of the matrix should take, and the fewest and most of its rows.
        const BYTES: usize = 64 << 20;
        const ROWS: [usize; 2] = [128, 1024];
        let [batch, kv_heads, tokens, head_dim] = keys.dims();
        let heads = batch * kv_heads;
        let device = keys.device();
        let width = tokens.next_multiple_of(ROW);
        let unit = filled_up(unit_rows(keys), width).reshape([heads, width, head_dim]);
        let unit_t = unit.clone().swap_dims(1, 2);
        let most = (BYTES / (4 * heads * width)).clamp(ROWS[0], ROWS[1]) / ROW * ROW;
        let column = Tensor::<1, Int>::arange(0..width as i64, (&device, DType::I32));
        let column = column.reshape([1, 1, width]);
        // 1 + the column of a key, 0 of what is none.
        let numbers: Vec<i32> =
            (1..=width as i32).map(|at| if at > tokens as i32 { 0 } else { at }).collect();
        let numbers = Tensor::<1, Int>::from_data(numbers.as_slice(), (&device, DType::I32));
        let numbers = numbers.reshape([1, 1, width]);
        let mut sums = Tensor::<3>::zeros([heads, 1, width], (&device, DType::F32));
        for start in (0..width).step_by(most) {
            let rows = most.min(width - start);
            let own = column.clone().narrow(2, start, rows).reshape([1, rows, 1]);
            let same = column.clone().expand([1, rows, width]).equal(own.expand([1, rows, width]));
            let shape = [heads, rows, width];
            let numbers = numbers.clone().expand(shape);
            let cosine = unit.clone().narrow(1, start, rows).matmul(unit_t.clone());
            let cosine = cosine.mask_fill(same.expand(shape), 0.0);
            // The most recent similar key of each row is spared.
            let far = cosine.clone().lower_equal_scalar(self.threshold);
            let latest = numbers.clone().mask_fill(far, 0).max_dim(2);
            let latest = if self.official { latest.clamp_min(1) } else { latest };
            let spared = numbers.equal(latest.expand(shape));
            sums = sums + cosine.mask_fill(spared, 0.0).sum_dim(1);
        }
        let sums = sums.narrow(2, 0, tokens).reshape([batch, kv_heads, tokens]);
        softmax(sums.div_scalar(tokens as f64), 2)
    }
}
