//! From the command line to a server.

use std::net::SocketAddr;
use std::path::Path;

use anyhow::{Context, Result};
use kv_core::select_device;
use kv_models::{ChatTemplate, Engine, EngineOptions, Model, Tokenizer};

use crate::app::Settings;
use crate::args::Args;
use crate::policies::Policies;
use crate::server;

/// Files that the process opens besides connections: the model's, the device's, saved contexts.
const OTHER_FILES: u64 = 128;

/// Loads the model and serves it until SIGTERM or Ctrl-C.
///
/// # Errors
/// What is wrong with the command line, the model or the address.
pub async fn run(args: &Args) -> Result<()> {
    let settings = settings(args)?;
    // Before the model is loaded, which takes long: a port that is taken is known at once.
    let listener = server::listen(SocketAddr::new(args.host, args.port))?;
    let address = listener.local_addr()?;
    tracing::info!("loading {}", args.model);
    let own = args.clone();
    let engine = tokio::task::spawn_blocking(move || engine(&own)).await??;
    let card = engine.card();
    let name = settings.name.as_ref().unwrap_or(&card.name);
    tracing::info!("{name} on {}, {:?}", card.device, card.dtype);
    if settings.api_keys.is_empty() && !args.host.is_loopback() {
        tracing::warn!("anyone who reaches {address} may use this server: there is no --api-key");
    }
    tracing::info!("listening on http://{address}, a page in a browser, the API at /v1");
    server::serve(listener, engine, settings, server::end_signal()).await
}

/// What the command line allows.
///
/// # Errors
/// A policy or a chat template that is wrong.
pub fn settings(args: &Args) -> Result<Settings> {
    let policies = Policies::new(&args.policy, args.budget, &args.allow_policy)
        .context("--policy, --budget or --allow-policy")?;
    let template = args.chat_template.as_deref().map(template).transpose()?;
    Ok(Settings {
        name: args.name.clone(),
        chat_template: template,
        policies,
        api_keys: args.api_key.iter().filter(|key| !key.is_empty()).cloned().collect(),
        cors: args.cors.clone(),
        max_tokens: args.max_tokens,
        max_choices: args.max_choices,
        max_body: usize::try_from(args.max_body.as_u64()).context("--max-body")?,
        max_connections: room_for(args.max_connections),
        request_timeout: args.request_timeout,
        client_timeout: args.client_timeout,
        drain_timeout: args.drain_timeout,
    })
}

/// Loads the command line's model into an engine.
///
/// # Errors
/// A device or a model that cannot be had.
pub fn engine(args: &Args) -> Result<Engine> {
    let bytes = |size: bytesize::ByteSize, name| usize::try_from(size.as_u64()).context(name);
    let options = EngineOptions {
        rows: args.rows,
        queue: args.queue,
        bytes: bytes(args.cache_bytes, "--cache-bytes")?,
        groups: args.groups,
        prefill_share: args.prefill_share,
        prefix_bytes: bytes(args.prefix_bytes, "--prefix-bytes")?,
        context_bytes: bytes(args.context_bytes, "--context-bytes")?,
        contexts: args.contexts.clone(),
        meeting: None,
    };
    let (name, device, dtype) = (args.model.clone(), args.device, args.dtype);
    let tokenizer = args.tokenizer.as_ref().map(Tokenizer::from_file).transpose()?;
    let load = move || {
        let mut model = Model::load(&name, &select_device(device)?, dtype.map(Into::into))?;
        if let Some(tokenizer) = tokenizer {
            model.set_tokenizer(tokenizer);
        }
        Ok(model)
    };
    Ok(Engine::start(load, options)?)
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
