#![doc = include_str!("../README.md")]

mod calibration;
mod chat;
mod config;
mod engine;
mod error;
mod fisher;
mod generate;
mod hub;
mod llama;
mod measured;
mod model;
mod output;
mod presets;
mod rope;
mod sampling;
mod session;
mod special_tokens;
mod tokenizer;
mod weights;

pub use calibration::Calibration;
pub use chat::{ChatTemplate, Message};
pub use config::{Architecture, ModelConfig, RopeScaling};
pub use engine::{
    ContextInfo, Ended, Engine, EngineOptions, Held, Job, JobError, JobId, JobLoad, Load,
    LogitsShaper, ModelCard, Picture, Started, TokenLogprobs, Totals, Update,
};
pub use error::{FisherError, HubError, ModelError, Result, WeightsError};
pub use fisher::{Fisher, LayerFisher, TextWindows};
pub use generate::{Event, Finish, Generated, GeneratedBatch, Request, generate, generate_from};
pub use hub::resolve;
pub use llama::{KvGradients, Llama, PrefillPass, Prefilled, PromptPrefix};
pub(crate) use model::fnv_1a;
pub use model::{Model, model_names};
pub use output::TextOutput;
pub use presets::{PRESETS, preset};
pub use rope::inverse_frequencies;
pub use sampling::Sampling;
pub use session::{Decoder, Prefilling, Session, StepCounts, check_heads};
pub use tokenizer::{TextStream, Tokenizer};
pub use weights::Weights;

/// Makes the examples of the workspace's README doc tests.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct WorkspaceReadme;
