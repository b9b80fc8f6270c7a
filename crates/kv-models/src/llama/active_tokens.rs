//! Which tokens of a prompt a layer computes, where a policy freezes some of them.

use std::ops::Range;

use burn::tensor::{Int, Tensor};
use kv_kernels::{PrefillOptions, PrefillOutput, prefill_attention};
use kv_policies::FrozenTokens;

use crate::{ModelError, Result};

/// The tokens of `B` sequences of `T` tokens each: frozen tokens in the middle, and the tokens
/// before and behind them, which a layer computes.
#[derive(Debug, Clone)]
pub(super) struct ActiveTokens {
    batch: usize,
    tokens: usize,
    frozen: Range<usize>,
}

impl ActiveTokens {
    /// # Errors
    /// [`ModelError::InvalidFrozen`] for frozen tokens that are not there, or the last one among
    /// them.
    pub(super) fn new(
        layer: usize,
        [batch, tokens]: [usize; 2],
        frozen: Option<&FrozenTokens>,
    ) -> Result<Self> {
        let frozen = frozen.map_or(0..0, |frozen| frozen.tokens.clone());
        if frozen.is_empty() {
            return Ok(Self { batch, tokens, frozen: 0..0 });
        }
        if frozen.end >= tokens {
            let reason = format!("tokens {frozen:?} of {tokens}, expected a part before the last");
            return Err(ModelError::InvalidFrozen { layer, reason });
        }
        Ok(Self { batch, tokens, frozen })
    }

    /// Whether all tokens are computed.
    fn is_all(&self) -> bool {
        self.frozen.is_empty()
    }

    /// Tokens that are computed, per sequence.
    pub(super) fn count(&self) -> usize {
        self.tokens - self.frozen.len()
    }

    /// The number of tokens behind the frozen ones.
    pub(super) fn last(&self) -> usize {
        self.tokens - self.frozen.end
    }

    /// The computed tokens' rows `[B * C, W]` of `[B * T, W]`.
    pub(super) fn rows(&self, all: &Tensor<2>) -> Tensor<2> {
        if self.is_all() {
            return all.clone();
        }
        let [_, width] = all.dims();
        let all = all.clone().reshape([self.batch, self.tokens, width]);
        let last = all.clone().narrow(1, self.frozen.end, self.last());
        let rows = match self.frozen.start {
            0 => last,
            first => Tensor::cat(vec![all.narrow(1, 0, first), last], 1),
        };
        rows.reshape([self.batch * self.count(), width])
    }

    /// The frozen tokens' rows.
    pub(super) fn frozen_rows(&self, all: &Tensor<2>) -> Tensor<2> {
        let [_, width] = all.dims();
        let all = all.clone().reshape([self.batch, self.tokens, width]);
        let frozen = all.narrow(1, self.frozen.start, self.frozen.len());
        frozen.reshape([self.batch * self.frozen.len(), width])
    }

    /// The computed tokens' positions, of `[B, T]`.
    pub(super) fn positions(&self, all: &Tensor<2, Int>) -> Tensor<2, Int> {
        if self.is_all() {
            return all.clone();
        }
        let last = all.clone().narrow(1, self.frozen.end, self.last());
        match self.frozen.start {
            0 => last,
            first => Tensor::cat(vec![all.clone().narrow(1, 0, first), last], 1),
        }
    }

    /// The frozen tokens' positions.
    pub(super) fn frozen_positions(&self, all: &Tensor<2, Int>) -> Tensor<2, Int> {
        all.clone().narrow(1, self.frozen.start, self.frozen.len())
    }

    /// The frozen tokens of the keys and values `[B, H, T, D]` of the layer below `layer`.
    ///
    /// # Errors
    /// [`ModelError::InvalidFrozen`] where there are none.
    pub(super) fn frozen_of(
        &self,
        layer: usize,
        previous_layer: Option<&[Tensor<4>; 2]>,
    ) -> Result<[Tensor<4>; 2]> {
        let reason = || "no layer below has their keys and values".to_string();
        let previous_layer =
            previous_layer.ok_or_else(|| ModelError::InvalidFrozen { layer, reason: reason() })?;
        let frozen = |all: &Tensor<4>| all.clone().narrow(2, self.frozen.start, self.frozen.len());
        Ok(previous_layer.each_ref().map(frozen))
    }

    /// Heads of all tokens `[B, H, T, D]`, from the heads of computed and of frozen tokens.
    pub(super) fn with_frozen_heads(&self, computed: Tensor<4>, frozen: Tensor<4>) -> Tensor<4> {
        self.with_frozen(computed, frozen, 2)
    }

    /// Rows of all tokens `[B * T, W]`: the computed ones anew `[B * C, W]`, the others as they
    /// were.
    pub(super) fn with_frozen_rows(&self, computed: Tensor<2>, before: &Tensor<2>) -> Tensor<2> {
        if self.is_all() {
            return computed;
        }
        let [_, width] = computed.dims();
        let frozen = self.frozen_rows(before).reshape([self.batch, self.frozen.len(), width]);
        let computed = computed.reshape([self.batch, self.count(), width]);
        self.with_frozen(computed, frozen, 1).reshape([self.batch * self.tokens, width])
    }

    fn with_frozen<const D: usize>(
        &self,
        computed: Tensor<D>,
        frozen: Tensor<D>,
        dim: usize,
    ) -> Tensor<D> {
        let last = computed.clone().narrow(dim, self.frozen.start, self.last());
        let parts = match self.frozen.start {
            0 => vec![frozen, last],
            first => vec![computed.narrow(dim, 0, first), frozen, last],
        };
        Tensor::cat(parts, dim)
    }

    /// Attention of the computed queries `[B, Hq, C, D]` to the keys of all tokens. Column sums are
    /// over all computed queries.
    pub(super) fn attend(
        &self,
        query: &Tensor<4>,
        key: &Tensor<4>,
        value: &Tensor<4>,
        options: &PrefillOptions,
    ) -> Result<PrefillOutput> {
        let first = self.frozen.start;
        if self.is_all() || first == 0 {
            return Ok(prefill_attention(query, key, value, options)?);
        }
        let start = |tensor: &Tensor<4>| tensor.clone().narrow(2, 0, first);
        let before = prefill_attention(&start(query), &start(key), &start(value), options)?;
        let last = query.clone().narrow(2, first, self.last());
        let behind = prefill_attention(&last, key, value, options)?;
        let column_sums = behind.column_sums.zip(before.column_sums).map(|(sums, before)| {
            let [batch, heads, _] = sums.dims();
            let both = sums.clone().narrow(2, 0, first) + before;
            sums.slice_assign([0..batch, 0..heads, 0..first], both)
        });
        Ok(PrefillOutput {
            output: Tensor::cat(vec![before.output, behind.output], 2),
            column_sums,
            log_sum_exp: None,
        })
    }
}
