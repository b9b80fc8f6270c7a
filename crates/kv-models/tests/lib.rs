//! Whole models: numbers against Hugging Face's, generation under every policy, bad input.

#![allow(clippy::unwrap_used)]

mod bad_input;
mod calibration;
mod chat;
mod contexts;
mod earlier_files;
mod engine;
mod fisher;
#[path = "../../kv-policies/tests/followed.rs"]
mod followed;
mod generation;
mod gguf;
mod longflow;
mod matrices;
mod parallel;
mod parity;
mod plain;
mod prhs;
mod recorded;
mod rope;
mod support;
mod tokens;
