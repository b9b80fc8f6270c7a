//! The page at `/`: static files, embedded.

use axum::Router;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;

/// Nothing but the server's own files, and no frames around them.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
                      img-src 'self' data:; base-uri 'none'; form-action 'none'; \
                      frame-ancestors 'none'";

/// Paths, types and contents.
const FILES: [(&str, &str, &str); 5] = [
    ("/", HTML, include_str!("../assets/page/index.html")),
    ("/page/style.css", "text/css; charset=utf-8", include_str!("../assets/page/style.css")),
    ("/page/chat.js", SCRIPT, include_str!("../assets/page/chat.js")),
    ("/page/api.js", SCRIPT, include_str!("../assets/page/api.js")),
    ("/page/caches.js", SCRIPT, include_str!("../assets/page/caches.js")),
];
const HTML: &str = "text/html; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";

/// Stands at `/` until the model is loaded. It asks for `/` again every other second.
const LOADING: &str = include_str!("../assets/page/loading.html");

/// The page's routes.
pub(crate) fn routes<S: Clone + Send + Sync + 'static>() -> Router<S> {
    FILES.into_iter().fold(Router::new(), |router, (path, kind, content)| {
        router.route(path, get(move || async move { file(kind, content) }))
    })
}

/// The page of a server whose model is being loaded.
pub(crate) fn loading() -> Response {
    (StatusCode::SERVICE_UNAVAILABLE, file(HTML, LOADING)).into_response()
}

fn file(kind: &'static str, content: &'static str) -> Response {
    let headers = [
        (header::CONTENT_TYPE, kind),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        // Another version of the server has another page.
        (header::CACHE_CONTROL, "no-cache"),
    ];
    (headers, content).into_response()
}
