//! Everything that can go wrong on the host side of a model.

mod fisher;
mod hub;
mod weights;

use std::path::PathBuf;

use kv_core::counted;

pub use fisher::FisherError;
pub use hub::HubError;
pub use weights::WeightsError;
pub(crate) use weights::listed;

/// Result of the functions of this crate.
pub type Result<T, E = ModelError> = std::result::Result<T, E>;

/// Why a model could not be found, read or run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// A file or folder could not be read or written.
    #[error("cannot access `{path}`: {source}")]
    Io {
        /// What was accessed.
        path: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },

    /// `config.json` (or a file beside it) is not the JSON that it should be.
    #[error("`{file}` is not valid: {reason}")]
    InvalidJson {
        /// Path or name of the file.
        file: String,
        /// What the parser said.
        reason: String,
    },

    /// The model is of an architecture that this crate does not implement.
    #[error(
        "unknown architecture `{name}`; supported: {}; convert the model or choose another one",
        .supported.join(", ")
    )]
    UnknownArchitecture {
        /// The name in `config.json`.
        name: String,
        /// The names that are understood.
        supported: Vec<&'static str>,
    },

    /// A setting of the model has a value that this crate does not implement.
    #[error(
        "the model's setting `{setting}` is {value}, which is not supported; supported: {supported}"
    )]
    UnsupportedSetting {
        /// The key in `config.json`.
        setting: String,
        /// Its value there.
        value: String,
        /// The values that are supported.
        supported: String,
    },

    /// A setting without which the model cannot be built is absent.
    #[error("the model's configuration lacks `{setting}`; add it to `config.json`")]
    MissingSetting {
        /// The key in `config.json`.
        setting: String,
    },

    /// No preset has this name.
    #[error(
        "unknown preset `{name}`{}; presets: {}",
        .nearest.map(|n| format!("; did you mean `{n}`?")).unwrap_or_default(),
        .presets.join(", ")
    )]
    UnknownPreset {
        /// The name asked for.
        name: String,
        /// The preset of the most similar name, if one is similar.
        nearest: Option<&'static str>,
        /// All presets.
        presets: &'static [&'static str],
    },

    /// A file that the model needs is not there.
    #[error("`{path}` does not exist; {hint}")]
    MissingFile {
        /// The path expected.
        path: PathBuf,
        /// What to do.
        hint: String,
    },

    /// The weights could not be read.
    #[error(transparent)]
    Weights(#[from] WeightsError),

    /// Ranks could not divide the model, or lost each other.
    #[error(transparent)]
    Parallel(#[from] kv_parallel::ParallelError),

    /// A policy that needs all heads, on a rank that has a part of them.
    #[error(
        "policy `{policy}` compares the heads of a layer, and {shard} has only a part of them; \
         run it on one rank, or choose a policy or options whose heads decide by themselves, such \
         as `longflow` with `\"scope\": \"head\"`"
    )]
    ComparesHeads {
        /// The policy.
        policy: String,
        /// The rank.
        shard: kv_parallel::Shard,
    },

    /// Work that needs all weights, on a rank that has a part of them.
    #[error("{what} needs the whole model, and {shard} has only a part of it")]
    WholeModelOnly {
        /// The work.
        what: &'static str,
        /// The rank.
        shard: kv_parallel::Shard,
    },

    /// Matrices cannot be stored in a type.
    #[error("matrices cannot be stored in {dtype}: {reason}")]
    MatrixStorage {
        /// The type asked for.
        dtype: String,
        /// Why not.
        reason: String,
    },

    /// The tokenizer could not be loaded, or refused its input.
    #[error("tokenizer: {reason}")]
    Tokenizer {
        /// What went wrong.
        reason: String,
    },

    /// The model has no chat template.
    #[error(
        "`{path}` has no chat template (neither `chat_template.jinja` nor `chat_template` in \
             `tokenizer_config.json`); use plain prompts"
    )]
    MissingChatTemplate {
        /// The model's folder.
        path: PathBuf,
    },

    /// The chat template does not parse, or refused the messages.
    #[error("chat template: {reason}")]
    ChatTemplate {
        /// What the template engine, or the template itself, said.
        reason: String,
    },

    /// The model could not be found or downloaded.
    #[error(transparent)]
    Hub(#[from] HubError),

    /// Fisher information could not be measured or read.
    #[error(transparent)]
    Fisher(#[from] FisherError),

    /// A prompt without tokens.
    #[error("the prompt is empty; give at least one token")]
    EmptyPrompt,

    /// Prompts that should be equally long are not, or there are not as many tokens as sequences.
    #[error(
        "{} where {expected} were expected; one for each sequence, equally many",
        counted(*.actual, "token")
    )]
    UnequalPrompts {
        /// Tokens expected.
        expected: usize,
        /// Tokens given.
        actual: usize,
    },

    /// A token outside the vocabulary.
    #[error("token {token} is outside the vocabulary of {vocabulary}")]
    TokenOutOfRange {
        /// The token.
        token: u32,
        /// The vocabulary's size.
        vocabulary: usize,
    },

    /// The cache refused.
    #[error(transparent)]
    Cache(#[from] kv_core::Error),

    /// A kernel refused its arguments.
    #[error(transparent)]
    Kernel(#[from] kv_kernels::KernelError),

    /// The policy refused.
    #[error(transparent)]
    Policy(#[from] kv_policies::PolicyError),

    /// A policy freezes tokens of a prompt that it cannot freeze.
    #[error("layer {layer} cannot freeze what its policy wants to: {reason}")]
    InvalidFrozen {
        /// The layer.
        layer: usize,
        /// What is wrong, with the values.
        reason: String,
    },

    /// A policy needs queries of tokens that are frozen.
    #[error(
        "layer {layer} computes the last {computed} queries without a gap, the policy needs \
         {needed}; freeze fewer tokens or observe fewer queries"
    )]
    FrozenQueries {
        /// The layer.
        layer: usize,
        /// Queries that the policy needs.
        needed: usize,
        /// Queries behind the frozen tokens.
        computed: usize,
    },

    /// A sequence that does not fit into the model's positions.
    #[error(
        "{} do not fit into the model's {}; shorten the prompt",
        counted(*.tokens, "token"),
        counted(*.positions, "position")
    )]
    PromptTooLong {
        /// Tokens of the prompt, and of what was appended.
        tokens: usize,
        /// Positions of the model.
        positions: usize,
    },

    /// A sequence that a model with a sliding window could attend to only in part.
    #[error(
        "{tokens} tokens of a sequence do not fit into the model's sliding window of \
             {window}, beyond which it is not supported; shorten the prompt, or ask for fewer new \
             tokens"
    )]
    BeyondSlidingWindow {
        /// Tokens of the prompt, and of what follows it.
        tokens: usize,
        /// The window, in tokens.
        window: usize,
    },

    /// A policy that moves tokens to new positions met a rotary embedding whose frequencies depend
    /// on the sequence's length (dynamic NTK).
    #[error(
        "a prompt of {tokens} tokens is beyond the trained context of {trained}, where the model's \
             RoPE frequencies depend on the length: policies that renumber tokens (`rerotate`) \
             cannot rotate its keys anew; shorten the prompt or leave `rerotate` out"
    )]
    LengthDependentRope {
        /// Tokens of the prompt.
        tokens: usize,
        /// The trained context, in tokens.
        trained: usize,
    },

    /// A sampling parameter is outside its range.
    #[error("sampling parameter `{parameter}` is {value}, expected {expected}")]
    InvalidSampling {
        /// The parameter.
        parameter: &'static str,
        /// Its value.
        value: String,
        /// Its range.
        expected: &'static str,
    },

    /// A repetition penalty in a session that does not know its sequences' tokens.
    #[error(
        "a repetition penalty counts all tokens of a sequence, which a resumed session does not \
             know; give them by `Session::with_history`"
    )]
    UnknownHistory,

    /// A decoder that failed within a step was asked for another step.
    #[error("an earlier step of this decoder failed; start the sequences anew")]
    DecoderFailed,

    /// Tokens were appended to a decoder whose next step had begun with the drawn tokens.
    #[error(
        "a step with the drawn tokens has begun; append tokens to a decoder that does not overlap"
    )]
    StepInFlight,

    /// A GGUF file that is damaged, or of another kind of model.
    #[error("{}: {source}", path.display())]
    Gguf {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: Box<kv_gguf::GgufError>,
    },

    /// The model computed something that is no number.
    #[error(
        "step {step}: the model's output holds NaN or Inf; try another dtype (f32), and check \
             the weights"
    )]
    NonFinite {
        /// The decode step, from 0.
        step: usize,
    },
}

impl ModelError {
    /// Shorthand for [`ModelError::Io`].
    pub(crate) fn io(path: impl Into<PathBuf>, source: std::io::Error) -> Self {
        Self::Io { path: path.into(), source }
    }

    /// Shorthand for [`ModelError::Gguf`].
    pub(crate) fn gguf(path: impl Into<PathBuf>, source: kv_gguf::GgufError) -> Self {
        Self::Gguf { path: path.into(), source: Box::new(source) }
    }
}
