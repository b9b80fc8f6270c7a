//! The worker: Dynamo's conformance kit, answers, and processes on one host.

mod answers;
mod conformance;
mod host;
mod support;
