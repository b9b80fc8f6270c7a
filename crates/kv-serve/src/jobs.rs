//! Jobs of requests that come by another way than this crate's own routes.

use kv_models::{ChatTemplate, Engine, Job};
use serde_json::{Map, Value};

use crate::app::{App, Settings};
use crate::error::Result;
use crate::policies::Policies;
use crate::protocol::completion::prepare;
use prometheus_client::metrics::gauge::Gauge;

/// Makes an engine's jobs of bodies of `/v1/completions`, for servers with a protocol of their own.
/// Each field is honoured, or refused by its name, as the routes do it.
///
/// ```
/// use kv_core::Budget;
/// use kv_models::{Engine, EngineOptions, Model};
/// use kv_serve::{Jobs, Policies};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let load = || Model::load("needle-1m", &kv_core::select_device("cpu".parse()?)?, None);
/// let engine = Engine::start(load, EngineOptions::default())?;
/// let policies = Policies::new("snapkv", Budget::Ratio(0.25), &[])?;
/// let jobs = Jobs::new(engine, policies, None, 512);
/// let body = serde_json::json!({"prompt": [1, 2, 3], "max_tokens": 4, "kv": {"policy": "full"}});
/// let made = jobs.completion(body.as_object().ok_or("no object")?.clone())?;
/// assert_eq!((made.len(), made[0].policy.name()), (1, "full"));
/// # Ok(())
/// # }
/// ```
pub struct Jobs {
    app: App,
}

impl Jobs {
    /// Makes jobs for an engine: with the policies that requests may choose, a chat template in the
    /// place of the model's own, and the most new tokens of a request.
    pub fn new(
        engine: Engine,
        policies: Policies,
        chat_template: Option<ChatTemplate>,
        max_tokens: usize,
    ) -> Self {
        Self {
            app: App::new(
                engine,
                Settings::of_jobs(policies, chat_template, max_tokens),
                Gauge::default(),
            ),
        }
    }

    /// The most tokens of a sequence.
    pub fn positions(&self) -> usize {
        self.app.positions()
    }

    /// The chat template. Models without one have a template that joins messages by line feeds.
    ///
    /// # Errors
    /// The reason why the model's template does not parse.
    pub fn chat_template(&self) -> Result<&ChatTemplate> {
        self.app.chat()
    }

    /// The jobs of a body: one for each prompt and choice. It takes seconds where a prompt is a
    /// long text or a grammar is large.
    ///
    /// # Errors
    /// The field that is wrong.
    pub fn completion(&self, body: Map<String, Value>) -> Result<Vec<Job>> {
        Ok(prepare(&self.app, body)?.0.jobs)
    }
}
