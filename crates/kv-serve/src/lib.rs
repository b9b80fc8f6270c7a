#![doc = include_str!("../README.md")]

mod api;
mod app;
mod args;
mod connections;
mod error;
mod generation;
mod jobs;
mod metrics;
mod page;
mod policies;
mod protocol;
mod run;
mod server;
mod shapers;
mod sse;
mod tokens;

pub use api::router;
pub use app::Settings;
pub use args::{Args, EngineArgs, Float, ModelArgs, PolicyArgs};
pub use error::{ApiError, ErrorBody, ErrorObject};
pub use jobs::Jobs;
pub use policies::Policies;
pub use run::{engine, follow, run, settings};
pub use server::{end_signal, listen, serve};
