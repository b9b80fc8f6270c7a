//! Building the decoder from weights, or from random numbers.

use std::cell::RefCell;
use std::collections::BTreeSet;

use burn::module::Param;
use burn::tensor::{DType, Device, Distribution, Tensor};
use kv_kernels::device_work;

use super::Llama;
use super::layer::{Layer, RmsNorm};
use super::linear::{Linear, packed};
use crate::rope::{inverse_frequencies, rotary_table};
use crate::{ModelConfig, Result, Weights};

const EMBEDDING: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";

/// Where tensors come from.
trait Source {
    fn matrix(&self, name: &str, shape: [usize; 2]) -> Result<Tensor<2>>;
    fn vector(&self, name: &str, shape: [usize; 1]) -> Result<Tensor<1>>;
    /// The matrix that is embedding and output projection in one; `None` where these are two.
    fn shared(&self, config: &ModelConfig) -> Result<Option<&'static str>>;
}

struct File<'a> {
    weights: &'a Weights,
    dtype: DType,
    device: &'a Device,
    /// The tensors that were asked for.
    used: RefCell<BTreeSet<String>>,
}

impl File<'_> {
    fn tensor<const D: usize>(&self, name: &str, shape: [usize; D]) -> Result<Tensor<D>> {
        self.used.borrow_mut().insert(name.to_string());
        self.weights.tensor(name, shape, self.dtype, self.device)
    }
}

impl Source for File<'_> {
    fn matrix(&self, name: &str, shape: [usize; 2]) -> Result<Tensor<2>> {
        self.tensor(name, shape)
    }

    fn vector(&self, name: &str, shape: [usize; 1]) -> Result<Tensor<1>> {
        self.tensor(name, shape)
    }

    /// As `transformers` does it: a head that is there and differs is used, whatever the
    /// configuration says, and of two tied matrices either may be the one that is there.
    fn shared(&self, config: &ModelConfig) -> Result<Option<&'static str>> {
        let there = |name: &str| self.weights.contains(name);
        match (config.tie_embeddings, there(EMBEDDING), there(HEAD)) {
            (false, ..) => Ok(None),
            (true, false, true) => Ok(Some(HEAD)),
            (true, _, false) => Ok(Some(EMBEDDING)),
            (true, true, true) if self.weights.are_equal(HEAD, EMBEDDING)? => {
                self.used.borrow_mut().insert(HEAD.to_string());
                Ok(Some(EMBEDDING))
            }
            (true, true, true) => {
                tracing::warn!(
                    "`tie_word_embeddings` is true, but `{HEAD}` differs from `{EMBEDDING}`: both \
                     are used"
                );
                Ok(None)
            }
        }
    }
}

/// Random weights: only their shapes matter, but activations stay finite.
struct Random<'a> {
    dtype: DType,
    device: &'a Device,
}

impl Source for Random<'_> {
    fn matrix(&self, _name: &str, shape: [usize; 2]) -> Result<Tensor<2>> {
        let deviation = 0.5 / (shape[1] as f64).sqrt();
        let distribution = Distribution::Normal(0.0, deviation);
        Ok(Tensor::random(shape, distribution, (self.device, self.dtype)))
    }

    fn vector(&self, name: &str, shape: [usize; 1]) -> Result<Tensor<1>> {
        let value = if name.ends_with("bias") { 0.0 } else { 1.0 };
        Ok(Tensor::full(shape, value, (self.device, self.dtype)))
    }

    fn shared(&self, config: &ModelConfig) -> Result<Option<&'static str>> {
        Ok(config.tie_embeddings.then_some(EMBEDDING))
    }
}

impl Llama {
    /// Loads the decoder. Where `config` leaves it open, the weights decide their type and whether
    /// the output projection is the embedding; the decoder's configuration then says so.
    ///
    /// # Errors
    /// [`crate::WeightsError`] for tensors that are missing, do not fit, or have no place in the
    /// decoder.
    pub fn from_weights(
        config: ModelConfig,
        weights: &Weights,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let file = File { weights, dtype, device, used: RefCell::default() };
        let mut llama = Self::build(config, &file, dtype, device)?;
        weights.check_unused(&file.used.borrow(), llama.config.num_layers)?;
        llama.config.dtype = llama.config.dtype.or(weights.dtype());
        Ok(llama)
    }

    /// A decoder of random weights.
    ///
    /// # Errors
    /// None in practice; loading has this type.
    pub fn random(config: ModelConfig, dtype: DType, device: &Device) -> Result<Self> {
        Self::build(config, &Random { dtype, device }, dtype, device)
    }

    fn build(
        mut config: ModelConfig,
        source: &impl Source,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let _work = device_work();
        let hidden = config.hidden_size;
        let shared = source.shared(&config)?;
        config.tie_embeddings = shared.is_some();
        let shape = [config.vocab_size, hidden];
        let embedding = source.matrix(shared.unwrap_or(EMBEDDING), shape)?;
        let layers = (0..config.num_layers)
            .map(|index| build_layer(&config, source, index))
            .collect::<Result<_>>()?;
        let norm = source.vector("model.norm.weight", [hidden])?;
        let head = match shared {
            Some(_) => None,
            None => Some(Linear::new(source.matrix(HEAD, shape)?, None)),
        };
        Ok(Self {
            embedding: Param::from_tensor(packed(embedding)),
            layers,
            norm: RmsNorm::new(norm, config.rms_norm_eps),
            head,
            rope: rotary_table(&config, config.max_positions, device),
            frequencies: inverse_frequencies(&config).into(),
            config,
            dtype,
        })
    }
}

fn build_layer(config: &ModelConfig, source: &impl Source, index: usize) -> Result<Layer> {
    let (hidden, inner, dim) = (config.hidden_size, config.intermediate_size, config.head_dim);
    let (queries, keys) = (config.num_query_heads * dim, config.num_kv_heads * dim);
    let name = |part: &str| format!("model.layers.{index}.{part}");
    // Several projections of the same input as one matrix.
    let joined = |parts: &[(&str, usize)], input: usize, bias: bool| -> Result<Linear> {
        let matrices = parts
            .iter()
            .map(|(part, rows)| source.matrix(&name(&format!("{part}.weight")), [*rows, input]))
            .collect::<Result<Vec<_>>>()?;
        let biases = bias
            .then(|| {
                parts
                    .iter()
                    .map(|(part, rows)| source.vector(&name(&format!("{part}.bias")), [*rows]))
                    .collect::<Result<Vec<_>>>()
            })
            .transpose()?;
        Ok(Linear::new(Tensor::cat(matrices, 0), biases.map(|biases| Tensor::cat(biases, 0))))
    };
    let norm = |part: &str, width: usize| -> Result<RmsNorm> {
        let weight = source.vector(&name(&format!("{part}.weight")), [width])?;
        Ok(RmsNorm::new(weight, config.rms_norm_eps))
    };
    let head_norm = |part: &str| config.qk_norm.then(|| norm(part, dim)).transpose();
    let qkv =
        [("self_attn.q_proj", queries), ("self_attn.k_proj", keys), ("self_attn.v_proj", keys)];
    Ok(Layer {
        attention_norm: norm("input_layernorm", hidden)?,
        qkv: joined(&qkv, hidden, config.qkv_bias)?,
        query_norm: head_norm("self_attn.q_norm")?,
        key_norm: head_norm("self_attn.k_norm")?,
        output: joined(&[("self_attn.o_proj", hidden)], queries, config.output_bias)?,
        mlp_norm: norm("post_attention_layernorm", hidden)?,
        gate_up: joined(
            &[("mlp.gate_proj", inner), ("mlp.up_proj", inner)],
            hidden,
            config.mlp_bias,
        )?,
        down: joined(&[("mlp.down_proj", hidden)], inner, config.mlp_bias)?,
    })
}
