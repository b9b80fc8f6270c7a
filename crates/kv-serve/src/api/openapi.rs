//! `/openapi.json`.

use axum::Router;
use axum::http::header::CONTENT_TYPE;
use axum::routing::get;
use utoipa::OpenApi;
use utoipa::openapi::OpenApi as Finished;
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityScheme};

use crate::protocol::answer::ChatChunk;

/// The document's head; the routes add themselves.
#[derive(OpenApi)]
#[openapi(
    info(
        title = "kv-serve",
        description = "OpenAI's API over compressed KV caches, and routes that show the caches."
    ),
    components(schemas(ChatChunk)),
    security(("key" = []), ())
)]
pub(crate) struct Document;

/// Adds what the derive has no word for.
pub(crate) fn finished(mut document: Finished) -> Finished {
    let scheme = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).build();
    let components = document.components.get_or_insert_default();
    components.add_security_scheme("key", SecurityScheme::Http(scheme));
    document
}

/// The route of the document, which does not change.
pub(crate) fn route<S: Clone + Send + Sync + 'static>(document: &Finished) -> Router<S> {
    let json = document.to_json().unwrap_or_default();
    let serve = move || {
        let json = json.clone();
        async move { ([(CONTENT_TYPE, "application/json")], json) }
    };
    Router::new().route("/openapi.json", get(serve))
}
