use burn::module::{Module, Param};
use burn::tensor::Tensor;
use kv_kernels::{HeadLayout, HeadNorms, RotaryTable, RowNorm, rms_norm};
use kv_parallel::Collective;

use super::linear::Linear;
use crate::{ModelConfig, Result};

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

    pub(crate) fn epsilon(&self) -> f64 {
        self.epsilon
    }

    /// Normalises rows `[N, width]`.
    pub(crate) fn forward(&self, x: Tensor<2>) -> Result<Tensor<2>> {
        Ok(rms_norm(x, self.weight.val(), self.epsilon as f32)?)
    }

    /// The norm, as the product behind it takes it.
    pub(crate) fn of_rows(&self) -> RowNorm {
        RowNorm { weight: self.weight.val(), epsilon: self.epsilon as f32 }
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

impl Layer {
    /// Projects hidden states `[N, hidden]` to `[N, (Hq + 2 Hkv) D]`.
    pub(crate) fn project(&self, hidden: Tensor<2>) -> Result<Tensor<2>> {
        Ok(self.qkv.forward_rmsnorm(hidden, self.attention_norm.of_rows())?)
    }

    /// Projects hidden states `[N, hidden]` to keys and values alone, `[N, 2 Hkv D]`.
    pub(crate) fn project_keys_values(
        &self,
        hidden: Tensor<2>,
        config: &ModelConfig,
    ) -> Result<Tensor<2>> {
        let queries = config.num_query_heads * config.head_dim;
        let rows = queries..self.qkv.width();
        Ok(self.qkv.rows_of_normed(hidden, self.attention_norm.of_rows(), rows)?)
    }

    /// The layout of a row of the projection.
    pub(crate) fn heads(&self, config: &ModelConfig, rope: &RotaryTable) -> HeadLayout {
        let norms = self.query_norm.as_ref().zip(self.key_norm.as_ref());
        HeadLayout {
            query_heads: config.num_query_heads,
            kv_heads: config.num_kv_heads,
            head_dim: config.head_dim,
            rope: Some(rope.clone()),
            norms: norms.map(|(query, key)| HeadNorms {
                query: query.weight(),
                key: key.weight(),
                epsilon: query.epsilon as f32,
            }),
        }
    }

    /// The rest of the layer: output projection of the attention `[N, Hq * D]`, and the MLP. The
    /// ranks add their parts twice.
    pub(crate) fn finish(
        &self,
        hidden: Tensor<2>,
        attention: Tensor<2>,
        ranks: &dyn Collective,
    ) -> Result<Tensor<2>> {
        let hidden = self.output.sum_residual(attention, hidden, ranks)?;
        let gated = self.gate_up.gated_of_normed(hidden.clone(), self.mlp_norm.of_rows())?;
        self.down.sum_residual(gated, hidden, ranks)
    }
}
