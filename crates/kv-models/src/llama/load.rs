//! Building the decoder from weights, or from random numbers.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

use burn::module::Param;
use burn::tensor::{DType, Device, Distribution, Tensor};
use kv_kernels::device_work;
use kv_parallel::{Collective, Shard};

use super::Llama;
use super::layer::{Layer, RmsNorm};
use super::linear::{Linear, packed};
use crate::rope::{inverse_frequencies, rotary_table};
use crate::weights::Part;
use crate::{ModelConfig, Result, Weights, fnv_1a};

const EMBEDDING: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";

/// How the ranks share a tensor.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Sharing {
    /// Every rank has all of it.
    Whole,
    /// Every rank has some of its rows.
    Rows,
    /// Every rank has some of its columns.
    Columns,
}

impl Sharing {
    /// A rank's part of a tensor of `shape`.
    fn part(self, shape: &[usize], shard: Shard) -> Result<Part> {
        Ok(match (self, shard.is_part(), shape) {
            (Self::Rows, true, &[rows, ..]) => Part::Rows(shard.range("rows", rows)?),
            (Self::Columns, true, &[.., columns]) => {
                Part::Columns(shard.range("columns", columns)?)
            }
            _ => Part::Whole,
        })
    }
}

/// Where tensors come from. Shapes are the whole tensors'; what comes back is the rank's part.
trait Source {
    fn matrix(&self, name: &str, shape: [usize; 2], sharing: Sharing) -> Result<Tensor<2>>;
    fn vector(&self, name: &str, shape: [usize; 1], sharing: Sharing) -> Result<Tensor<1>>;
    /// The matrix that is embedding and output projection in one; `None` where these are two.
    fn shared(&self, config: &ModelConfig) -> Result<Option<&'static str>>;
}

struct File<'a> {
    weights: &'a Weights,
    dtype: DType,
    device: &'a Device,
    shard: Shard,
    /// The tensors that were asked for.
    used: RefCell<BTreeSet<String>>,
}

impl File<'_> {
    fn tensor<const D: usize>(
        &self,
        name: &str,
        shape: [usize; D],
        sharing: Sharing,
    ) -> Result<Tensor<D>> {
        self.used.borrow_mut().insert(name.to_string());
        let part = sharing.part(&shape, self.shard)?;
        self.weights.part(name, shape, &part, self.dtype, self.device)
    }
}

impl Source for File<'_> {
    fn matrix(&self, name: &str, shape: [usize; 2], sharing: Sharing) -> Result<Tensor<2>> {
        self.tensor(name, shape, sharing)
    }

    fn vector(&self, name: &str, shape: [usize; 1], sharing: Sharing) -> Result<Tensor<1>> {
        self.tensor(name, shape, sharing)
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

/// Random weights: only their shapes matter, but activations stay finite. A tensor's numbers follow
/// from its name, so that all ranks take their parts of one model.
struct Random<'a> {
    dtype: DType,
    device: &'a Device,
    shard: Shard,
}

/// Held while a generator of the process is seeded and read.
static SEEDED: Mutex<()> = Mutex::new(());

impl Source for Random<'_> {
    fn matrix(&self, name: &str, shape: [usize; 2], sharing: Sharing) -> Result<Tensor<2>> {
        let deviation = 0.5 / (shape[1] as f64).sqrt();
        let distribution = Distribution::Normal(0.0, deviation);
        let seeded = SEEDED.lock().unwrap_or_else(PoisonError::into_inner);
        self.device.seed(fnv_1a(name.bytes()));
        let whole = Tensor::random(shape, distribution, (self.device, self.dtype));
        drop(seeded);
        Ok(match sharing.part(&shape, self.shard)? {
            Part::Whole => whole,
            Part::Rows(rows) => whole.slice_dim(0, rows),
            Part::Columns(columns) => whole.slice_dim(1, columns),
        })
    }

    fn vector(&self, name: &str, shape: [usize; 1], sharing: Sharing) -> Result<Tensor<1>> {
        let value = if name.ends_with("bias") { 0.0 } else { 1.0 };
        let shape = match sharing.part(&shape, self.shard)? {
            Part::Rows(rows) => [rows.len()],
            Part::Whole | Part::Columns(_) => shape,
        };
        Ok(Tensor::full(shape, value, (self.device, self.dtype)))
    }

    fn shared(&self, config: &ModelConfig) -> Result<Option<&'static str>> {
        Ok(config.tie_embeddings.then_some(EMBEDDING))
    }
}

impl Llama {
    /// Loads a rank's part of the decoder: some heads and some columns of the MLP of every layer,
    /// some rows of the output projection, and the whole embedding. [`kv_parallel::Solo`] has all
    /// of it. `config` is the whole model's. Where it leaves it open, the weights decide their type
    /// and whether the output projection is the embedding; the decoder's configuration then says
    /// so.
    ///
    /// # Errors
    /// [`crate::WeightsError`] for tensors that are missing, do not fit, or have no place in the
    /// decoder; [`kv_parallel::ParallelError::Indivisible`].
    pub fn from_weights(
        config: ModelConfig,
        weights: &Weights,
        dtype: DType,
        device: &Device,
        ranks: Arc<dyn Collective>,
    ) -> Result<Self> {
        let shard = ranks.shard();
        let file = File { weights, dtype, device, shard, used: RefCell::default() };
        let mut llama = Self::build(config, &file, dtype, device, ranks)?;
        weights.check_unused(&file.used.borrow(), llama.config.num_layers)?;
        llama.config.dtype = llama.config.dtype.or(weights.dtype());
        Ok(llama)
    }

    /// A rank's part of a decoder of random weights.
    ///
    /// # Errors
    /// [`kv_parallel::ParallelError::Indivisible`].
    pub fn random(
        config: ModelConfig,
        dtype: DType,
        device: &Device,
        ranks: Arc<dyn Collective>,
    ) -> Result<Self> {
        let source = Random { dtype, device, shard: ranks.shard() };
        Self::build(config, &source, dtype, device, ranks)
    }

    fn build(
        mut config: ModelConfig,
        source: &impl Source,
        dtype: DType,
        device: &Device,
        ranks: Arc<dyn Collective>,
    ) -> Result<Self> {
        let _work = device_work();
        let shard = ranks.shard();
        let part = config.part(shard)?;
        let hidden = config.hidden_size;
        let shared = source.shared(&config)?;
        config.tie_embeddings = shared.is_some();
        let shape = [config.vocab_size, hidden];
        let embedding = source.matrix(shared.unwrap_or(EMBEDDING), shape, Sharing::Whole)?;
        let layers = (0..config.num_layers)
            .map(|index| build_layer(&config, shard, source, index))
            .collect::<Result<_>>()?;
        let norm = source.vector("model.norm.weight", [hidden], Sharing::Whole)?;
        // A vocabulary that the ranks cannot divide equally is every rank's.
        let vocabulary = config.vocab_size;
        let (sharing, head_rows) = match shard.range("tokens of the vocabulary", vocabulary) {
            Ok(rows) => (Sharing::Rows, rows),
            Err(_) => (Sharing::Whole, 0..vocabulary),
        };
        let head = match shared {
            Some(_) => None,
            None => Some(Linear::new(source.matrix(HEAD, shape, sharing)?, None)),
        };
        Ok(Self {
            embedding: Param::from_tensor(packed(embedding)),
            layers,
            norm: RmsNorm::new(norm, config.rms_norm_eps),
            head,
            rope: rotary_table(&config, config.max_positions, device),
            frequencies: inverse_frequencies(&config).into(),
            all_kv_heads: config.num_kv_heads,
            config: ModelConfig { tie_embeddings: config.tie_embeddings, ..part },
            head_rows,
            dtype,
            ranks,
        })
    }
}

/// A layer. Heads and rows of the MLP's first two matrices go to the ranks, so that the matrices
/// behind them take the ranks' columns.
fn build_layer(
    config: &ModelConfig,
    shard: Shard,
    source: &impl Source,
    index: usize,
) -> Result<Layer> {
    let (hidden, inner, dim) = (config.hidden_size, config.intermediate_size, config.head_dim);
    let (queries, keys) = (config.num_query_heads * dim, config.num_kv_heads * dim);
    let name = |part: &str| format!("model.layers.{index}.{part}");
    // Several projections of the same input as one matrix.
    let joined = |parts: &[(&str, usize)], input: usize, bias: bool| -> Result<Linear> {
        let matrices = parts
            .iter()
            .map(|(part, rows)| {
                source.matrix(&name(&format!("{part}.weight")), [*rows, input], Sharing::Rows)
            })
            .collect::<Result<Vec<_>>>()?;
        let biases = bias
            .then(|| {
                parts
                    .iter()
                    .map(|(part, rows)| {
                        source.vector(&name(&format!("{part}.bias")), [*rows], Sharing::Rows)
                    })
                    .collect::<Result<Vec<_>>>()
            })
            .transpose()?;
        Ok(Linear::new(Tensor::cat(matrices, 0), biases.map(|biases| Tensor::cat(biases, 0))))
    };
    // A projection whose outputs the ranks add. Every rank reads the bias, so that all find the
    // same errors in a file, but only the first adds it.
    let summed = |part: &str, input: usize, bias: bool| -> Result<Linear> {
        let matrix =
            source.matrix(&name(&format!("{part}.weight")), [hidden, input], Sharing::Columns)?;
        let bias = bias
            .then(|| source.vector(&name(&format!("{part}.bias")), [hidden], Sharing::Whole))
            .transpose()?;
        Ok(Linear::new(matrix, bias.filter(|_| shard.is_first())))
    };
    let norm = |part: &str, width: usize| -> Result<RmsNorm> {
        let weight = source.vector(&name(&format!("{part}.weight")), [width], Sharing::Whole)?;
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
        output: summed("self_attn.o_proj", queries, config.output_bias)?,
        mlp_norm: norm("post_attention_layernorm", hidden)?,
        gate_up: joined(
            &[("mlp.gate_proj", inner), ("mlp.up_proj", inner)],
            hidden,
            config.mlp_bias,
        )?,
        down: summed("mlp.down_proj", inner, config.mlp_bias)?,
    })
}
