//! What all requests share.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::available_parallelism;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use kv_models::{ChatTemplate, Engine, JobId, Tokenizer};
use prometheus_client::metrics::gauge::Gauge;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::error::{ApiError, Result};
use crate::metrics::Metrics;
use crate::policies::Policies;
use crate::shapers::Grammars;
use crate::tokens::longest_token;

/// The template of models without one: the messages, one a line. The embedded `needle-1m` is such a
/// model.
const PLAIN: &str = "{% for message in messages %}{{ message.content }}\
                     {% if not loop.last %}{{ '\\n' }}{% endif %}{% endfor %}";

/// Bytes for each permit of the semaphore that bounds the memory of bodies.
const BODY_PIECE: usize = 1 << 10;

/// What the operator allows.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The model's name in the API; the engine's by default.
    pub name: Option<String>,
    /// A chat template, instead of the model's own.
    pub chat_template: Option<ChatTemplate>,
    /// The policies that requests may choose.
    pub policies: Policies,
    /// Keys of which a client must send one; none for an open server.
    pub api_keys: Vec<String>,
    /// Origins whose pages may call the API.
    pub cors: Vec<String>,
    /// The most new tokens of a request.
    pub max_tokens: usize,
    /// The most choices of a request.
    pub max_choices: usize,
    /// The largest body, in bytes.
    pub max_body: usize,
    /// Bytes of all bodies that are being read; at least one of the largest fits.
    pub body_bytes: usize,
    /// The most connections that are open at once.
    pub max_connections: usize,
    /// The most time of a request.
    pub request_timeout: Duration,
    /// The most time that a client takes to send a request's head, and its body, and in which it
    /// takes none of an answer's bytes.
    pub client_timeout: Duration,
    /// The time that running requests have to end when the server does.
    pub drain_timeout: Duration,
}

impl Settings {
    /// The settings of jobs whose requests another server takes, which has limits of its own.
    pub(crate) fn of_jobs(
        policies: Policies,
        chat_template: Option<ChatTemplate>,
        max_tokens: usize,
    ) -> Self {
        Self {
            name: None,
            chat_template,
            policies,
            api_keys: Vec::new(),
            cors: Vec::new(),
            max_tokens,
            max_choices: usize::MAX,
            max_body: usize::MAX,
            body_bytes: usize::MAX,
            max_connections: usize::MAX,
            request_timeout: Duration::MAX,
            client_timeout: Duration::MAX,
            drain_timeout: Duration::MAX,
        }
    }
}

/// What all requests share.
pub(crate) struct App {
    pub(crate) engine: Engine,
    pub(crate) settings: Settings,
    /// The model's name in the API.
    pub(crate) name: String,
    /// The chat template; a reason for one that does not parse.
    chat: std::result::Result<ChatTemplate, String>,
    /// A reason for a model whose tokens grammars do not know.
    grammars: std::result::Result<Grammars, String>,
    pub(crate) metrics: Arc<Metrics>,
    /// The API's names of the jobs that are in the engine.
    requests: Mutex<BTreeMap<JobId, String>>,
    draining: AtomicBool,
    /// Room for bodies: a permit for each of [`BODY_PIECE`] bytes.
    bodies: Arc<Semaphore>,
    /// A permit for each request that is read at once.
    pub(crate) readers: Arc<Semaphore>,
    /// The most bytes of text that a token covers, where that is known.
    longest_token: Option<usize>,
    /// When the server started, in seconds of Unix time.
    pub(crate) started: u64,
}

impl App {
    /// `connections` counts those that are open.
    pub(crate) fn new(engine: Engine, settings: Settings, connections: Gauge) -> Self {
        let card = engine.card();
        let chat = match (&settings.chat_template, &card.chat) {
            (Some(own), _) => Ok(own.clone()),
            (None, Some(chat)) => chat.clone(),
            (None, None) => {
                tracing::warn!("the model has no chat template: messages are joined by line feeds");
                ChatTemplate::new(PLAIN).map_err(|error| error.to_string())
            }
        };
        let grammars = Grammars::new(card);
        if let Err(reason) = &grammars {
            tracing::warn!("no structured outputs with this model: {reason}");
        }
        Self {
            name: settings.name.clone().unwrap_or_else(|| card.name.clone()),
            metrics: Arc::new(Metrics::new(engine.clone(), connections)),
            chat,
            grammars,
            requests: Mutex::default(),
            draining: AtomicBool::new(false),
            bodies: Arc::new(Semaphore::new(
                pieces(settings.body_bytes.max(settings.max_body)) as usize
            )),
            readers: Arc::new(Semaphore::new(available_parallelism().map_or(1, usize::from))),
            longest_token: card.tokenizer.as_ref().and_then(longest_token),
            started: now(),
            engine,
            settings,
        }
    }

    /// The most tokens of a sequence.
    pub(crate) fn positions(&self) -> usize {
        let config = &self.engine.card().config;
        config.sliding_window.unwrap_or(config.max_positions).min(config.max_positions)
    }

    /// The model's tokenizer.
    pub(crate) fn tokenizer(&self) -> Result<&Tokenizer> {
        self.engine.card().tokenizer.as_ref().ok_or_else(|| {
            ApiError::invalid(
                "prompt",
                "the model has no tokenizer: give prompts as tokens, or start the server with \
                 `--tokenizer FILE`",
            )
        })
    }

    /// The tokens of a text, which comes from the field `param`.
    ///
    /// # Errors
    /// A model without a tokenizer, and a text whose bytes alone show that it does not fit into the
    /// model's positions: the tokens of a long text take seconds.
    pub(crate) fn encode(&self, param: &str, text: &str, special: bool) -> Result<Vec<u32>> {
        let (tokenizer, positions) = (self.tokenizer()?, self.positions());
        let least = self.longest_token.map_or(0, |longest| text.len().div_ceil(longest));
        if least >= positions {
            let message = format!(
                "{} bytes of text are at least {least} tokens, the model has {positions} positions",
                text.len()
            );
            return Err(ApiError::too_long(param, message));
        }
        Ok(tokenizer.encode(text, special)?)
    }

    /// The chat template.
    pub(crate) fn chat(&self) -> Result<&ChatTemplate> {
        self.chat.as_ref().map_err(|reason| ApiError::invalid("messages", reason))
    }

    /// What compiles grammars.
    pub(crate) fn grammars(&self, param: &str) -> Result<&Grammars> {
        self.grammars.as_ref().map_err(|reason| {
            let message = format!("no structured outputs with this model: {reason}");
            ApiError::unsupported(param, message)
        })
    }

    /// The bytes of a token, and its text.
    pub(crate) fn token_text(&self, token: u32) -> (String, Vec<u8>) {
        let bytes = self.grammars.as_ref().ok().and_then(|grammars| grammars.bytes(token));
        if let Some(bytes) = bytes {
            return (String::from_utf8_lossy(bytes).into_owned(), bytes.to_vec());
        }
        let tokenizer = self.engine.card().tokenizer.as_ref();
        let text = tokenizer.and_then(|tokenizer| tokenizer.decode(&[token], false).ok());
        let text = text.unwrap_or_else(|| format!("<{token}>"));
        (text.clone(), text.into_bytes())
    }

    /// Reserves memory for a body of so many bytes. Dropping the permit frees it.
    ///
    /// # Errors
    /// Bodies that are being read have taken it.
    pub(crate) fn room_for_body(&self, bytes: usize) -> Result<OwnedSemaphorePermit> {
        let room = Arc::clone(&self.bodies).try_acquire_many_owned(pieces(bytes));
        room.map_err(|_| {
            ApiError::unavailable(
                "the server reads as many bytes of bodies as it may (`--body-bytes`): come again",
            )
        })
    }

    /// The names of the jobs that are in the engine.
    pub(crate) fn requests(&self) -> MutexGuard<'_, BTreeMap<JobId, String>> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on, requests are refused.
    pub(crate) fn drain(&self) {
        self.draining.store(true, Ordering::Release);
    }

    /// Whether the server is about to end.
    pub(crate) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }
}

/// Pieces of so many bytes.
fn pieces(bytes: usize) -> u32 {
    u32::try_from(bytes.div_ceil(BODY_PIECE)).unwrap_or(u32::MAX)
}

/// Seconds of Unix time.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}
