//! Records that several suites take of a policy: the bytes of its caches, its reads, and its votes.

use std::ops::AddAssign;

use kv_core::{LayerCache, MemoryReport};
use kv_models::Session;
use kv_policies::{Reads, VOTES, read_votes};

use crate::bench::ModelBench;
use crate::policy_runs::PolicyRun;
use crate::record::{Case, metric};

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
        (metric::LIVE_BYTES, |report| report.in_use + report.metadata + report.policy),
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
        bench.record(suite, case, policy_run.setup(), name, mean);
    }
}

/// Reads of a session's decode steps, over its layers.
pub(crate) fn reads_of(session: &Session<'_>) -> anyhow::Result<Reads> {
    let layers = session.cache().layers.iter();
    layers.map(|layer| Ok(Reads::of(layer)?.unwrap_or_default())).sum()
}

/// Records, of policies that read less than they keep, the share of heads that retrieved and the
/// tokens that they read.
pub(crate) fn record_reads(
    bench: &mut ModelBench<'_>,
    suite: &str,
    case: &Case,
    policy_run: &PolicyRun,
    reads: Reads,
) {
    if reads.steps > 0 {
        let setup = policy_run.setup();
        bench.record(suite, case, setup, metric::RETRIEVAL_RATIO, reads.ratio());
        bench.record(suite, case, setup, metric::TOKENS_READ, reads.slots_each());
    }
}

/// The tokens of all heads, and the number of tokens that slots vote for, in caches whose slots
/// have votes.
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
        Ok(Self { tokens: (tokens * cache.layout().head_ranges()) as u64, represented })
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
            let setup = policy_run.setup();
            bench.record(suite, case, setup, metric::DROPPED_VOTES, dropped);
        }
    }
}

impl AddAssign for Votes {
    fn add_assign(&mut self, other: Self) {
        self.tokens += other.tokens;
        self.represented += other.represented;
    }
}
