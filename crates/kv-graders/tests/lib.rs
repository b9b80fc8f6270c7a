//! Tests of the crate, in one binary to keep the time of linking low.

mod agreement;
mod equivalence;
mod names;
mod refusals;
