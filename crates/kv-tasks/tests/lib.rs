//! Tests of the crate, in one binary to keep the time of linking low.

mod builtin;
mod builtin_rows;
mod files;
mod refusals;
mod rows;
mod ruler;
mod words;
