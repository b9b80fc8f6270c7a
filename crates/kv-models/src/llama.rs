//! The decoder: Burn modules with weights kept `[out, in]`, as Hugging Face stores them.

mod active_tokens;
mod decode;
mod gradients;
mod layer;
mod linear;
mod load;
mod matrices;
mod plain;
mod prefill;
mod prefix;

use std::ops::Range;
use std::sync::Arc;

use burn::module::{Module, Param};
use burn::tensor::{DType, Device, Int, Tensor};
use kv_core::read_f32;
use kv_kernels::{LinearOptions, RotaryTable, linear as linear_product};
use kv_parallel::Collective;
use kv_policies::HeadPart;

pub(crate) use decode::BusyRows;
pub use gradients::KvGradients;
pub use prefill::{PrefillPass, Prefilled};
pub(crate) use prefill::{PrefillRun, PromptGroup};
pub use prefix::PromptPrefix;
pub(crate) use prefix::{PrefixLayer, SharedPrefix};

use crate::rope::prompt_table;
use crate::{ModelConfig, ModelError, Result};
use layer::{Layer, RmsNorm};
use linear::Linear;

/// A Llama-family decoder.
#[derive(Module, Debug)]
pub struct Llama {
    /// `[vocabulary, hidden]`
    embedding: Param<Tensor<2>>,
    layers: Vec<Layer>,
    norm: RmsNorm,
    /// The rank's rows of the output projection; `None` if it is the embedding, which every rank
    /// has whole.
    head: Option<Linear>,
    #[module(skip)]
    rope: RotaryTable,
    #[module(skip)]
    frequencies: Arc<[f64]>,
    #[module(skip)]
    config: ModelConfig,
    #[module(skip)]
    dtype: DType,
    /// The ranks that have the other parts of the model.
    #[module(skip)]
    ranks: Arc<dyn Collective>,
    /// Key-value heads of all ranks together.
    #[module(skip)]
    all_kv_heads: usize,
    /// Tokens whose logits the rank computes.
    #[module(skip)]
    head_rows: Range<usize>,
}

impl Llama {
    /// The model's configuration; on one of several ranks, its part's ([`ModelConfig::part`]).
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The ranks that have the parts of the model.
    pub fn ranks(&self) -> &dyn Collective {
        &*self.ranks
    }

    /// Which key-value heads this rank has.
    pub(crate) fn heads(&self) -> HeadPart {
        let first = self.ranks.shard().rank() * self.config.num_kv_heads;
        HeadPart { first, all: self.all_kv_heads }
    }

    /// Refuses work on a part of a model.
    pub(crate) fn check_whole(&self, what: &'static str) -> Result<()> {
        let shard = self.ranks.shard();
        if shard.is_part() { Err(ModelError::WholeModelOnly { what, shard }) } else { Ok(()) }
    }

    /// The dtype of the weights, unless matrices are stored in another one, and of activations.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The weights' device.
    pub fn device(&self) -> Device {
        self.embedding.val().device()
    }

    /// The last norm's weights, read to the host.
    pub(crate) fn last_norm(&self) -> Result<Vec<f32>> {
        Ok(read_f32("norm", self.norm.weight())?)
    }

    /// Rotations of a prompt's tokens.
    pub(crate) fn prompt_rope(&self, tokens: usize) -> RotaryTable {
        prompt_table(&self.config, tokens, &self.device()).unwrap_or_else(|| self.rope.clone())
    }

    /// Logits of hidden states that went through the final norm, f32.
    ///
    /// # Shapes
    /// `[N, hidden]` to `[N, vocabulary]`.
    ///
    /// # Errors
    /// [`crate::ModelError::Kernel`] for hidden states that are not of the model's width, dtype and
    /// device, and the errors of the ranks' sum.
    pub fn logits(&self, hidden: Tensor<2>) -> Result<Tensor<2>> {
        let (vocabulary, rows) = (self.config.vocab_size, self.head_rows.clone());
        let is_part = rows.len() < vocabulary;
        let own = match &self.head {
            Some(head) => head.forward(hidden)?,
            None => {
                let embedding = self.embedding.val();
                let own = if is_part { embedding.slice_dim(0, rows.clone()) } else { embedding };
                linear_product(hidden, own, LinearOptions::default())?
            }
        };
        if !is_part {
            return Ok(own.cast(DType::F32));
        }
        // Each logit is one rank's, and a sum with zeros leaves its bits as they are.
        let zeros = Tensor::zeros([own.dims()[0], vocabulary], (&own.device(), own.dtype()));
        let padded = zeros.slice_assign([0..own.dims()[0], rows], own);
        Ok(self.ranks.all_reduce(padded)?.cast(DType::F32))
    }

    /// Embeddings of tokens `[N]`, `[N, hidden]`.
    fn embed(&self, tokens: Tensor<1, Int>) -> Tensor<2> {
        // The matrix may be stored in another dtype.
        self.embedding.val().select(0, tokens).cast(self.dtype)
    }
}
