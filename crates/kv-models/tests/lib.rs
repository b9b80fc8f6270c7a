//! Whole models: numbers against Hugging Face's, generation under every policy, bad input.

mod bad_input;
mod chat;
mod generation;
mod parity;
mod support;
