//! What Prometheus scrapes.

use std::fmt;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use kv_models::{Engine, Load};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

/// What the names of this server's metrics begin with.
const PREFIX: &str = "kv_serve";

/// What the server counts by itself, and what it reads of the engine.
pub(crate) struct Metrics {
    registry: Registry,
    answers: Family<Answer, Counter>,
    first_token: Histogram,
    between_tokens: Histogram,
    whole: Histogram,
    kept: Counter<f64, AtomicU64>,
    seen: Counter,
}

/// An answer's route and status.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Answer {
    route: String,
    status: u16,
}

impl Metrics {
    /// Metrics of an engine, and of a server that has so many connections.
    pub(crate) fn new(engine: Engine, connections: Gauge) -> Self {
        let seconds = |start| Histogram::new(exponential_buckets(start, 2.0, 18));
        let (first_token, between_tokens, whole) =
            (seconds(0.001), seconds(0.000_5), seconds(0.01));
        let (answers, kept, seen) =
            (Family::<Answer, Counter>::default(), Counter::default(), Counter::default());
        let mut all = Registry::default();
        let registry = all.sub_registry_with_prefix(PREFIX);
        registry.register("connections", "Connections that are open", connections);
        registry.register("http_responses", "Answers by route and status", answers.clone());
        let help = "Seconds from a request to its first token";
        registry.register("time_to_first_token_seconds", help, first_token.clone());
        let help = "Seconds between two tokens of a request";
        registry.register("inter_token_latency_seconds", help, between_tokens.clone());
        let help = "Seconds from a request to its end";
        registry.register("request_duration_seconds", help, whole.clone());
        let help = "Tokens that a head kept when requests ended, the mean over layers and heads";
        registry.register("kv_tokens_kept", help, kept.clone());
        registry.register("kv_tokens_seen", "Tokens of requests that have ended", seen.clone());
        all.register_collector(Box::new(OfEngine(engine)));
        Self { registry: all, answers, first_token, between_tokens, whole, kept, seen }
    }

    /// An answer was sent.
    pub(crate) fn answered(&self, route: &str, status: u16) {
        self.answers.get_or_create(&Answer { route: route.into(), status }).inc();
    }

    /// The first token of a request came.
    pub(crate) fn first_token(&self, time: Duration) {
        self.first_token.observe(time.as_secs_f64());
    }

    /// Another token of a request came.
    pub(crate) fn next_token(&self, time: Duration) {
        self.between_tokens.observe(time.as_secs_f64());
    }

    /// A request has ended, with so many tokens of which a head kept `kept`.
    pub(crate) fn ended(&self, time: Duration, seen: usize, kept: f64) {
        self.whole.observe(time.as_secs_f64());
        self.seen.inc_by(seen as u64);
        self.kept.inc_by(kept);
    }

    /// All metrics in the text format of OpenMetrics.
    ///
    /// # Errors
    /// None in practice: the text grows in memory.
    pub(crate) fn text(&self) -> Result<String, fmt::Error> {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &self.registry)?;
        Ok(text)
    }
}

/// Reads the engine's load at each scrape.
#[derive(Debug)]
struct OfEngine(Engine);

impl Collector for OfEngine {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let load = self.0.load();
        let mut gauge = |name: &str, help, value| {
            let gauge = ConstGauge::new(value);
            gauge.encode(encoder.encode_descriptor(name, help, None, gauge.metric_type())?)
        };
        for (name, help, value) in gauges(&self.0, &load) {
            gauge(&format!("{PREFIX}_{name}"), help, value)?;
        }
        for (name, help, value) in gateway(&load) {
            gauge(name, help, value)?;
        }
        for (name, help, value) in counters(&load) {
            let counter = ConstCounter::new(value);
            let (name, kind) = (format!("{PREFIX}_{name}"), counter.metric_type());
            counter.encode(encoder.encode_descriptor(&name, help, None, kind)?)?;
        }
        Ok(())
    }
}

/// Names, words and values of gauges.
fn gauges(engine: &Engine, load: &Load) -> Vec<(&'static str, &'static str, f64)> {
    let (share, options) = (share(load), engine.options());
    let full: usize = load.jobs.iter().map(|job| job.held.full_bytes).sum();
    let live: usize = load.jobs.iter().map(|job| job.held.live_bytes).sum();
    vec![
        ("rows_limit", "Requests that may decode at once", options.all_rows() as f64),
        ("queue_limit", "Requests that may wait", options.queue as f64),
        ("requests_waiting", "Requests in the queue", load.waiting as f64),
        ("requests_prefilling", "Requests that prefill", load.prefilling as f64),
        ("requests_running", "Requests that decode", load.running as f64),
        ("kv_bytes", "Bytes reserved for running requests, and of contexts", load.bytes as f64),
        ("kv_bytes_limit", "Bytes that caches may hold", load.most_bytes as f64),
        ("kv_live_bytes", "Bytes of the slots that running requests have filled", live as f64),
        (
            "kv_allocated_bytes",
            "Bytes of the arenas that requests are given slots of, and of contexts",
            load.allocated as f64,
        ),
        ("kv_full_bytes", "Bytes that full caches of the running requests would hold", full as f64),
        (
            "kv_use_ratio",
            "Share of kv_bytes_limit, of all groups and contexts, that kv_bytes takes; \
             vllm:kv_cache_usage_perc says how full the fullest group is",
            share,
        ),
    ]
}

/// The three gauges by which the Gateway API's inference extension routes requests. It looks for
/// them under vLLM's names, unless it is configured otherwise.
fn gateway(load: &Load) -> [(&'static str, &'static str, f64); 3] {
    let running = load.prefilling + load.running;
    [
        ("vllm:num_requests_waiting", "Requests in the queue", load.waiting as f64),
        ("vllm:num_requests_running", "Requests that prefill or decode", running as f64),
        ("vllm:kv_cache_usage_perc", "Share of the fullest group's caches in use", load.fullest),
    ]
}

/// The share of the caches' bytes that is in use.
fn share(load: &Load) -> f64 {
    if load.most_bytes == 0 { 0.0 } else { load.bytes as f64 / load.most_bytes as f64 }
}

/// Names, words and values of counters.
fn counters(load: &Load) -> Vec<(&'static str, &'static str, u64)> {
    let totals = &load.totals;
    vec![
        ("jobs_submitted", "Jobs that were queued", totals.submitted),
        ("jobs_refused", "Jobs that were refused", totals.refused),
        ("jobs_ended", "Jobs that have ended by themselves", totals.ended),
        ("jobs_cancelled", "Jobs that were cancelled", totals.cancelled),
        ("jobs_failed", "Jobs that have failed", totals.failed),
        ("prompt_tokens", "Tokens of prompts that were computed", totals.prompt_tokens),
        ("cached_tokens", "Tokens of prompts that were there already", totals.cached_tokens),
        ("new_tokens", "Generated tokens", totals.new_tokens),
        ("replayed_steps", "Steps that were one launch of a recording", totals.replayed_steps),
        ("launched_steps", "Steps whose kernels were launched one by one", totals.launched_steps),
        ("recordings", "Recordings of steps", totals.recordings),
    ]
}
