//! From the command line to a server.

use std::net::SocketAddr;
use std::path::Path;

use anyhow::{Context, Result};
use bytesize::ByteSize;
use kv_core::select_device;
use kv_models::{ChatTemplate, Engine, EngineOptions, Model, Tokenizer};
use kv_parallel::Ranks;

use crate::app::Settings;
use crate::args::{Args, EngineArgs, ModelArgs, PolicyArgs};
use crate::policies::Policies;
use crate::server;

/// Files that the process opens besides connections: the model's, the device's, saved contexts.
const OTHER_FILES: u64 = 128;

/// Loads the model and serves it until SIGTERM or Ctrl-C. Of several ranks, the first one serves,
/// and the others [`follow`].
///
/// # Errors
/// What is wrong with the command line, the model or the address.
pub async fn run(args: &Args, ranks: &Ranks) -> Result<()> {
    let settings = settings(args)?;
    settings.policies.check_ranks(ranks.shard()).context("--policy")?;
    // Before the model is loaded, which takes long: a port that is taken is known at once.
    let listener = server::listen(SocketAddr::new(args.host, args.port))?;
    let address = listener.local_addr()?;
    tracing::info!("loading {}", args.model.model);
    let is_open = settings.api_keys.is_empty() && !args.host.is_loopback();
    let (own, options, of) = (args.model.clone(), args.options(ranks)?, ranks.clone());
    let own_name = settings.name.clone();
    let loading = async move {
        let engine = tokio::task::spawn_blocking(move || engine(&own, options, &of)).await??;
        let card = engine.card();
        let name = own_name.as_ref().unwrap_or(&card.name);
        tracing::info!("{name} on {}, {:?}", card.device, card.dtype);
        if is_open {
            tracing::warn!(
                "anyone who reaches {address} may use this server: there is no --api-key"
            );
        }
        tracing::info!("listening on http://{address}, a page in a browser, the API at /v1");
        Ok(engine)
    };
    server::serve(listener, loading, settings, server::end_signal()).await
}

/// Computes a rank's part of what the first rank serves, until the first rank ends.
///
/// # Errors
/// What is wrong with the model or the device, and tokens that differ from the first rank's.
pub fn follow(model: &ModelArgs, options: EngineOptions, ranks: &Ranks) -> Result<()> {
    ranks.leave_signals_to_first();
    Ok(Engine::follow(loader(model, ranks)?, options)?)
}

/// What the command line allows.
///
/// # Errors
/// A policy or a chat template that is wrong.
pub fn settings(args: &Args) -> Result<Settings> {
    // A secret that is not set would leave the server open.
    anyhow::ensure!(
        !args.api_key.iter().any(String::is_empty),
        "an empty key: give --api-key or KV_SERVE_API_KEY a value, or neither of them"
    );
    if let Some(folder) = &args.contexts {
        anyhow::ensure!(
            !folder.exists() || folder.is_dir(),
            "--contexts: {} is no folder",
            folder.display()
        );
        std::fs::create_dir_all(folder)
            .with_context(|| format!("--contexts: {} cannot be made", folder.display()))?;
    }
    Ok(Settings {
        name: args.model.name.clone(),
        chat_template: args.model.template()?,
        policies: args.policies.policies()?,
        api_keys: args.api_key.clone(),
        cors: args.cors.clone(),
        max_tokens: args.max_tokens,
        max_choices: args.max_choices,
        max_body: usize::try_from(args.max_body.as_u64()).context("--max-body")?,
        body_bytes: usize::try_from(args.body_bytes.as_u64()).context("--body-bytes")?,
        max_connections: room_for(args.max_connections),
        request_timeout: args.request_timeout,
        client_timeout: args.client_timeout,
        drain_timeout: args.drain_timeout,
    })
}

/// Loads a model into an engine; of several ranks, the first one's part.
///
/// # Errors
/// A device or a model that cannot be had.
pub fn engine(model: &ModelArgs, options: EngineOptions, ranks: &Ranks) -> Result<Engine> {
    Ok(Engine::start(loader(model, ranks)?, options)?)
}

impl Args {
    /// How the engine runs, with compressed contexts.
    ///
    /// # Errors
    /// A number of bytes that this machine cannot count.
    pub fn options(&self, ranks: &Ranks) -> Result<EngineOptions> {
        Ok(EngineOptions {
            context_bytes: bytes(self.context_bytes, "--context-bytes")?,
            contexts: self.contexts.clone(),
            ..self.engine.options(ranks)?
        })
    }
}

impl EngineArgs {
    /// How the engine runs, without room for compressed contexts.
    ///
    /// # Errors
    /// A number of bytes that this machine cannot count.
    pub fn options(&self, ranks: &Ranks) -> Result<EngineOptions> {
        Ok(EngineOptions {
            rows: self.rows,
            queue: self.queue,
            bytes: bytes(self.cache_bytes, "--cache-bytes")?,
            groups: self.groups,
            prefill_share: self.prefill_share,
            prefix_bytes: bytes(self.prefix_bytes, "--prefix-bytes")?,
            context_bytes: 0,
            contexts: None,
            meeting: ranks.meeting().cloned(),
        })
    }
}

impl PolicyArgs {
    /// The policies that requests may choose.
    ///
    /// # Errors
    /// A policy that cannot be built, and a name that is no policy.
    pub fn policies(&self) -> Result<Policies> {
        let policies = Policies::new(&self.policy, self.budget, &self.allow_policy)
            .context("--policy, --budget or --allow-policy")?;
        Ok(policies.at_least(self.least_budget).at_most(self.most_kept))
    }
}

impl ModelArgs {
    /// The chat template that takes the place of the model's own.
    ///
    /// # Errors
    /// A file that cannot be read, and a template that does not parse.
    pub fn template(&self) -> Result<Option<ChatTemplate>> {
        self.chat_template.as_deref().map(template).transpose().context("--chat-template")
    }
}

fn bytes(size: ByteSize, option: &'static str) -> Result<usize> {
    usize::try_from(size.as_u64()).context(option)
}

/// Loads a rank's part of the command line's model.
fn loader(
    args: &ModelArgs,
    ranks: &Ranks,
) -> Result<impl FnOnce() -> kv_models::Result<Model> + Send + 'static> {
    let (name, dtype, ranks) = (args.model.clone(), args.dtype, ranks.clone());
    let device = match ranks.shard().is_part() {
        true => args.device.of_process(ranks.local()),
        false => args.device,
    };
    let tokenizer = args.tokenizer.as_ref().map(Tokenizer::from_file).transpose();
    let tokenizer = tokenizer.context("--tokenizer")?;
    Ok(move || {
        let device = select_device(device)?;
        let collective = ranks.collective(&device)?;
        let mut model = Model::load_part(&name, &device, dtype.map(Into::into), collective)?;
        if let Some(tokenizer) = tokenizer {
            model.set_tokenizer(tokenizer);
        }
        Ok(model)
    })
}

/// Lets the process open as many files as its connections need. Returns how many connections it can
/// have.
fn room_for(connections: usize) -> usize {
    let needed = u64::try_from(connections).unwrap_or(u64::MAX).saturating_add(OTHER_FILES);
    match rlimit::increase_nofile_limit(needed) {
        Ok(files) if files < needed => {
            let room = files.saturating_sub(OTHER_FILES).max(1);
            tracing::warn!(
                "{room} connections at once, not {connections}: this process may open {files} \
                 files, and not {needed}"
            );
            usize::try_from(room).unwrap_or(connections)
        }
        Ok(_) => {
            tracing::info!("{connections} connections at once");
            connections
        }
        Err(error) => {
            tracing::warn!("the limit of open files could not be raised: {error}");
            connections
        }
    }
}

fn template(path: &Path) -> Result<ChatTemplate> {
    let source = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
    ChatTemplate::new(source).with_context(|| path.display().to_string())
}
