//! API keys.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::header::AUTHORIZATION;
use axum::middleware::Next;
use axum::response::Response;
use subtle::ConstantTimeEq;

use crate::app::App;
use crate::error::{ApiError, Result};

/// Lets requests with one of the keys through, and all of them where there is none.
///
/// # Errors
/// A key that is missing or wrong.
pub(crate) async fn check(
    State(app): State<Arc<App>>,
    request: Request,
    next: Next,
) -> Result<Response> {
    let keys = &app.settings.api_keys;
    if !keys.is_empty() {
        let header = request.headers().get(AUTHORIZATION).and_then(|value| value.to_str().ok());
        let key = header
            .and_then(|value| value.split_once(' '))
            .and_then(|(scheme, key)| scheme.eq_ignore_ascii_case("bearer").then(|| key.trim()));
        let key = key.ok_or_else(|| {
            ApiError::unauthorized("an API key was expected: `Authorization: Bearer KEY`")
        })?;
        // All keys are compared, each in constant time, so that times tell nothing of them.
        let equal = |known: &String| known.as_bytes().ct_eq(key.as_bytes());
        let known = keys.iter().map(equal).fold(subtle::Choice::from(0), |any, own| any | own);
        if !bool::from(known) {
            return Err(ApiError::unauthorized("the API key is wrong"));
        }
    }
    Ok(next.run(request).await)
}
