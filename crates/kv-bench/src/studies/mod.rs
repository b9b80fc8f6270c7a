//! Measurements that single figures of papers ask for, apart from the suites that all policies run.

pub(crate) mod attention_error;
pub(crate) mod block_size;
pub(crate) mod by_batch;
mod layer;
pub(crate) mod long_output_speed;
pub(crate) mod merge_loss;
pub(crate) mod norms;
pub(crate) mod op_time;
pub(crate) mod score_prediction;
pub(crate) mod sketch_variance;
pub(crate) mod stream_precision;

/// The suite of papers' figures in records.
pub(crate) const SUITE: &str = "paper";
