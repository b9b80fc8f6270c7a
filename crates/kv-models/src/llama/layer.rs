use burn::module::{Module, Param};
use burn::tensor::activation::silu;
use burn::tensor::{DType, Tensor};

use super::linear::Linear;
use crate::{ModelConfig, Result, Rotation};

/// Root-mean-square normalisation, in f32.
#[derive(Module, Debug)]
pub(crate) struct RmsNorm {
    weight: Param<Tensor<1>>,
    #[module(skip)]
    epsilon: f64,
}

impl RmsNorm {
    pub(crate) fn new(weight: Tensor<1>, epsilon: f64) -> Self {
        Self { weight: Param::from_tensor(weight), epsilon }
    }

    /// `[hidden]`
    pub(crate) fn weight(&self) -> Tensor<1> {
        self.weight.val()
    }

    /// Normalises the last dimension.
    pub(crate) fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        let dtype = x.dtype();
        let wide = x.cast(DType::F32);
        let mean = wide.clone().square().mean_dim(D - 1);
        let normalised = wide / mean.add_scalar(self.epsilon).sqrt();
        // As in the models' own code: rounded to the dtype before the weight.
        normalised.cast(dtype) * self.weight.val().unsqueeze()
    }
}

/// One decoder layer.
#[derive(Module, Debug)]
pub(crate) struct Layer {
    pub(crate) attention_norm: RmsNorm,
    /// Queries, keys and values in one product, `[(Hq + 2 Hkv) D, hidden]`.
    pub(crate) qkv: Linear,
    pub(crate) query_norm: Option<RmsNorm>,
    pub(crate) key_norm: Option<RmsNorm>,
    pub(crate) output: Linear,
    pub(crate) mlp_norm: RmsNorm,
    /// Gate and up projection in one product, `[2 intermediate, hidden]`.
    pub(crate) gate_up: Linear,
    pub(crate) down: Linear,
}

/// A layer's projections of some tokens.
pub(crate) struct Projected {
    /// Before RoPE, `[B, Hq, T, D]`.
    pub(crate) raw_query: Tensor<4>,
    /// `[B, Hkv, T, D]`
    pub(crate) raw_key: Tensor<4>,
    /// `[B, Hkv, T, D]`
    pub(crate) value: Tensor<4>,
}

impl Layer {
    /// Projects hidden states `[B * T, hidden]`.
    pub(crate) fn project(
        &self,
        hidden: Tensor<2>,
        [batch, tokens]: [usize; 2],
        config: &ModelConfig,
    ) -> Result<Projected> {
        let (heads, kv_heads, dim) = (config.num_query_heads, config.num_kv_heads, config.head_dim);
        let qkv = self.qkv.forward(self.attention_norm.forward(hidden))?;
        let part = |start: usize, count: usize| {
            let part = qkv.clone().narrow(1, start * dim, count * dim);
            part.reshape([batch, tokens, count, dim])
        };
        let (mut query, mut key) = (part(0, heads), part(heads, kv_heads));
        if let (Some(query_norm), Some(key_norm)) = (&self.query_norm, &self.key_norm) {
            query = query_norm.forward(query);
            key = key_norm.forward(key);
        }
        Ok(Projected {
            raw_query: query.swap_dims(1, 2),
            raw_key: key.swap_dims(1, 2),
            value: part(heads + kv_heads, kv_heads).swap_dims(1, 2),
        })
    }

    /// The rest of the layer: output projection of the attention `[B * T, Hq * D]`, and the MLP.
    pub(crate) fn finish(&self, hidden: Tensor<2>, attention: Tensor<2>) -> Result<Tensor<2>> {
        let hidden = hidden + self.output.forward(attention)?;
        let both = self.gate_up.forward(self.mlp_norm.forward(hidden.clone()))?;
        let width = both.dims()[1] / 2;
        let gate = both.clone().narrow(1, 0, width);
        let up = both.narrow(1, width, width);
        Ok(hidden + self.down.forward(silu(gate) * up)?)
    }
}

impl Projected {
    /// Rotated queries and keys.
    pub(crate) fn rotate(&self, rotation: &Rotation) -> (Tensor<4>, Tensor<4>) {
        (rotation.apply(self.raw_query.clone()), rotation.apply(self.raw_key.clone()))
    }
}
