#![doc = include_str!("../README.md")]

mod answer;
mod args;
mod card;
mod engine;
mod error;
mod load;
mod request;

pub use args::Args;
pub use engine::KvEngine;
