//! The worker: Dynamo's conformance kit, answers, and processes on one host.

#![allow(clippy::unwrap_used)]

mod answers;
mod conformance;
mod host;
mod support;
