//! Errors as OpenAI's clients read them.

use std::fmt;
use std::io::ErrorKind;
use std::time::Duration;

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::{Json, extract::rejection::BytesRejection};
use kv_core::Error as CacheError;
use kv_models::{JobError, ModelError};
use serde::Serialize;
use utoipa::ToSchema;

/// The most bytes of an error's message. Messages quote a client's fields, which may be as long as a
/// body.
const MOST_MESSAGE: usize = 4 << 10;
/// The most bytes of an error's `param`.
const MOST_PARAM: usize = 256;

/// How a system says that a file cannot grow.
const DISK_FULL: [ErrorKind; 3] =
    [ErrorKind::StorageFull, ErrorKind::QuotaExceeded, ErrorKind::FileTooLarge];

/// Result of what answers requests.
pub(crate) type Result<T, E = ApiError> = std::result::Result<T, E>;

/// An answer that is an error.
#[derive(Debug, Clone)]
pub struct ApiError {
    status: StatusCode,
    kind: &'static str,
    code: Option<&'static str>,
    param: Option<String>,
    message: String,
    /// Seconds after which the client may try again.
    retry_after: Option<u32>,
    /// Whether another try would take as long and fail, too.
    is_final: bool,
}

/// The body of an error.
#[derive(Debug, Serialize, ToSchema)]
pub struct ErrorBody {
    /// What is wrong.
    pub error: ErrorObject,
}

/// What is wrong with a request.
#[derive(Debug, Serialize, ToSchema)]
pub struct ErrorObject {
    /// In words.
    pub message: String,
    /// The kind of error, such as `invalid_request_error`.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// The field of the request.
    pub param: Option<String>,
    /// A word for programs.
    pub code: Option<&'static str>,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        let message = shortened(message.into(), MOST_MESSAGE);
        Self { status, kind, code: None, param: None, message, retry_after: None, is_final: false }
    }

    /// A field that is wrong.
    pub(crate) fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::bad_request(message).about(param).code("invalid_value")
    }

    /// A field that this server does not honour.
    pub(crate) fn unsupported(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::bad_request(message).about(param).code("unsupported_parameter")
    }

    /// A request that is wrong as a whole.
    pub(crate) fn bad_request(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", message)
    }

    /// A prompt, or a prompt with its new tokens, that does not fit into the model's positions.
    pub(crate) fn too_long(param: &str, message: impl Into<String>) -> Self {
        Self::bad_request(message).about(param).code("context_length_exceeded")
    }

    /// Something that does not exist.
    pub(crate) fn not_found(code: &'static str, message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, "invalid_request_error", message).code(code)
    }

    /// A path that takes another method.
    pub(crate) fn method_not_allowed(message: impl Into<String>) -> Self {
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "invalid_request_error", message)
            .code("method_not_allowed")
    }

    /// A key that is missing or wrong.
    pub(crate) fn unauthorized(message: impl Into<String>) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, "authentication_error", message).code("invalid_api_key")
    }

    /// A body that is not JSON by its header.
    pub(crate) fn not_json() -> Self {
        let message = "the body must be JSON: send `content-type: application/json`";
        Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "invalid_request_error", message)
            .code("unsupported_media_type")
    }

    /// A request that took longer than the operator allows.
    pub(crate) fn too_slow(patience: Duration) -> Self {
        let patience = humantime::format_duration(patience);
        let error = Self::timeout(format!("the request took longer than {patience}"));
        Self { is_final: true, ..error }
    }

    /// A request that took longer than the operator allows, or a body that came too slowly.
    pub(crate) fn timeout(message: impl Into<String>) -> Self {
        Self::new(StatusCode::REQUEST_TIMEOUT, "timeout_error", message).code("timeout")
    }

    /// A server that takes no requests now.
    pub(crate) fn unavailable(message: impl Into<String>) -> Self {
        let error = Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", message);
        Self { retry_after: Some(5), ..error.code("unavailable") }
    }

    /// Something that the server's disk has no room for.
    fn disk_full(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INSUFFICIENT_STORAGE, "server_error", message).code("disk_full")
    }

    /// A fault of the server.
    pub(crate) fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message).code("internal_error")
    }

    /// The field that the error is about.
    pub(crate) fn about(self, param: impl Into<String>) -> Self {
        Self { param: Some(shortened(param.into(), MOST_PARAM)), ..self }
    }

    fn code(self, code: &'static str) -> Self {
        Self { code: Some(code), ..self }
    }

    fn status(self, status: StatusCode) -> Self {
        Self { status, ..self }
    }

    /// Whether the server is at fault, and not the request.
    pub(crate) fn is_fault(&self) -> bool {
        self.status.is_server_error()
    }

    /// The HTTP status.
    pub fn status_code(&self) -> StatusCode {
        self.status
    }

    /// The error in words, which name the field that is wrong.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// A body of more than `max_body` bytes.
    pub(crate) fn too_many_bytes(max_body: usize) -> Self {
        let message = format!(
            "the body is larger than the {max_body} bytes that the server takes (`--max-body`)"
        );
        Self::bad_request(message).status(StatusCode::PAYLOAD_TOO_LARGE).code("request_too_large")
    }

    /// A body that could not be read, of at most `max_body` bytes.
    pub(crate) fn unread(rejection: &BytesRejection, max_body: usize) -> Self {
        match rejection.status() {
            StatusCode::PAYLOAD_TOO_LARGE => Self::too_many_bytes(max_body),
            _ => Self::bad_request(format!("the body could not be read: {rejection}")),
        }
    }

    /// The error's body.
    pub(crate) fn body(&self) -> ErrorBody {
        ErrorBody {
            error: ErrorObject {
                message: self.message.clone(),
                kind: self.kind,
                param: self.param.clone(),
                code: self.code,
            },
        }
    }
}

/// A text of at most `most` bytes, and how many bytes it had.
fn shortened(mut text: String, most: usize) -> String {
    let bytes = text.len();
    if bytes > most {
        text.truncate(text.floor_char_boundary(most));
        text.push_str(&format!(" … ({bytes} bytes)"));
    }
    text
}

impl fmt::Display for ApiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for ApiError {}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        if self.status.is_server_error() && self.status != StatusCode::SERVICE_UNAVAILABLE {
            tracing::error!("{self}");
        }
        let mut response = (self.status, Json(self.body())).into_response();
        let headers = response.headers_mut();
        if self.is_final {
            // OpenAI's clients try again behind a 408, unless they are told not to.
            headers.insert("x-should-retry", HeaderValue::from_static("false"));
        }
        if let Some(seconds) = self.retry_after {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

impl From<JobError> for ApiError {
    fn from(error: JobError) -> Self {
        let message = error.to_string();
        match error {
            JobError::QueueFull { .. } => {
                let error = Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message);
                Self { retry_after: Some(1), ..error.code("queue_full") }
            }
            JobError::TooLarge { .. } | JobError::ContextTooLarge { .. } => {
                let message = format!(
                    "{message}, or let the operator give groups more (`--cache-bytes`, or fewer \
                     `--groups`)"
                );
                Self::bad_request(message).code("cache_too_small")
            }
            JobError::ContextsFull { .. } => Self::bad_request(message).code("cache_too_small"),
            JobError::OtherRank { .. } => Self::internal(message),
            JobError::TooSlow { .. } => Self::timeout(message),
            JobError::UnknownContext { .. } => {
                Self::not_found("context_not_found", message).about("kv.context")
            }
            JobError::ContextExists { .. } => Self::bad_request(message)
                .status(StatusCode::CONFLICT)
                .about("name")
                .code("context_exists"),
            JobError::ForeignFile { .. } => Self::bad_request(message)
                .status(StatusCode::CONFLICT)
                .about("name")
                .code("context_file_exists"),
            JobError::ContextName { .. } => Self::invalid("name", message),
            JobError::ContextPolicy { .. } => Self::invalid("kv.policy", message),
            JobError::NoContextFolder => Self::unsupported("name", message),
            JobError::Model(error) => error.into(),
            JobError::Shaper { .. } => Self::bad_request(message).code("grammar_failed"),
            JobError::ShuttingDown | JobError::Stopped { .. } => Self::unavailable(message),
            _ => Self::internal(message),
        }
    }
}

impl From<ModelError> for ApiError {
    fn from(error: ModelError) -> Self {
        let message = error.to_string();
        match error {
            ModelError::PromptTooLong { .. } | ModelError::BeyondSlidingWindow { .. } => {
                Self::bad_request(message).code("context_length_exceeded")
            }
            ModelError::InvalidSampling { parameter, .. } => Self::invalid(parameter, message),
            ModelError::EmptyPrompt | ModelError::TokenOutOfRange { .. } => {
                Self::bad_request(message).code("invalid_prompt")
            }
            ModelError::ChatTemplate { .. } | ModelError::MissingChatTemplate { .. } => {
                Self::invalid("messages", message)
            }
            ModelError::Cache(CacheError::Io { source, .. })
                if DISK_FULL.contains(&source.kind()) =>
            {
                tracing::error!("{message}");
                Self::disk_full("the server's disk is full: its operator must free some of it")
            }
            ModelError::Cache(CacheError::Io { .. }) => Self::internal(message),
            // What a request's policy cannot do with its prompt, or with this model.
            ModelError::ComparesHeads { .. }
            | ModelError::Policy(_)
            | ModelError::Cache(_)
            | ModelError::InvalidFrozen { .. }
            | ModelError::FrozenQueries { .. }
            | ModelError::LengthDependentRope { .. } => Self::invalid("kv", message),
            _ => Self::internal(message),
        }
    }
}
