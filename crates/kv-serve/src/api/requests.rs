//! `/v1/kv/requests`: the caches of requests, as they are now.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use kv_models::JobId;
use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;

use super::{Named, blocking};
use crate::app::App;
use crate::error::{ApiError, ErrorBody, Result};

/// What the server is doing.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Live {
    /// Requests in the queue.
    waiting: usize,
    /// Requests that prefill.
    prefilling: usize,
    /// Requests that decode.
    running: usize,
    /// The most of them.
    rows: usize,
    /// Bytes that caches hold.
    kv_bytes: usize,
    /// Bytes that they may hold: all groups, contexts and prefixes.
    kv_bytes_limit: usize,
    /// The share of the fullest group that is taken, of its bytes or of its rows. Requests of its
    /// kind wait once it is 1.
    fullest: f64,
    /// The requests that decode.
    requests: Vec<LiveRequest>,
}

/// A request that decodes.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct LiveRequest {
    /// The job's number in the engine.
    job: u64,
    /// The request's name in its answer.
    id: Option<String>,
    /// The policy's configuration.
    #[schema(value_type = Object)]
    policy: Value,
    prompt_tokens: usize,
    new_tokens: usize,
    /// Tokens that a head holds, the mean over layers and heads.
    kv_tokens_kept: f64,
    /// Bytes of the cache, with what the policy remembers beside slots.
    kv_bytes: usize,
    /// Bytes of keys and values that the policy keeps in host memory.
    kv_host_bytes: usize,
    /// Bytes of these and of the room for tokens to come.
    kv_reserved_bytes: usize,
    /// Bytes that a full cache would have.
    kv_full_bytes: usize,
    /// New tokens a second since the first one.
    tokens_per_second: f64,
}

/// A request's cache by layer and head.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Picture {
    job: u64,
    /// Tokens so far.
    tokens: usize,
    /// Tokens that each head holds, layer by layer.
    kept: Vec<Vec<usize>>,
    /// Whether the request decodes. One that has ended held these tokens in the end.
    running: bool,
}

/// The requests that run now.
#[utoipa::path(get, path = "/v1/kv/requests", tag = "caches",
    responses((status = 200, body = Live), (status = "4XX", body = ErrorBody)))]
pub(crate) async fn list(State(app): State<Arc<App>>) -> Json<Live> {
    let load = app.engine.load();
    let names = app.requests();
    let requests = load.jobs.into_iter().map(|job| LiveRequest {
        job: job.id.0,
        id: names.get(&job.id).cloned(),
        policy: job.policy,
        prompt_tokens: job.prompt_tokens,
        new_tokens: job.new_tokens,
        kv_tokens_kept: job.held.tokens,
        kv_bytes: job.held.live_bytes,
        kv_host_bytes: job.held.host_bytes,
        kv_reserved_bytes: job.held.bytes,
        kv_full_bytes: job.held.full_bytes,
        tokens_per_second: match job.decoding.as_secs_f64() {
            0.0 => 0.0,
            seconds => job.new_tokens as f64 / seconds,
        },
    });
    Json(Live {
        waiting: load.waiting,
        prefilling: load.prefilling,
        running: load.running,
        rows: app.engine.options().all_rows(),
        kv_bytes: load.bytes,
        kv_bytes_limit: load.most_bytes,
        fullest: load.fullest,
        requests: requests.collect(),
    })
}

/// What each head of a request holds, or held in the end for the 32 requests that ended last.
#[utoipa::path(get, path = "/v1/kv/requests/{job}", tag = "caches",
    params(("job" = u64, Path, description = "The job's number")),
    responses((status = 200, body = Picture), (status = "4XX", body = ErrorBody)))]
pub(crate) async fn one(State(app): State<Arc<App>>, Named(job): Named) -> Result<Json<Picture>> {
    let unknown = || {
        let message = format!("no request `{job}` is running or has ended lately");
        ApiError::not_found("request_not_found", message).about("job")
    };
    let number: u64 = job.parse().map_err(|_| unknown())?;
    let own = Arc::clone(&app);
    let picture = blocking(move || Ok(own.engine.picture(JobId(number))?)).await?;
    let kv_models::Picture { tokens, kept, is_running } = picture.ok_or_else(unknown)?;
    Ok(Json(Picture { job: number, tokens, kept, running: is_running }))
}
