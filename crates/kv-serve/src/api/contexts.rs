//! `/v1/kv/contexts`: documents that are compressed once, for many requests.

use std::sync::Arc;
use std::time::Instant;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use kv_models::ContextInfo;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use super::{Named, blocking, reading};
use crate::app::App;
use crate::error::{ApiError, ErrorBody, Result};
use crate::protocol::fields::{self, Object};

/// A document to compress.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct NewContext {
    /// Its name: letters, digits, `-`, `_` and `.`.
    #[schema(min_length = 1, max_length = 64, pattern = "^[A-Za-z0-9_-][A-Za-z0-9._-]*$")]
    name: String,
    /// The document; or else `tokens`.
    text: Option<String>,
    /// The document's tokens.
    tokens: Option<Vec<u32>>,
    /// How it is compressed: `policy`, `budget` and the policy's options.
    #[schema(value_type = Option<Object>)]
    kv: Option<Map<String, Value>>,
}

/// A compressed document.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Context {
    name: String,
    /// The document's tokens.
    tokens: usize,
    /// The policy's configuration.
    #[schema(value_type = Object)]
    policy: Value,
    /// Tokens that a head holds, the mean over layers and heads.
    kv_tokens_kept: f64,
    /// Bytes of the cache.
    kv_bytes: usize,
    /// Bytes that a full cache would have.
    kv_full_bytes: usize,
    /// Whether there is a file of it.
    saved: bool,
}

/// Compressed documents.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ContextList {
    /// `list`.
    object: &'static str,
    data: Vec<Context>,
}

/// A document that is gone.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Deleted {
    name: String,
    /// `true`.
    deleted: bool,
}

impl From<ContextInfo> for Context {
    fn from(info: ContextInfo) -> Self {
        Self {
            name: info.name,
            tokens: info.tokens,
            policy: info.policy,
            kv_tokens_kept: info.held.tokens,
            kv_bytes: info.held.bytes,
            kv_full_bytes: info.held.full_bytes,
            saved: info.is_saved,
        }
    }
}

/// Compresses a document under a name, which requests continue by `"kv": {"context": NAME}`.
#[utoipa::path(post, path = "/v1/kv/contexts", tag = "caches", request_body = NewContext,
    responses((status = 201, body = Context), (status = "4XX", body = ErrorBody),
        (status = "5XX", body = ErrorBody)))]
pub(crate) async fn create(
    State(app): State<Arc<App>>,
    Object { fields, room }: Object,
) -> Result<(StatusCode, Json<Context>)> {
    if app.is_draining() {
        return Err(ApiError::unavailable("the server is shutting down"));
    }
    let (own, begun) = (Arc::clone(&app), Instant::now());
    let prepare = move || {
        let _room = room;
        let new: NewContext = fields::parse(fields)?;
        let tokens = tokens_of(&own, (new.text, new.tokens))?;
        let (policies, kv) = (&own.settings.policies, new.kv.unwrap_or_default());
        let policy = policies.choose(&kv, tokens.len())?;
        policies.check_kept(&kv, &*policy, tokens.len())?;
        Ok((new.name, tokens, policy))
    };
    let (name, tokens, policy) = reading(&app, begun, prepare).await?;
    let left = app.settings.request_timeout.saturating_sub(begun.elapsed());
    let compress = move || Ok(app.engine.compress_within(&name, tokens, policy, left)?);
    let info = blocking(compress).await?;
    Ok((StatusCode::CREATED, Json(info.into())))
}

/// The documents that were compressed.
#[utoipa::path(get, path = "/v1/kv/contexts", tag = "caches",
    responses((status = 200, body = ContextList), (status = "4XX", body = ErrorBody)))]
pub(crate) async fn list(State(app): State<Arc<App>>) -> Result<Json<ContextList>> {
    let data = all(app).await?;
    Ok(Json(ContextList { object: "list", data }))
}

/// A document by its name.
#[utoipa::path(get, path = "/v1/kv/contexts/{name}", tag = "caches",
    params(("name" = String, Path)),
    responses((status = 200, body = Context), (status = "4XX", body = ErrorBody)))]
pub(crate) async fn one(State(app): State<Arc<App>>, Named(name): Named) -> Result<Json<Context>> {
    let found = all(app).await?.into_iter().find(|context| context.name == name);
    found.map(Json).ok_or_else(|| {
        ApiError::not_found("context_not_found", format!("no context `{name}`")).about("name")
    })
}

/// Drops a document, and its file. Requests that run on it go on.
#[utoipa::path(delete, path = "/v1/kv/contexts/{name}", tag = "caches",
    params(("name" = String, Path)),
    responses((status = 200, body = Deleted), (status = "4XX", body = ErrorBody)))]
pub(crate) async fn forget(
    State(app): State<Arc<App>>,
    Named(name): Named,
) -> Result<Json<Deleted>> {
    let gone = name.clone();
    blocking(move || Ok(app.engine.forget(&name)?)).await.map_err(|error| error.about("name"))?;
    Ok(Json(Deleted { name: gone, deleted: true }))
}

/// Saves a document to the operator's folder of contexts, from where the next server loads it.
#[utoipa::path(post, path = "/v1/kv/contexts/{name}/save", tag = "caches",
    params(("name" = String, Path)),
    responses((status = 200, body = Context), (status = "4XX", body = ErrorBody),
        (status = "5XX", body = ErrorBody)))]
pub(crate) async fn save(State(app): State<Arc<App>>, Named(name): Named) -> Result<Json<Context>> {
    let (own, saved) = (Arc::clone(&app), name.clone());
    let done = blocking(move || Ok(own.engine.save(&saved)?)).await;
    let path = done.map_err(|error| error.about("name"))?;
    tracing::info!("saved the context `{name}` to {}", path.display());
    one(State(app), Named(name)).await
}

async fn all(app: Arc<App>) -> Result<Vec<Context>> {
    let infos = blocking(move || Ok(app.engine.contexts()?)).await?;
    Ok(infos.into_iter().map(Context::from).collect())
}

/// The tokens of a document that is given as a text or as tokens.
fn tokens_of(app: &App, document: (Option<String>, Option<Vec<u32>>)) -> Result<Vec<u32>> {
    let tokens = match document {
        (Some(text), None) => app.encode("text", &text, true)?,
        (None, Some(tokens)) => tokens,
        _ => return Err(ApiError::invalid("text", "either `text` or `tokens` was expected")),
    };
    let (positions, vocabulary) = (app.positions(), app.engine.card().config.vocab_size);
    if tokens.is_empty() {
        return Err(ApiError::invalid("text", "the document is empty"));
    }
    if tokens.len() >= positions {
        let message =
            format!("the document has {} tokens, the model {positions} positions", tokens.len());
        return Err(ApiError::too_long("text", message));
    }
    if let Some(token) = tokens.iter().find(|&&token| token as usize >= vocabulary) {
        let message = format!("`{token}` is no token of the model's {vocabulary}");
        return Err(ApiError::invalid("tokens", message));
    }
    Ok(tokens)
}
