//! `/health`, `/ready` and `/metrics`.

use std::sync::Arc;

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

/// Whether the process lives.
#[utoipa::path(get, path = "/health", tag = "server",
    responses((status = 200, body = Health)))]
pub(crate) async fn alive(State(app): State<Arc<App>>) -> Json<Health> {
    Json(Health { status: "ok", model: app.name.clone(), device: app.engine.card().device.clone() })
}

/// Whether requests are taken.
#[utoipa::path(get, path = "/ready", tag = "server",
    responses((status = 200, body = Health), (status = 503, body = ErrorBody)))]
pub(crate) async fn ready(state: State<Arc<App>>) -> Result<Json<Health>> {
    if state.is_draining() {
        return Err(ApiError::unavailable("the server is shutting down"));
    }
    Ok(alive(state).await)
}

/// Metrics for Prometheus.
#[utoipa::path(get, path = "/metrics", tag = "server",
    responses((status = 200, body = String, content_type = "application/openmetrics-text")))]
pub(crate) async fn metrics(State(app): State<Arc<App>>) -> Result<Response> {
    let text = app.metrics.text().map_err(|error| ApiError::internal(error.to_string()))?;
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    Ok(([(header::CONTENT_TYPE, kind)], text).into_response())
}
