//! An engine's load, for metrics and pictures.

use std::time::Duration;

use super::{Held, JobId};

/// What an engine is doing.
#[derive(Debug, Clone, Default)]
pub struct Load {
    /// Jobs in the queue.
    pub waiting: usize,
    /// Jobs that prefill.
    pub prefilling: usize,
    /// Jobs that decode.
    pub running: usize,
    /// Bytes reserved for jobs that decode, and of kept prompts and contexts.
    pub bytes: usize,
    /// Bytes of the pools that jobs are given slots of, free ones included, and of kept
    /// prompts and contexts.
    pub allocated: usize,
    /// Bytes that they may take together.
    pub most_bytes: usize,
    /// The share of the fullest group of jobs that is taken: of its slots, of its rows, or of its
    /// bytes.
    pub fullest: f64,
    /// Each job that decodes.
    pub jobs: Vec<JobLoad>,
    /// What has happened since the engine started.
    pub totals: Totals,
}

/// What each head of a job holds at one moment.
#[derive(Debug, Clone)]
pub struct Picture {
    /// Tokens of the prompt and new ones.
    pub tokens: usize,
    /// Slots of each head, `[layers][Hkv]`.
    pub kept: Vec<Vec<usize>>,
    /// Whether the job decodes; a job that has ended held this in the end.
    pub is_running: bool,
}

/// A job that decodes.
#[derive(Debug, Clone)]
pub struct JobLoad {
    /// Its number.
    pub id: JobId,
    /// Its policy's configuration.
    pub policy: serde_json::Value,
    /// Tokens of its prompt.
    pub prompt_tokens: usize,
    /// New tokens so far.
    pub new_tokens: usize,
    /// Its cache.
    pub held: Held,
    /// The time since its first token.
    pub decoding: Duration,
}

/// Counts since the engine started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Totals {
    /// Jobs that were taken into the queue.
    pub submitted: u64,
    /// Jobs that were refused.
    pub refused: u64,
    /// Jobs that have ended by themselves.
    pub ended: u64,
    /// Jobs that were cancelled.
    pub cancelled: u64,
    /// Jobs that have failed.
    pub failed: u64,
    /// Tokens of prompts that were computed.
    pub prompt_tokens: u64,
    /// Tokens of prompts that were there already.
    pub cached_tokens: u64,
    /// New tokens.
    pub new_tokens: u64,
    /// Decode steps that were one launch of a recording.
    pub replayed_steps: u64,
    /// Decode steps whose kernels were launched one by one.
    pub launched_steps: u64,
    /// Recordings that were made.
    pub recordings: u64,
}
