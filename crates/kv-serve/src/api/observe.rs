//! The log and the count of answers.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::{MatchedPath, Request, State};
use axum::http::StatusCode;
use axum::middleware::Next;
use axum::response::Response;

use crate::app::App;

/// Logs and counts an answer.
pub(crate) async fn observe(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let begun = Instant::now();
    let method = request.method().clone();
    // The pattern of the route, since paths of requests are without number.
    let route = request.extensions().get::<MatchedPath>();
    let route = route.map_or("other", MatchedPath::as_str).to_string();
    let response = next.run(request).await;
    let status = response.status();
    app.metrics.answered(&route, status.as_u16());
    let seconds = begun.elapsed().as_secs_f32();
    // An operator may have to give requests more time.
    if status.is_server_error() || status == StatusCode::REQUEST_TIMEOUT {
        tracing::warn!("{method} {route} {status} in {seconds:.3} s");
    } else {
        tracing::debug!("{method} {route} {status} in {seconds:.3} s");
    }
    response
}
