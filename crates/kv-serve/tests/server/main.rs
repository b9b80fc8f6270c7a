//! Tests of the server, with the embedded model on the CPU.

#![allow(clippy::unwrap_used)]

mod abuse;
mod caches;
mod chat;
mod completions;
mod connections;
mod errors;
mod grammars;
mod operator;
mod page;
mod program;
#[cfg(unix)]
mod ranks;
mod support;
