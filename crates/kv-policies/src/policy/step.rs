//! The input of one decode step of one layer: the new token's query, key and value, and what
//! policies may read beside them.

use std::sync::{Arc, Mutex};

use burn::tensor::{Int, Tensor};
use kv_core::LayerCache;
use kv_kernels::{HeadLayout, RowNorm, rms_norm, split_heads};

use crate::Result;
use crate::policy::board::SharedListBoard;
use crate::policy::write_slots::WriteSlots;

/// One decode step of one layer.
#[derive(Debug, Clone)]
pub struct Step {
    /// The new tokens' queries, keys and values.
    pub heads: Qkv,
    /// The new tokens' logical positions, `[B]`, 32-bit.
    pub position: Tensor<1, Int>,
    /// RoPE's inverse frequencies, `[D / 2]`, for policies that look ahead; may be empty.
    pub inverse_frequencies: Arc<[f64]>,
    /// What the layer projects, for policies that compare it.
    pub input: Option<LayerInput>,
    /// The board on which the layers of one step show each other their lists.
    pub board: Arc<Mutex<SharedListBoard>>,
}

/// What a layer projects, `x` of `q = x W_Q` (PrHS, eq. 1): hidden states behind the layer's norm.
#[derive(Debug, Clone)]
pub struct LayerInput {
    /// Hidden states before the norm, `[B, hidden]`.
    pub hidden: Tensor<2>,
    /// The layer's norm.
    pub norm: RowNorm,
}

impl LayerInput {
    /// The hidden states behind the norm, `[B, hidden]`.
    ///
    /// # Errors
    /// [`kv_kernels::KernelError`] for a weight of another length.
    pub fn normed(&self) -> Result<Tensor<2>> {
        let RowNorm { weight, epsilon } = self.norm.clone();
        Ok(rms_norm(self.hidden.clone(), weight, epsilon)?)
    }
}

/// One new token a sequence.
#[allow(clippy::large_enum_variant, reason = "a step is short-lived, and made once a layer")]
#[derive(Debug, Clone)]
pub enum Qkv {
    /// The heads after RoPE, as attention takes them.
    Rotated {
        /// `[B, Hq, D]`
        query: Tensor<3>,
        /// `[B, Hkv, D]`
        key: Tensor<3>,
        /// `[B, Hkv, D]`
        value: Tensor<3>,
        /// Queries before RoPE, `[B, Hq, D]`; without, policies that need them take `query`.
        raw_query: Option<Tensor<3>>,
    },
    /// The heads as a layer projects them: norms, RoPE and the write into the cache are then one
    /// kernel.
    Projected {
        /// `[B, (Hq + 2 Hkv) D]`
        projected: Tensor<2>,
        /// The layout of the projection's rows.
        layout: Arc<HeadLayout>,
        /// What RoPE multiplies queries by besides rotating them: YaRN's attention factor, else 1.
        rope_factor: f64,
    },
}

impl Step {
    /// A step of heads after RoPE: `query` `[B, Hq, D]`, `key` and `value` `[B, Hkv, D]`,
    /// `position` `[B]`.
    pub fn new(
        query: Tensor<3>,
        key: Tensor<3>,
        value: Tensor<3>,
        position: Tensor<1, Int>,
    ) -> Self {
        let heads = Qkv::Rotated { query, key, value, raw_query: None };
        let (inverse_frequencies, board) = (Arc::default(), Arc::default());
        Self { heads, position, inverse_frequencies, input: None, board }
    }

    /// A step of a layer's joint projection of queries, keys and values, `[B, (Hq + 2 Hkv) D]`, of
    /// a model whose RoPE only rotates.
    pub fn projected(
        projected: Tensor<2>,
        layout: Arc<HeadLayout>,
        position: Tensor<1, Int>,
        inverse_frequencies: Arc<[f64]>,
    ) -> Self {
        let heads = Qkv::Projected { projected, layout, rope_factor: 1.0 };
        Self { heads, position, inverse_frequencies, input: None, board: Arc::default() }
    }

    /// The step of a model whose RoPE multiplies what it rotates by a factor, as YaRN's does.
    #[must_use]
    pub fn with_rope_factor(mut self, factor: f64) -> Self {
        if let Qkv::Projected { rope_factor, .. } = &mut self.heads {
            *rope_factor = factor;
        }
        self
    }

    /// The step with the hidden states that were projected.
    #[must_use]
    pub fn with_input(self, input: LayerInput) -> Self {
        Self { input: Some(input), ..self }
    }

    /// The step of one of a model's layers, which share a board in every step.
    #[must_use]
    pub fn with_board(self, board: Arc<Mutex<SharedListBoard>>) -> Self {
        Self { board, ..self }
    }

    /// Appends the tokens to the cache and returns their queries after RoPE, `[B, Hq, D]`.
    ///
    /// # Errors
    /// The errors of [`LayerCache::append`] and [`LayerCache::append_projected`].
    pub fn append(&self, cache: &mut LayerCache) -> Result<Tensor<3>> {
        match &self.heads {
            Qkv::Rotated { query, key, value, .. } => {
                cache.append(key.clone(), value.clone(), self.position.clone())?;
                Ok(query.clone())
            }
            Qkv::Projected { projected, layout, .. } => {
                let (projected, position) = (projected.clone(), self.position.clone());
                Ok(cache.append_projected(projected, position, layout)?)
            }
        }
    }

    /// Writes the tokens to the slots that a cache held at its limits has chosen, and returns
    /// their queries after RoPE, `[B, Hq, D]`.
    ///
    /// # Errors
    /// The errors of [`WriteSlots::write`] and [`WriteSlots::write_projected`].
    pub fn overwrite(&self, cache: &mut LayerCache) -> Result<Tensor<3>> {
        match &self.heads {
            Qkv::Rotated { query, key, value, .. } => {
                WriteSlots::write(cache, key.clone(), value.clone(), self.position.clone())?;
                Ok(query.clone())
            }
            Qkv::Projected { projected, layout, .. } => {
                let (projected, position) = (projected.clone(), self.position.clone());
                Ok(WriteSlots::write_projected(cache, projected, position, layout)?)
            }
        }
    }

    /// The queries before RoPE, `[B, Hq, D]`, at the scale at which attention sees them: YaRN's
    /// attention factor is in them. Returns queries after RoPE for a step that was made without the
    /// queries before RoPE.
    ///
    /// # Errors
    /// [`kv_kernels::KernelError`] for a projection that is not of its layout.
    pub fn raw_query(&self) -> Result<Tensor<3>> {
        let (projected, layout, factor) = match &self.heads {
            Qkv::Rotated { query, raw_query, .. } => {
                return Ok(raw_query.as_ref().unwrap_or(query).clone());
            }
            Qkv::Projected { projected, layout, rope_factor } => {
                (projected.clone(), layout, *rope_factor)
            }
        };
        let query = if layout.norms.is_none() {
            let [batch, _] = projected.dims();
            let HeadLayout { query_heads, head_dim, .. } = **layout;
            let queries = projected.narrow(1, 0, query_heads * head_dim);
            queries.reshape([batch, query_heads, head_dim])
        } else {
            let layout = HeadLayout { rope: None, ..HeadLayout::clone(layout) };
            let position = self.position.clone().unsqueeze_dim(1);
            let [query, ..] =
                split_heads(projected, position, &layout).map_err(kv_core::Error::from)?;
            query.squeeze_dim(2)
        };
        Ok(if factor == 1.0 { query } else { query.mul_scalar(factor) })
    }
}
