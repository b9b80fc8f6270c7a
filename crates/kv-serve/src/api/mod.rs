//! The routes.

mod auth;
mod chat;
mod completions;
mod contexts;
mod health;
mod models;
mod observe;
mod openapi;
mod requests;

use std::any::Any;
use std::sync::Arc;

use axum::extract::DefaultBodyLimit;
use axum::http::{HeaderValue, Method, Uri, header};
use axum::response::{IntoResponse, Response};
use axum::{Router, middleware};
use kv_models::Engine;
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::cors::{AllowOrigin, Any as AnyOrigin, CorsLayer};
use utoipa::OpenApi;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::app::{App, Settings};
use crate::error::ApiError;
use crate::page;

/// The routes of a server.
///
/// ```
/// use std::time::Duration;
///
/// use kv_core::Budget;
/// use kv_models::{Engine, EngineOptions, Model};
/// use kv_serve::{Policies, Settings, router};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let load = || Model::load("needle-1m", &kv_core::select_device("cpu".parse()?)?, None);
/// let engine = Engine::start(load, EngineOptions::default())?;
/// let settings = Settings {
///     name: None,
///     chat_template: None,
///     policies: Policies::new("snapkv", Budget::Ratio(0.25), &[])?,
///     api_keys: Vec::new(),
///     cors: Vec::new(),
///     max_tokens: 512,
///     max_choices: 4,
///     max_body: 1 << 20,
///     request_timeout: Duration::from_secs(60),
///     drain_timeout: Duration::from_secs(5),
/// };
/// // `axum::serve` serves it, with other routes beside it or without.
/// let app = router(engine, settings);
/// # let _ = app;
/// # Ok(())
/// # }
/// ```
pub fn router(engine: Engine, settings: Settings) -> Router {
    routes_of(Arc::new(App::new(engine, settings)))
}

/// The routes of an app that others hold too.
pub(crate) fn routes_of(app: Arc<App>) -> Router {
    let (guarded, document) = OpenApiRouter::with_openapi(openapi::Document::openapi())
        .routes(routes!(models::list))
        .routes(routes!(models::one))
        .routes(routes!(chat::create))
        .routes(routes!(completions::create))
        .routes(routes!(contexts::create, contexts::list))
        .routes(routes!(contexts::one, contexts::forget))
        .routes(routes!(contexts::save))
        .routes(routes!(requests::list))
        .routes(routes!(requests::one))
        .routes(routes!(models::policies))
        .split_for_parts();
    let (open, more) = OpenApiRouter::new()
        .routes(routes!(health::alive))
        .routes(routes!(health::ready))
        .routes(routes!(health::metrics))
        .split_for_parts();
    let document = openapi::finished(document.merge_from(more));
    let guarded = guarded
        .layer(middleware::from_fn_with_state(Arc::clone(&app), auth::check))
        .layer(DefaultBodyLimit::max(app.settings.max_body));
    let router = Router::new()
        .merge(guarded)
        .merge(open)
        .merge(page::routes())
        .merge(openapi::route(&document))
        .method_not_allowed_fallback(wrong_method)
        .fallback(no_route)
        .layer(CatchPanicLayer::custom(panicked))
        .layer(middleware::from_fn_with_state(Arc::clone(&app), observe::observe));
    let router = match cors(&app.settings.cors) {
        Some(cors) => router.layer(cors),
        None => router,
    };
    router.with_state(app)
}

/// Lets pages of some origins call the API; no others may read its answers.
fn cors(origins: &[String]) -> Option<CorsLayer> {
    let layer = CorsLayer::new()
        .allow_methods([Method::GET, Method::POST, Method::DELETE])
        .allow_headers([header::AUTHORIZATION, header::CONTENT_TYPE])
        .expose_headers([crate::sse::JOBS]);
    match origins {
        [] => None,
        origins if origins.iter().any(|origin| origin == "*") => {
            Some(layer.allow_origin(AnyOrigin))
        }
        origins => {
            let origins = origins.iter().filter_map(|origin| HeaderValue::from_str(origin).ok());
            Some(layer.allow_origin(AllowOrigin::list(origins)))
        }
    }
}

async fn no_route(uri: Uri) -> ApiError {
    let message = format!("there is no `{}`; /openapi.json lists what there is", uri.path());
    ApiError::not_found("unknown_url", message)
}

async fn wrong_method(method: Method, uri: Uri) -> ApiError {
    ApiError::method_not_allowed(format!("`{}` takes no {method}", uri.path()))
}

/// A fault of a handler ends its request alone.
fn panicked(reason: Box<dyn Any + Send>) -> Response {
    let text = reason.downcast_ref::<String>().cloned();
    let text = text.or_else(|| reason.downcast_ref::<&str>().map(ToString::to_string));
    tracing::error!("a handler panicked: {}", text.unwrap_or_default());
    ApiError::internal("the server failed at this request; its log says why").into_response()
}

/// Runs what blocks or takes long beside the threads that serve connections.
///
/// # Errors
/// The error of `work`, and its panic as an internal one.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> crate::error::Result<T> + Send + 'static,
) -> crate::error::Result<T> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|error| {
        tracing::error!("a task panicked: {error}");
        Err(ApiError::internal("the server failed at this request; its log says why"))
    })
}
