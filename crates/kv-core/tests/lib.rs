//! The cache against a plain model of it, on every device.

#![allow(clippy::unwrap_used)]

mod cache;
mod files;
mod memory;
mod model;
mod properties;
