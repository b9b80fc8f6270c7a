//! Llama-family models in Burn, with pluggable KV-cache compression.
//!
//! One decoder serves Llama 2 and 3, Mistral, Ministral, Qwen2, Qwen2.5, Qwen3 and the DeepSeek-R1
//! distillations, configured by the model's own `config.json`. [`Model::load`] takes a local
//! folder, a hub id, `random:PRESET` (random weights, for speed work) or `needle-1m` (embedded).
//!
//! ```
//! use kv_models::{Model, Request, generate};
//! use kv_policies::build_named;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let device = burn::tensor::Device::flex();
//! let model = Model::load("needle-1m", &device, None)?;
//! let policy = build_named("snapkv", "0.5".parse()?)?;
//! let filler = "The sea was calm that day, and the old boat lay upon the sand. ".repeat(9);
//! let prompt = format!(
//!     "{filler}\nThe secret number of the clever fiddle is 21963.\n{filler}\nQuestion: What is \
//!      the secret number of the clever fiddle?\nAnswer: "
//! );
//! let requests = [Request::greedy(model.encode(&prompt)?, 5)];
//! let outputs = generate(&model, policy, &requests, |_| std::ops::ControlFlow::Continue(()))?;
//! assert_eq!(outputs[0].text.as_deref(), Some("21963"));
//! # Ok(())
//! # }
//! ```

mod calibration;
mod chat;
mod config;
mod error;
mod fisher;
mod generate;
mod hub;
mod llama;
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
pub use error::{ModelError, Result};
pub use fisher::{Fisher, FisherError, LayerFisher, TextWindows};
pub use generate::{Event, Finish, Generated, Request, generate};
pub use hub::{HubError, resolve};
pub use llama::{KvGradients, Llama, PrefillPass, Prefilled};
pub use model::{Model, model_names};
pub use output::TextOutput;
pub use presets::{PRESETS, preset};
pub use rope::{inverse_frequencies, inverse_frequencies_of, rotary_table};
pub use sampling::Sampling;
pub use session::{Decoder, Session};
pub use tokenizer::{TextStream, Tokenizer};
pub use weights::{Weights, WeightsError};

/// Makes the README's examples doc tests.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
