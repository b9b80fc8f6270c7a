//! Suites of measurements.

pub(crate) mod attention;
mod conversation;
pub(crate) mod evaluate;
pub(crate) mod kernels;
pub(crate) mod long_output;
pub(crate) mod max_batch;
mod next_token;
pub(crate) mod overview;
pub(crate) mod perplexity;
pub(crate) mod policy_records;
pub(crate) mod prefill_perplexity;
pub(crate) mod quality;
pub(crate) mod throughput;
