//! The routes.

mod auth;
mod chat;
mod completions;
mod contexts;
mod generate;
mod health;
mod models;
mod observe;
mod openapi;
mod requests;

use std::any::Any;
use std::sync::Arc;
use std::time::Instant;

use axum::extract::{DefaultBodyLimit, FromRequestParts, Path};
use axum::http::request::Parts;
use axum::http::{HeaderValue, Method, Uri, header};
use axum::response::{IntoResponse, Response};
use axum::{Router, middleware};
use kv_models::Engine;
use prometheus_client::metrics::gauge::Gauge;
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::cors::{AllowHeaders, AllowOrigin, Any as AnyOrigin, CorsLayer};
use utoipa::OpenApi;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::app::{App, Settings};
use crate::error::ApiError;
use crate::generation::{JOBS, REQUEST_ID};
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
///     body_bytes: 1 << 28,
///     max_connections: 1024,
///     request_timeout: Duration::from_secs(60),
///     client_timeout: Duration::from_secs(30),
///     drain_timeout: Duration::from_secs(5),
/// };
/// // `axum::serve` serves it, with other routes beside it or without. The limits of connections
/// // are `kv_serve::serve`'s.
/// let app = router(engine, settings);
/// # let _ = app;
/// # Ok(())
/// # }
/// ```
pub fn router(engine: Engine, settings: Settings) -> Router {
    routes_of(Arc::new(App::new(engine, settings, Gauge::default())))
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
        // Clients send headers of their own, such as OpenAI's `x-stainless-lang`.
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers([JOBS, REQUEST_ID, header::RETRY_AFTER]);
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

/// The parameter of a path.
pub(crate) struct Named(pub(crate) String);

impl FromRequestParts<Arc<App>> for Named {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, app: &Arc<App>) -> Result<Self, ApiError> {
        let named = Path::<String>::from_request_parts(parts, app).await;
        named.map(|Path(name)| Self(name)).map_err(|error| ApiError::bad_request(error.body_text()))
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

/// Reads a request that began at `begun`, beside the threads that serve connections. As many are
/// read at once as there are cores: a long prompt's tokens take seconds.
///
/// # Errors
/// The error of `work`, and the request's timeout.
pub(crate) async fn reading<T: Send + 'static>(
    app: &App,
    begun: Instant,
    work: impl FnOnce() -> crate::error::Result<T> + Send + 'static,
) -> crate::error::Result<T> {
    let patience = app.settings.request_timeout;
    let readers = Arc::clone(&app.readers);
    let reading = async {
        let place = readers.acquire_owned().await;
        let work = move || {
            // Kept to the end of the work, which goes on where nobody waits for it any more.
            let _place = place;
            work()
        };
        blocking(work).await
    };
    let read = tokio::time::timeout_at((begun + patience).into(), reading).await;
    read.map_err(|_| ApiError::too_slow(patience))?
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread::{available_parallelism, sleep};
    use std::time::Duration;

    use kv_core::{Budget, select_device};
    use kv_models::{EngineOptions, Model};

    use super::*;
    use crate::policies::Policies;

    fn app(request_timeout: Duration) -> App {
        let load = || Model::load("needle-1m", &select_device("cpu".parse()?)?, None);
        let settings = Settings {
            name: None,
            chat_template: None,
            policies: Policies::new("snapkv", Budget::Ratio(0.5), &[]).unwrap(),
            api_keys: Vec::new(),
            cors: Vec::new(),
            max_tokens: 16,
            max_choices: 1,
            max_body: 1 << 20,
            body_bytes: 1 << 28,
            max_connections: 16,
            request_timeout,
            client_timeout: Duration::from_secs(5),
            drain_timeout: Duration::from_secs(5),
        };
        let engine = Engine::start(load, EngineOptions::default()).unwrap();
        App::new(engine, settings, Gauge::default())
    }

    #[tokio::test]
    async fn as_many_requests_are_read_at_once_as_there_are_cores() {
        let app = Arc::new(app(Duration::from_secs(30)));
        let (now, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let cores = available_parallelism().map_or(1, usize::from);
        let reads: Vec<_> = (0..4 * cores)
            .map(|_| {
                let (app, now, most) = (Arc::clone(&app), Arc::clone(&now), Arc::clone(&most));
                tokio::spawn(async move {
                    let work = move || {
                        most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                        sleep(Duration::from_millis(30));
                        now.fetch_sub(1, Ordering::SeqCst);
                        Ok(())
                    };
                    reading(&app, Instant::now(), work).await.unwrap();
                })
            })
            .collect();
        for read in reads {
            read.await.unwrap();
        }
        assert_eq!(most.load(Ordering::SeqCst), cores);
    }

    #[tokio::test]
    async fn reading_ends_at_the_deadline() {
        let app = app(Duration::from_millis(20));
        let work = || {
            sleep(Duration::from_millis(300));
            Ok(())
        };
        let error = reading(&app, Instant::now(), work).await.unwrap_err();
        assert_eq!(error.body().error.code, Some("timeout"));
    }
}
