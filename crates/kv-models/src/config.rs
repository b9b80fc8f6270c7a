//! What a model looks like, as its own `config.json` says.

mod parse;
mod refuse;
mod rope;
mod settings;
#[cfg(test)]
mod tests;
mod window;

use std::fmt;
use std::path::Path;

use burn::tensor::DType;
use kv_core::counted;
use kv_parallel::Shard;

use crate::error::{ModelError, Result};

/// The model families that the one decoder implements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Architecture {
    /// Llama 2, 3, 3.1, 3.2 and their distillations.
    Llama,
    /// Mistral, without sliding window or within it.
    Mistral,
    /// Ministral, within the sliding window of those layers that have one.
    Ministral,
    /// Qwen2 and Qwen2.5: biases on query, key and value.
    Qwen2,
    /// Qwen3: RMS norm on every head's query and key.
    Qwen3,
}

impl Architecture {
    pub(crate) const ALL: [Self; 5] =
        [Self::Llama, Self::Mistral, Self::Ministral, Self::Qwen2, Self::Qwen3];

    /// The name in `architectures` of `config.json`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Llama => "LlamaForCausalLM",
            Self::Mistral => "MistralForCausalLM",
            Self::Ministral => "MinistralForCausalLM",
            Self::Qwen2 => "Qwen2ForCausalLM",
            Self::Qwen3 => "Qwen3ForCausalLM",
        }
    }

    /// The name in `model_type` of `config.json`.
    pub const fn model_type(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Mistral => "mistral",
            Self::Ministral => "ministral",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
        }
    }
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// How the rotary embedding's frequencies are changed to reach beyond the trained context.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum RopeScaling {
    /// Frequencies stay as they are.
    None,
    /// All frequencies divided by one factor (position interpolation).
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// Llama 3.1: low frequencies divided, high ones kept, frequencies between interpolated.
    Llama3 {
        /// The divisor of low frequencies.
        factor: f64,
        /// Wavelengths above `original_max_positions / low_freq_factor` are low frequencies.
        low_freq_factor: f64,
        /// Wavelengths below `original_max_positions / high_freq_factor` are high frequencies.
        high_freq_factor: f64,
        /// The context of the first training, in tokens.
        original_max_positions: usize,
    },
    /// YaRN ([2309.00071](https://arxiv.org/abs/2309.00071)): pairs of elements that turn slowly
    /// have their frequencies divided, pairs that turn fast keep theirs, and pairs between are
    /// interpolated. Queries and keys are scaled besides, which makes attention sharper.
    Yarn {
        /// The divisor of low frequencies.
        factor: f64,
        /// The context of the first training, in tokens.
        original_max_positions: usize,
        /// Factor of cosines and sines, so that attention logits grow by its square.
        attention_factor: f64,
        /// Pairs that turn more often than this within the first context keep their frequency.
        beta_fast: f64,
        /// Pairs that turn less often than this have their frequency divided.
        beta_slow: f64,
        /// Whether the bounds between these pairs are rounded outwards to whole pairs.
        truncate: bool,
    },
    /// Dynamic NTK: sequences beyond the trained context have a larger base, which grows with
    /// their length. Beyond `L` trained tokens, the base is multiplied by
    /// `(f tokens / L - (f - 1))^(D / (D - 2))` with the factor `f`.
    Dynamic {
        /// How far beyond the trained context sequences may reach.
        factor: f64,
        /// The trained context, in tokens.
        original_max_positions: usize,
    },
}

impl RopeScaling {
    /// The factor of cosines and sines.
    pub const fn attention_factor(self) -> f64 {
        match self {
            Self::Yarn { attention_factor, .. } => attention_factor,
            _ => 1.0,
        }
    }
}

/// The shape of a Llama-family model.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// The family.
    pub architecture: Architecture,
    /// Tokens in the vocabulary (rows of the embedding).
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Decoder layers.
    pub num_layers: usize,
    /// Query heads `Hq`.
    pub num_query_heads: usize,
    /// Key-value heads `Hkv`; divides `Hq`.
    pub num_kv_heads: usize,
    /// Elements of one head `D`, even.
    pub head_dim: usize,
    /// Longest sequence, in tokens: `max_position_embeddings`, or as far as the rotary embedding's
    /// scaling reaches, or the sliding window.
    pub max_positions: usize,
    /// The sliding window of some layers, in tokens, where it is smaller than the positions that
    /// the model has otherwise. Sliding is not implemented: sequences end before the first token
    /// would leave the window, so that all layers attend to all tokens.
    pub sliding_window: Option<usize>,
    /// Epsilon of every RMS norm.
    pub rms_norm_eps: f64,
    /// Base of the rotary embedding.
    pub rope_theta: f64,
    /// Scaling of the rotary embedding.
    pub rope_scaling: RopeScaling,
    /// The output projection is the embedding, transposed.
    pub tie_embeddings: bool,
    /// The query, key and value projections have biases.
    pub qkv_bias: bool,
    /// The attention's output projection has a bias.
    pub output_bias: bool,
    /// The MLP's projections have biases.
    pub mlp_bias: bool,
    /// Queries and keys pass an RMS norm over each head before the rotary embedding.
    pub qk_norm: bool,
    /// The token that starts a sequence.
    pub bos_token_id: Option<u32>,
    /// The tokens that end one; empty if there is none. [`crate::Model`] takes the tokenizer's
    /// where the configuration names none.
    pub eos_token_ids: Vec<u32>,
    /// The type that the weights were published in: f32, f16 or bf16. `None` where the
    /// configuration leaves it to the weights.
    pub dtype: Option<DType>,
}

impl ModelConfig {
    /// The shape of one rank's part: its heads and its columns of the MLP.
    ///
    /// # Errors
    /// [`kv_parallel::ParallelError::Indivisible`].
    pub fn part(&self, shard: Shard) -> Result<Self> {
        Ok(Self {
            num_query_heads: shard.part("query heads", self.num_query_heads)?,
            num_kv_heads: shard.part("key-value heads", self.num_kv_heads)?,
            intermediate_size: shard.part("columns of the MLP", self.intermediate_size)?,
            ..self.clone()
        })
    }

    /// Reads the text of a Hugging Face `config.json`.
    ///
    /// Keys that are absent have the value that `transformers` gives them for the architecture, but
    /// for `eos_token_id`: an id that the model's files do not name is no end token.
    ///
    /// # Errors
    /// [`ModelError::InvalidJson`]; [`ModelError::UnknownArchitecture`];
    /// [`ModelError::MissingSetting`] for a size without a default;
    /// [`ModelError::UnsupportedSetting`] for whatever would change the computation in a way that
    /// is not implemented.
    pub fn from_json(json: &str) -> Result<Self> {
        parse::config(json)
    }

    /// Reads a `config.json`.
    ///
    /// # Errors
    /// [`ModelError::Io`], and the errors of [`Self::from_json`].
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self> {
        Self::from_json(&read(path.as_ref())?)
    }

    /// Reads `config.json` of a model's folder and, where there is one, `generation_config.json`,
    /// whose list of end tokens replaces that of `config.json`.
    ///
    /// # Errors
    /// [`ModelError::MissingFile`] without `config.json`, and the errors of [`Self::from_json`].
    pub fn from_folder(folder: impl AsRef<Path>) -> Result<Self> {
        let path = folder.as_ref().join("config.json");
        if !path.is_file() {
            let hint =
                "a model's folder holds config.json, tokenizer.json and *.safetensors".into();
            return Err(ModelError::MissingFile { path, hint });
        }
        let mut config = Self::from_file(path)?;
        let path = folder.as_ref().join("generation_config.json");
        if path.is_file()
            && let Some(ids) = parse::generation_eos(&read(&path)?)?
        {
            config.eos_token_ids = ids;
        }
        Ok(config)
    }

    /// Checks that a sequence fits.
    ///
    /// # Errors
    /// [`ModelError::BeyondSlidingWindow`], [`ModelError::PromptTooLong`].
    pub fn check_length(&self, tokens: usize) -> Result<()> {
        match self.sliding_window {
            Some(window) if tokens > window => {
                Err(ModelError::BeyondSlidingWindow { tokens, window })
            }
            None if tokens > self.max_positions => {
                Err(ModelError::PromptTooLong { tokens, positions: self.max_positions })
            }
            _ => Ok(()),
        }
    }

    /// What bounds a sequence, in words: `sliding window of 256 tokens` or `2048 positions`.
    pub fn longest(&self) -> String {
        match self.sliding_window {
            Some(window) => format!("sliding window of {}", counted(window, "token")),
            None => counted(self.max_positions, "position"),
        }
    }

    /// Query heads per key-value head `G = Hq / Hkv`.
    pub const fn group_size(&self) -> usize {
        self.num_query_heads / self.num_kv_heads
    }

    /// Number of parameters; the embedding counts once where it is tied.
    pub fn parameter_count(&self) -> u64 {
        let [vocab, hidden, inner, layers, hq, hkv, d] = [
            self.vocab_size,
            self.hidden_size,
            self.intermediate_size,
            self.num_layers,
            self.num_query_heads,
            self.num_kv_heads,
            self.head_dim,
        ]
        .map(|n| n as u128);
        let when = |on: bool, n: u128| if on { n } else { 0 };
        let (q, kv) = (hq * d, hkv * d);
        let attention = hidden * (2 * q + 2 * kv)
            + when(self.qkv_bias, q + 2 * kv)
            + when(self.output_bias, hidden)
            + when(self.qk_norm, 2 * d);
        let mlp = 3 * hidden * inner + when(self.mlp_bias, 2 * inner + hidden);
        let embeddings = vocab * hidden * if self.tie_embeddings { 1 } else { 2 };
        let total = embeddings + layers * (attention + mlp + 2 * hidden) + hidden;
        u64::try_from(total).unwrap_or(u64::MAX)
    }
}

fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).map_err(|source| ModelError::io(path, source))
}
