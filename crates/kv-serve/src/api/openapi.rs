//! `/openapi.json`.

use axum::Router;
use axum::http::header::CONTENT_TYPE;
use axum::routing::get;
use serde_json::{Map, Value, json};
use utoipa::OpenApi;
use utoipa::openapi::OpenApi as Finished;
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityScheme};

use crate::protocol::answer::ChatChunk;

/// Bodies that are documented in two parts.
const DIVIDED: [&str; 2] = ["ChatRequest", "CompletionRequest"];

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
    let mut document = json!(document);
    for name in DIVIDED {
        join(&mut document, name);
    }
    // axum's word for a parameter that may have slashes.
    let json = document.to_string().replace("{*", "{");
    let serve = move || {
        let json = json.clone();
        async move { ([(CONTENT_TYPE, "application/json")], json) }
    };
    Router::new().route("/openapi.json", get(serve))
}

/// Makes one object of a schema's parts: each refuses the other's fields, so that nothing would
/// match both.
fn join(document: &mut Value, name: &str) {
    let schemas = &document["components"]["schemas"];
    let parts = schemas[name]["allOf"].as_array().cloned().unwrap_or_default();
    let (mut properties, mut required) = (Map::new(), Vec::new());
    for part in &parts {
        let target = part["$ref"].as_str().and_then(|path| document.pointer(path.get(1..)?));
        let part = target.unwrap_or(part);
        properties.extend(part["properties"].as_object().cloned().unwrap_or_default());
        required.extend(part["required"].as_array().cloned().unwrap_or_default());
    }
    let schema = &mut document["components"]["schemas"][name];
    let description = schema["description"].clone();
    *schema = json!({
        "type": "object",
        "description": description,
        "properties": properties,
        "required": required,
        "additionalProperties": false,
    });
}
