//! Throughput and memory of long outputs (LongFlow, figure 4). The time of a step is measured at
//! some lengths and integrated over the output.

use std::time::Instant;

use anyhow::Context;
use kv_models::{Sampling, Session};
use kv_policies::Treatment;
use serde_json::json;

use super::SUITE;
use crate::bench::ModelBench;
use crate::policy_runs::PolicyRun;
use crate::progress::Progress;
use crate::record::{Case, metric};
use crate::suites::max_batch::{Footprint, GIB, Order, search, shrinking};
use crate::suites::throughput::{empty_pool, varied_prompts};

/// Lengths and budget.
pub(crate) struct Size {
    /// Tokens of the input.
    pub(crate) input: usize,
    /// Tokens of the output.
    pub(crate) output: usize,
    /// Tokens that all but the full cache keep.
    pub(crate) budget: usize,
    /// Steps between evictions of all but LongFlow.
    pub(crate) interval: usize,
    /// Batch that all run at, beside the largest of each.
    pub(crate) batch: usize,
}

/// Tokens that are prefilled; the rest of the input is assumed, as the figure does not compare
/// prefill.
const PROMPT: usize = 32;
/// Lengths at which steps are timed.
const POINTS: usize = 8;
/// Steps that are timed, and steps before them; one of the latter is recorded as a graph.
const WINDOW: usize = 64;
const WARM_UP: usize = 6;
/// One policy's measurements.
struct Run {
    policy_run: PolicyRun,
    /// Slots that a head never exceeds.
    limit: usize,
    /// Steps that are timed together, so that each eviction's share counts.
    window: usize,
}

/// Runs the figure.
///
/// # Errors
/// Where a policy or the device refuses.
pub(crate) fn run(
    bench: &mut ModelBench<'_>,
    name: &str,
    size: &Size,
    gib: f64,
) -> anyhow::Result<()> {
    let quick = bench.common.quick;
    let limited =
        |name: &str| json!({"policy": name, "budget": size.budget, "interval": size.interval});
    let configs = [
        json!({"policy": "full"}),
        limited("h2o"),
        limited("vatp"),
        limited("r-kv"),
        json!({"policy": "longflow", "budget": size.budget}),
    ];
    let policy_runs = PolicyRun::all(&configs)?;
    let mut runs = Vec::new();
    for policy_run in bench.common.select(policy_runs)? {
        let overwrites = policy_run.treatment == Some(Treatment::Overwrite);
        let (limit, window) = match policy_run.policy.budget() {
            None => (size.input + size.output, WINDOW),
            Some(_) if overwrites => (size.budget, WINDOW),
            Some(_) => (size.budget, WINDOW.max(size.interval)),
        };
        runs.push(Run { policy_run, limit, window });
    }
    let mut progress = Progress::new(2 * runs.len(), name);
    for run in &runs {
        let measured = time(bench, size, run, size.batch)?;
        measured.record(bench, size, run, size.batch, name);
        progress.step();
        // Small machines stop at the equal batch.
        if !quick {
            let memory = start(bench, size, run, 1)?.memory();
            let most = Footprint::of(bench, &memory, 1).largest(gib * GIB);
            let most = most.with_context(|| {
                format!("{gib} GiB hold the weights, but no sequence beside them")
            })?;
            // Pools round up, and activations take their part.
            let found = search(Order::Shrinking, &shrinking(most), |batch| {
                let measured = time(bench, size, run, batch)?;
                Ok((measured.bytes() <= gib * GIB).then_some(measured))
            })?;
            for (batch, measured) in found.fits {
                let task = format!("{name}, largest batch in {gib} GiB");
                measured.record(bench, size, run, batch, &task);
            }
        }
        progress.step();
    }
    progress.finish();
    Ok(())
}

fn start<'a>(
    bench: &'a ModelBench<'_>,
    size: &Size,
    run: &Run,
    batch: usize,
) -> anyhow::Result<Session<'a>> {
    let prompts = varied_prompts(bench, batch, PROMPT);
    let seeds: Vec<u64> = (0..batch as u64).collect();
    let new = size.input - PROMPT + size.output + run.window + WARM_UP + 2;
    let policy = run.policy_run.policy.clone();
    Session::start(&bench.model, policy, &prompts, &seeds, new).context("prefill")
}

/// The measurements of a policy at one batch.
struct Measured {
    /// Tokens a second over the whole output.
    rate: f64,
    /// Seconds of a step at its end.
    step: f64,
    /// Bytes of the caches.
    allocated: f64,
    /// Bytes that the device's pool reserved, where it tells.
    peak: Option<f64>,
}

impl Measured {
    fn bytes(&self) -> f64 {
        self.peak.unwrap_or(self.allocated)
    }

    fn record(&self, bench: &mut ModelBench<'_>, size: &Size, run: &Run, batch: usize, task: &str) {
        let case = Case::of(task).length(size.output).batch(batch);
        let setup = run.policy_run.setup();
        let mut record =
            |metric: &str, value: f64| bench.record(SUITE, &case, setup, metric, value);
        record(metric::DECODE_TOKENS_PER_SECOND, self.rate);
        record(metric::STEP_TIME, self.step * 1e3);
        record(metric::BYTES_ALLOCATED, self.allocated);
        if let Some(peak) = self.peak {
            record(metric::PEAK_BYTES, peak);
        }
    }
}

/// Times steps of a batch at lengths all over the output.
fn time(bench: &ModelBench<'_>, size: &Size, run: &Run, batch: usize) -> anyhow::Result<Measured> {
    empty_pool(&bench.device)?;
    // Generated tokens, and seconds of a step.
    let mut points: Vec<(usize, f64)> = Vec::new();
    let mut session = start(bench, size, run, batch)?;
    let memory = session.memory();
    let last = size.input + size.output - run.window - WARM_UP;
    for point in 0..POINTS {
        let generated = size.output * point / (POINTS - 1);
        let full = |generated: usize| size.input + generated >= run.limit;
        // A cache at its limit has equal steps from then on.
        if let Some((_, seconds)) = points.last().copied().filter(|(at, _)| full(*at)) {
            points.push((generated, seconds));
            continue;
        }
        let length = (size.input + generated).min(last);
        session.assume(length.saturating_sub(session.cache().seen[0]))?;
        let mut decoder = session.decoder(&vec![Sampling::greedy(); batch])?.overlapped();
        for _ in 0..WARM_UP {
            decoder.next_tokens()?;
        }
        let clock = Instant::now();
        for _ in 0..run.window {
            decoder.next_tokens()?;
        }
        points.push((generated, clock.elapsed().as_secs_f64() / run.window as f64));
        session = decoder.into_session()?;
    }
    let rate = (batch * size.output) as f64 / seconds(&points);
    let peak = bench.device.memory_pool_usage().map(|usage| usage.bytes_reserved as f64);
    let step = points.last().map_or(0.0, |(_, seconds)| *seconds);
    Ok(Measured { rate, step, allocated: memory.allocated as f64, peak })
}

/// The time of all steps, where `points` holds generated tokens and the time of a step behind them.
/// A step's time is linear between two points.
fn seconds(points: &[(usize, f64)]) -> f64 {
    let area = points.windows(2).map(|pair| {
        let [(from, a), (to, b)] = [pair[0], pair[1]];
        (to - from) as f64 * (a + b) / 2.0
    });
    area.sum()
}

#[cfg(test)]
mod tests {
    use super::seconds;

    #[test]
    fn step_times_are_integrated_over_the_output() {
        assert_eq!(seconds(&[(0, 1.0), (10, 3.0)]), 20.0);
        // Unequal stretches, and a cache at its limit from the second point on.
        assert_eq!(seconds(&[(0, 1.0), (4, 3.0), (10, 3.0)]), 26.0);
    }
}
