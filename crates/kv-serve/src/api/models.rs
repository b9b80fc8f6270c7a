//! `/v1/models` and `/v1/kv/policies`.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;

use super::Named;
use crate::app::App;
use crate::error::{ApiError, ErrorBody, Result};

/// A model.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ModelInfo {
    id: String,
    /// `model`.
    object: &'static str,
    /// When the server started, in seconds of Unix time.
    created: u64,
    owned_by: &'static str,
    /// Positions of the model.
    max_model_len: usize,
    /// The most new tokens of a request, behind a prompt of one token.
    max_tokens: usize,
}

/// Models.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ModelList {
    /// `list`.
    object: &'static str,
    data: Vec<ModelInfo>,
}

/// Policies that requests may name.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct PolicyList {
    /// The configuration of requests that name none.
    #[schema(value_type = Object)]
    default: Value,
    /// Where its budget is a share, and decode steps of the policy only append: the least tokens
    /// that the budget leaves of a prompt.
    least_budget: usize,
    policies: Vec<PolicyInfo>,
}

/// A policy.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct PolicyInfo {
    name: String,
    /// What it does, in a line.
    summary: &'static str,
    /// Options without which it cannot be chosen.
    required: &'static [&'static str],
}

fn info(app: &App) -> ModelInfo {
    ModelInfo {
        id: app.name.clone(),
        object: "model",
        created: app.started,
        owned_by: "burn-kv",
        max_model_len: app.positions(),
        max_tokens: app.settings.max_tokens.min(app.positions().saturating_sub(1)),
    }
}

/// The models: one.
#[utoipa::path(get, path = "/v1/models", tag = "OpenAI",
    responses((status = 200, body = ModelList), (status = "4XX", body = ErrorBody)))]
pub(crate) async fn list(State(app): State<Arc<App>>) -> Json<ModelList> {
    Json(ModelList { object: "list", data: vec![info(&app)] })
}

/// A model by its name, which may have slashes.
#[utoipa::path(get, path = "/v1/models/{*id}", tag = "OpenAI", params(("id" = String, Path)),
    responses((status = 200, body = ModelInfo), (status = "4XX", body = ErrorBody)))]
pub(crate) async fn one(State(app): State<Arc<App>>, Named(id): Named) -> Result<Json<ModelInfo>> {
    if id != app.name {
        let message = format!("the model `{id}` is not here; there is `{}`", app.name);
        return Err(ApiError::not_found("model_not_found", message).about("model"));
    }
    Ok(Json(info(&app)))
}

/// The policies that requests may name.
#[utoipa::path(get, path = "/v1/kv/policies", tag = "caches",
    responses((status = 200, body = PolicyList), (status = "4XX", body = ErrorBody)))]
pub(crate) async fn policies(State(app): State<Arc<App>>) -> Json<PolicyList> {
    let own = &app.settings.policies;
    let known = own.allowed().iter().filter_map(|name| kv_policies::entry(name));
    let policies = known.map(|entry| PolicyInfo {
        name: entry.name.into(),
        summary: entry.summary,
        required: entry.required,
    });
    let policies = policies.collect();
    let (default, least_budget) = (own.default_config(), own.least());
    Json(PolicyList { default, least_budget, policies })
}
