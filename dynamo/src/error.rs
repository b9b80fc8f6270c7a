//! Errors, and what Dynamo makes of them.

use std::path::PathBuf;

use dynamo_backend_common::{BackendError, DynamoError, ErrorType};
use kv_models::{JobError, ModelError};
use kv_serve::ApiError;

/// Why a worker cannot start.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SetupError {
    /// One of Dynamo's options.
    #[error("`--{option}` is not supported by this worker")]
    Option {
        /// Its name.
        option: &'static str,
    },
    /// A model whose prompts the front end could not divide into tokens.
    #[error("the model has no tokenizer, which Dynamo's front end needs: give `--tokenizer FILE`")]
    NoTokenizer,
    /// A chat template that does not parse.
    #[error("the chat template: {reason}")]
    ChatTemplate {
        /// Why.
        reason: String,
    },
    /// A file for the front end.
    #[error("cannot write {path}: {source}")]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The model.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The engine, a policy or a number of bytes.
    #[error("{0:#}")]
    Other(anyhow::Error),
}

impl From<SetupError> for DynamoError {
    fn from(error: SetupError) -> Self {
        typed(ErrorType::Backend(BackendError::InvalidArgument), error.to_string())
    }
}

/// Why a request is refused.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum RequestError {
    /// A field that the worker does not honour.
    #[error("`{field}` is not supported by this worker")]
    Unsupported {
        /// Its name.
        field: &'static str,
    },
    /// A field with a wrong value.
    #[error("`{field}`: {reason}")]
    Invalid {
        /// Its name.
        field: &'static str,
        /// What is wrong.
        reason: String,
    },
}

impl From<RequestError> for DynamoError {
    fn from(error: RequestError) -> Self {
        invalid(&error.to_string())
    }
}

/// A request that is wrong. The message names a field and its limits, so that clients may read it.
pub(crate) fn invalid(message: &str) -> DynamoError {
    DynamoError::builder()
        .error_type(ErrorType::Backend(BackendError::InvalidArgument))
        .message(message)
        .public_message(message)
        .build()
}

/// A worker that takes no requests any more. The front end may ask another one.
pub(crate) fn shut_down(message: impl Into<String>) -> DynamoError {
    typed(ErrorType::Backend(BackendError::EngineShutdown), message)
}

/// A request that took longer than the operator allows. Another worker would not be faster.
pub(crate) fn too_slow(message: impl Into<String>) -> DynamoError {
    typed(ErrorType::DeadlineExceeded, message)
}

/// A fault of the worker.
pub(crate) fn internal(message: impl Into<String>) -> DynamoError {
    typed(ErrorType::Backend(BackendError::Unknown), message)
}

/// What the fields of a request were refused for.
pub(crate) fn of_fields(error: &ApiError) -> DynamoError {
    match error.status_code().is_client_error() {
        true => invalid(error.message()),
        false => internal(error.message()),
    }
}

/// What a job was refused for, or failed with.
pub(crate) fn of_job(error: JobError) -> DynamoError {
    let message = error.to_string();
    match error {
        JobError::QueueFull { .. } => typed(ErrorType::WorkerOverloaded, message),
        JobError::ShuttingDown | JobError::Stopped { .. } => shut_down(message),
        JobError::TooSlow { .. } => too_slow(message),
        error => of_fields(&ApiError::from(error)),
    }
}

fn typed(kind: ErrorType, message: impl Into<String>) -> DynamoError {
    DynamoError::builder().error_type(kind).message(message).build()
}
