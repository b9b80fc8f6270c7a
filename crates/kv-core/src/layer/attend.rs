//! Attention over the live slots.

use burn::tensor::{Int, Tensor};
use kv_kernels::{
    AttentionOutput, DecodeAttentionOptions, Share, SlotRanges, decode_attention, window_starts,
};

use crate::tensors::ints;
use crate::{LayerCache, Result};

/// The track of numerator weights. Where it is there, a slot's value is weighted by it, and the
/// slot's own weight counts in the denominator only.
pub const NUMERATORS: &str = "numerators";

impl LayerCache {
    /// Attention of one query per sequence over its live slots, with the track [`NUMERATORS`] if
    /// the cache has one and `options` none.
    ///
    /// # Shapes
    /// `query` `[B, Hq, D]`.
    ///
    /// # Errors
    /// The errors of [`decode_attention`].
    pub fn attend(
        &self,
        query: Tensor<3>,
        mut options: DecodeAttentionOptions,
    ) -> Result<AttentionOutput> {
        options.longest = options.longest.or(Some(self.layout.most_capacity()));
        options.numerator_weights =
            options.numerator_weights.or_else(|| self.track(NUMERATORS).cloned());
        let (keys, values) = (self.keys.clone(), self.values.clone());
        let weights = self.log_weights.clone();
        Ok(decode_attention(query, keys, values, weights, &self.ranges, options)?)
    }

    /// The first slot of each head's window, `[B, Hkv]`, as [`kv_kernels::SlotView::Window`] takes
    /// it. The window hides `share` of the tokens so far from the newest tokens. Does not wait for
    /// the device. Slots must be in the order of their positions, which evictions of single slots
    /// break.
    ///
    /// # Shapes
    /// `newest` `[B]`, the newest tokens' positions, 32-bit.
    ///
    /// # Errors
    /// The errors of [`window_starts`].
    pub fn window_starts(&self, newest: &Tensor<1, Int>, share: Share) -> Result<Tensor<2, Int>> {
        Ok(window_starts(&self.positions, &self.ranges, newest, share)?)
    }

    /// Causal attention of the last `N` appended tokens: query `n` sees all slots except the slots
    /// of later tokens. Call it right after [`Self::extend`], while these tokens are in the last
    /// slots.
    ///
    /// # Shapes
    /// `query` `[B, Hq, N, D]`; returns `[B, Hq, N, D]`.
    ///
    /// # Errors
    /// The errors of [`decode_attention`].
    pub fn attend_extended(&self, query: Tensor<4>) -> Result<Tensor<4>> {
        let [batch, heads, tokens, head_dim] = query.dims();
        let kv_heads = self.layout.kv_heads();
        // Each query is a sequence of its own that sees a prefix of the same slots.
        let rows = batch * tokens;
        let spread = |ranges: &Tensor<2, Int>| {
            ranges.clone().unsqueeze_dim::<3>(1).expand([batch, tokens, kv_heads])
        };
        let hidden: Vec<i32> = (0..tokens).rev().map(|behind| behind as i32).collect();
        let hidden =
            ints(hidden, [1, tokens, 1], &self.options.device).expand([batch, tokens, kv_heads]);
        let ranges = SlotRanges {
            offsets: spread(&self.ranges.offsets).reshape([rows, kv_heads]),
            lengths: (spread(&self.ranges.lengths) - hidden).reshape([rows, kv_heads]),
        };
        let output = decode_attention(
            query.swap_dims(1, 2).reshape([rows, heads, head_dim]),
            self.keys.clone(),
            self.values.clone(),
            self.log_weights.clone(),
            &ranges,
            DecodeAttentionOptions {
                longest: Some(self.layout.most_capacity()),
                numerator_weights: self.track(NUMERATORS).cloned(),
                ..Default::default()
            },
        )?;
        Ok(output.output.reshape([batch, tokens, heads, head_dim]).swap_dims(1, 2))
    }
}
