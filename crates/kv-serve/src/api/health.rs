//! `/health`, `/ready` and `/metrics`.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use utoipa::ToSchema;

use crate::app::App;
use crate::error::{ApiError, ErrorBody, Result};

/// A server's state.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Health {
    /// `ok`.
    status: &'static str,
    model: String,
    device: String,
}

/// How long the engine may be silent. A layer of a long prompt takes seconds on a slow machine.
const SILENCE: Duration = Duration::from_secs(120);

/// Whether the process lives: 503 where its engine has ended, or has been silent for two minutes.
#[utoipa::path(get, path = "/health", tag = "server",
    responses((status = 200, body = Health), (status = 503, body = ErrorBody)))]
pub(crate) async fn alive(State(app): State<Arc<App>>) -> Result<Json<Health>> {
    let engine = &app.engine;
    if !engine.is_open() && !app.is_draining() {
        return Err(ApiError::unavailable("the engine has ended: see the server's log"));
    }
    let silent = engine.since_turn();
    if silent > SILENCE {
        let message = format!("the engine has been silent for {} s", silent.as_secs());
        return Err(ApiError::unavailable(message));
    }
    Ok(Json(Health { status: "ok", model: app.name.clone(), device: engine.card().device.clone() }))
}

/// Whether requests are taken.
#[utoipa::path(get, path = "/ready", tag = "server",
    responses((status = 200, body = Health), (status = 503, body = ErrorBody)))]
pub(crate) async fn ready(state: State<Arc<App>>) -> Result<Json<Health>> {
    if state.is_draining() {
        return Err(ApiError::unavailable("the server is shutting down"));
    }
    alive(state).await
}

/// Metrics for Prometheus.
#[utoipa::path(get, path = "/metrics", tag = "server",
    responses((status = 200, body = String, content_type = "application/openmetrics-text")))]
pub(crate) async fn metrics(State(app): State<Arc<App>>) -> Result<Response> {
    let text = app.metrics.text().map_err(|error| ApiError::internal(error.to_string()))?;
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    Ok(([(header::CONTENT_TYPE, kind)], text).into_response())
}
