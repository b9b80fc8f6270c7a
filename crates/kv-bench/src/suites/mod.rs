//! Suites of measurements, and the helpers that they share.

pub(crate) mod attention;
mod conversation;
mod divergence;
pub(crate) mod kernels;
pub(crate) mod long_output;
pub(crate) mod max_batch;
pub(crate) mod overview;
pub(crate) mod perplexity;
pub(crate) mod prefill_perplexity;
pub(crate) mod quality;
pub(crate) mod throughput;

use std::ops::AddAssign;

use kv_core::{LayerCache, MemoryReport};
use kv_models::Session;
use kv_policies::{Reads, VOTES, read_votes};

use crate::bench::ModelBench;
use crate::policy_runs::PolicyRun;
use crate::record::{Case, metric};

/// Log-softmax of one token, and whether it is the most likely one (ties to the lower id).
pub(crate) fn judge(logits: &[f32], token: u32) -> (f64, u32) {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|logit| f64::from(logit - max).exp()).sum();
    let best = logits.iter().position(|logit| *logit == max).unwrap_or_default();
    (f64::from(logits[token as usize] - max) - sum.ln(), best as u32)
}

/// Records a cache's bytes, each a mean over runs.
pub(crate) fn record_memory(
    bench: &mut ModelBench<'_>,
    suite: &str,
    case: &Case,
    policy_run: &PolicyRun,
    reports: &[MemoryReport],
) {
    type Bytes = fn(&MemoryReport) -> usize;
    let parts: [(&str, Bytes); 9] = [
        (metric::HELD_BYTES, |report| report.in_use + report.metadata + report.policy),
        (metric::CACHE_BYTES, |report| report.total() - report.scratch),
        (metric::BYTES_IN_USE, |report| report.in_use),
        (metric::BYTES_ALLOCATED, |report| report.allocated),
        (metric::ROOM_BYTES, MemoryReport::room),
        (metric::METADATA_BYTES, |report| report.metadata),
        (metric::POLICY_BYTES, |report| report.policy),
        (metric::SCRATCH_BYTES, |report| report.scratch),
        (metric::HOST_BYTES, |report| report.host),
    ];
    for (name, bytes) in parts {
        let sum: usize = reports.iter().map(bytes).sum();
        // Few policies keep anything in host memory.
        if sum == 0 && name == metric::HOST_BYTES {
            continue;
        }
        let mean = sum as f64 / reports.len().max(1) as f64;
        bench.record(suite, case, (&policy_run.label, policy_run.budget), name, mean, "bytes");
    }
}

/// Reads of a session's decode steps, over its layers.
pub(crate) fn reads_of(session: &Session<'_>) -> anyhow::Result<Reads> {
    let layers = session.cache().layers.iter();
    let reads = layers.map(|layer| session.policy().reads(layer));
    reads.map(|reads| Ok(reads?.unwrap_or_default())).sum()
}

/// Records how often heads retrieved and how much they read, of policies that read less than they
/// keep.
pub(crate) fn record_reads(
    bench: &mut ModelBench<'_>,
    suite: &str,
    case: &Case,
    policy_run: &PolicyRun,
    reads: Reads,
) {
    if reads.steps > 0 {
        let setup = (policy_run.label.as_str(), policy_run.budget);
        bench.record(suite, case, setup, metric::RETRIEVAL_RATIO, reads.ratio(), "share");
        bench.record(suite, case, setup, metric::TOKENS_READ, reads.slots_each(), "tokens");
    }
}

/// Tokens of all heads, and how many of them slots vote for, of caches whose slots have votes.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Votes {
    tokens: u64,
    represented: u64,
}

impl Votes {
    /// The votes of a cache that has seen `tokens` tokens, a row.
    pub(crate) fn of(cache: &LayerCache, tokens: usize) -> anyhow::Result<Self> {
        if cache.track(VOTES).is_none() {
            return Ok(Self::default());
        }
        let represented = read_votes(cache)?.iter().sum();
        Ok(Self { tokens: (tokens * cache.layout().pairs()) as u64, represented })
    }

    /// The votes of all layers of a session.
    pub(crate) fn of_session(session: &Session<'_>) -> anyhow::Result<Self> {
        let cache = session.cache();
        let tokens = cache.seen.iter().sum::<usize>() / cache.batch().max(1);
        let mut sum = Self::default();
        for layer in &cache.layers {
            sum += Self::of(layer, tokens)?;
        }
        Ok(sum)
    }

    /// Records the share of tokens for which no slot votes any more, where slots have votes.
    pub(crate) fn record(
        self,
        bench: &mut ModelBench<'_>,
        suite: &str,
        case: &Case,
        policy_run: &PolicyRun,
    ) {
        if self.tokens > 0 {
            let dropped = 1.0 - self.represented as f64 / self.tokens as f64;
            let setup = (policy_run.label.as_str(), policy_run.budget);
            bench.record(suite, case, setup, metric::DROPPED_VOTES, dropped, "share");
        }
    }
}

impl AddAssign for Votes {
    fn add_assign(&mut self, other: Self) {
        self.tokens += other.tokens;
        self.represented += other.represented;
    }
}

/// Prompts whose tokens differ from row to row; which ones they are does not matter.
pub(crate) fn varied_prompts(bench: &ModelBench<'_>, batch: usize, length: usize) -> Vec<Vec<u32>> {
    let vocabulary = bench.model.config().vocab_size as u32;
    let token = |row: u32, at: u32| (at * 7_919 + row * 104_729 + 11) % vocabulary;
    let row = |row| (0..length as u32).map(|at| token(row, at)).collect();
    (0..batch as u32).map(row).collect()
}
