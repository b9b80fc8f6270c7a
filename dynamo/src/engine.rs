//! The engine as Dynamo drives it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::Context;
use async_trait::async_trait;
use dynamo_backend_common::{
    DynamoError, EngineConfig, GenerateContext, LLMEngine, LLMEngineOutput, LlmRegistration,
    MetricsBindings, MetricsCtx, PreprocessedRequest, WorkerConfig,
};
use futures_util::stream::BoxStream;
use kv_models::{Engine, EngineOptions};
use kv_parallel::Ranks;
use kv_serve::{Jobs, Policies};
use serde_json::{Value, json};
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::Instant;

use crate::answer::Answer;
use crate::args::Args;
use crate::error::{self, SetupError};
use crate::request::{self, Limits};
use crate::{card, load};

/// How long the engine may take to end once the patience with its jobs has.
const LAST_STEP: Duration = Duration::from_secs(5);

/// A model that Dynamo starts, asks and ends.
pub struct KvEngine {
    args: Args,
    ranks: Ranks,
    options: EngineOptions,
    policies: Policies,
    serving: Mutex<Option<Arc<Serving>>>,
    /// Tells the load.
    publishing: Arc<Mutex<Option<JoinHandle<()>>>>,
}

/// An engine that has started.
struct Serving {
    engine: Engine,
    jobs: Arc<Jobs>,
    limits: Limits,
}

impl KvEngine {
    /// An engine that has not started, and how Dynamo runs it. Of several ranks, the first one has
    /// it, and the others follow (`kv_serve::follow`).
    ///
    /// # Errors
    /// What is wrong with the command line.
    pub fn new(args: Args, ranks: Ranks) -> anyhow::Result<(Self, WorkerConfig)> {
        args.check()?;
        let folder = args.card_folder();
        std::fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
        let dynamo = &args.dynamo;
        let config = WorkerConfig {
            namespace: dynamo.namespace.clone(),
            component: dynamo.component.clone(),
            endpoint: dynamo.endpoint.clone(),
            endpoint_types: dynamo.endpoint_types.clone(),
            custom_jinja_template: dynamo.custom_jinja_template.clone(),
            tool_call_parser: dynamo.dyn_tool_call_parser.clone(),
            reasoning_parser: dynamo.dyn_reasoning_parser.clone(),
            exclude_tools_when_tool_choice_none: dynamo.exclude_tools_when_tool_choice_none,
            // `start` writes its files, before Dynamo reads them.
            model_name: folder.display().to_string(),
            // No events of blocks: see `Self::kv_event_sources`.
            enable_local_indexer: false,
            runtime: dynamo.runtime.clone(),
            ..WorkerConfig::default()
        };
        let options = args.engine.options(&ranks)?;
        let policies = args.policies.policies()?;
        let (serving, publishing) = (Mutex::default(), Arc::default());
        Ok((Self { args, ranks, options, policies, serving, publishing }, config))
    }

    fn serving(&self) -> MutexGuard<'_, Option<Arc<Serving>>> {
        self.serving.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The engine, between its start and its end.
    fn started(&self) -> Result<Arc<Serving>, DynamoError> {
        self.serving().clone().ok_or_else(|| error::shut_down("the worker is not serving"))
    }
}

impl Serving {
    /// Loads the model.
    fn start(
        args: &Args,
        options: EngineOptions,
        policies: Policies,
        ranks: &Ranks,
    ) -> Result<Self, SetupError> {
        let template = args.model.template().map_err(SetupError::Other)?;
        let shares_prefixes = options.prefix_bytes > 0;
        let engine = kv_serve::engine(&args.model, options, ranks).map_err(SetupError::Other)?;
        let max_tokens = args.max_tokens as usize;
        let jobs = Jobs::new(engine.clone(), policies, template, max_tokens);
        let limits = Limits { positions: jobs.positions(), max_tokens, shares_prefixes };
        Ok(Self { engine, jobs: Arc::new(jobs), limits })
    }

    /// What is registered.
    fn config(&self, name: Option<&String>) -> EngineConfig {
        let card = self.engine.card();
        EngineConfig {
            model: name.unwrap_or(&card.name).clone(),
            llm: Some(LlmRegistration {
                context_length: u32::try_from(self.limits.positions).ok(),
                // Compressed caches are not made of blocks of equal tokens.
                kv_cache_block_size: None,
                total_kv_blocks: Some(load::blocks(&self.engine)),
                max_num_seqs: u64::try_from(self.engine.options().rows).ok(),
                ..LlmRegistration::default()
            }),
            ..EngineConfig::default()
        }
    }
}

#[async_trait]
impl LLMEngine for KvEngine {
    async fn start(&self, _worker_id: u64) -> Result<EngineConfig, DynamoError> {
        tracing::info!("loading {}", self.args.model.model);
        let (args, ranks) = (self.args.clone(), self.ranks.clone());
        let (options, policies) = (self.options.clone(), self.policies.clone());
        let started = spawn_blocking(move || {
            let serving = Serving::start(&args, options, policies, &ranks)?;
            let template = serving.jobs.chat_template().map_err(|error| {
                SetupError::ChatTemplate { reason: error.message().to_string() }
            })?;
            card::write(
                &args.card_folder(),
                serving.engine.card(),
                serving.limits.positions,
                template,
            )?;
            Ok::<_, SetupError>(serving)
        });
        let serving = started.await.map_err(|error| error::internal(error.to_string()))??;
        let config = serving.config(self.args.model.name.as_ref());
        let card = serving.engine.card();
        tracing::info!("{} on {}, {:?}", config.model, card.device, card.dtype);
        *self.serving() = Some(Arc::new(serving));
        Ok(config)
    }

    async fn generate(
        &self,
        request: PreprocessedRequest,
        context: GenerateContext,
    ) -> Result<BoxStream<'static, Result<LLMEngineOutput, DynamoError>>, DynamoError> {
        let begun = Instant::now();
        let serving = self.started()?;
        let asked = request::read(&request, serving.limits)?;
        let (jobs, body) = (Arc::clone(&serving.jobs), asked.body);
        // Beside the threads that serve others: a large grammar takes seconds.
        let made = spawn_blocking(move || jobs.completion(body)).await;
        let made = made.map_err(|error| error::internal(error.to_string()))?;
        let mut jobs = made.map_err(|error| error::of_fields(&error))?;
        let mut job = jobs.pop().ok_or_else(|| error::internal("a request without a job"))?;
        job.request.stop = asked.stop;
        let (engine, patience) = (&serving.engine, self.args.request_timeout);
        let inner = context.inner_arc();
        let answer = Answer::submit(engine, job, asked.ends, inner, begun, patience)?;
        Ok(Box::pin(answer.chunks()))
    }

    async fn cleanup(&self) -> Result<(), DynamoError> {
        let publishing = self.publishing.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(publishing) = publishing {
            publishing.abort();
        }
        let Some(serving) = self.serving().take() else { return Ok(()) };
        let patience = self.args.drain_timeout;
        tracing::info!("ending: running requests have {patience:?}");
        let engine = serving.engine.clone();
        let ended = spawn_blocking(move || engine.shut_down(patience));
        // A device, or another rank, may never answer.
        match tokio::time::timeout(patience + LAST_STEP, ended).await {
            Ok(Ok(Ok(0))) => tracing::info!("all requests have ended"),
            Ok(Ok(Ok(count))) => tracing::warn!("{count} requests were cancelled"),
            Ok(Ok(Err(error))) => tracing::warn!("{error}"),
            Ok(Err(error)) => tracing::warn!("{error}"),
            Err(_) => return Err(error::internal("the engine does not end")),
        }
        Ok(())
    }

    async fn setup_metrics(
        &self,
        _context: MetricsCtx<'_>,
    ) -> Result<MetricsBindings, DynamoError> {
        let (engine, publishing) = (self.started()?.engine.clone(), Arc::clone(&self.publishing));
        let runtime = tokio::runtime::Handle::current();
        Ok(MetricsBindings {
            dp_ranks: vec![0],
            on_publisher_ready: Some(Box::new(move |publisher| {
                let task = runtime.spawn(load::publish(engine, publisher));
                *publishing.lock().unwrap_or_else(PoisonError::into_inner) = Some(task);
                Ok(())
            })),
        })
    }

    async fn health_check_payload(&self) -> Result<Option<Value>, DynamoError> {
        let serving = self.started()?;
        let config = &serving.engine.card().config;
        let token = config.bos_token_id.or(config.eos_token_ids.first().copied());
        Ok(Some(json!({
            "token_ids": [token.unwrap_or_default()],
            "stop_conditions": {"max_tokens": 1},
            "sampling_options": {"temperature": 0.0},
        })))
    }
}
