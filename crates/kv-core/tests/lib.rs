//! The cache against a plain model of it, on every device.

mod cache;
mod files;
mod memory;
mod model;
mod properties;
