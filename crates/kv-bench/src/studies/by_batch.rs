//! Policies at growing batches, each up to the largest that a given memory holds.

use std::time::Instant;

use anyhow::{Context, ensure};
use kv_models::{Sampling, Session};
use serde_json::Value;

use super::SUITE;
use crate::bench::{ModelBench, Sizes};
use crate::options::PaperOptions;
use crate::policy_runs::PolicyRun;
use crate::progress::Progress;
use crate::record::{Case, FULL, metric};
use crate::suites::max_batch::{FILLED, Footprint, GIB, Order, growing, search};
use crate::suites::throughput::{empty_pool, varied_prompts};

/// A figure of decode speed and memory by batch.
#[derive(Debug)]
pub(crate) struct ByBatch {
    /// Tokens and steps.
    pub(crate) size: Sizes<Size>,
    /// The configurations of the policies, the full cache first.
    pub(crate) policies: fn() -> Vec<Value>,
    /// The paper's rates: a name, the batch, tokens a second. They stand beside ours of the
    /// figure's own model at the paper's sizes.
    pub(crate) published: &'static [(&'static str, usize, f64)],
    /// More that is recorded of the figure of this name from the runs.
    pub(crate) more: fn(&mut ModelBench<'_>, &str, &Size, &Runs),
}

/// Tokens of prompt and output, where the model has the positions, and tokens of the output that
/// are timed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Size {
    pub(crate) context: usize,
    pub(crate) steps: usize,
}

impl Size {
    /// The size within a model's positions.
    ///
    /// # Errors
    /// Where the model has too few positions.
    fn within(self, positions: usize) -> anyhow::Result<Self> {
        let context = self.context.min(positions);
        ensure!(context > 2 * (WARM_UP + self.steps), "the model has too few positions");
        Ok(Self { context, ..self })
    }
}

/// Steps before the clock starts, in which kernels are tuned and steps recorded.
const WARM_UP: usize = 8;
/// Full caches that the quick form's memory holds beside the weights.
const QUICK_SEQUENCES: f64 = 2.5;
/// A note on runs that share a device's pool.
const APART: &str = "policies share the device's pool, which keeps pages of the largest size so \
    far: each may hold larger batches in a run of its own, by --policy";

/// One policy at one batch.
pub(crate) struct Run {
    pub(crate) batch: usize,
    /// Tokens a second.
    pub(crate) rate: f64,
    /// Bytes of weights and caches.
    held: f64,
    /// Bytes that the device's pool reserved, where it tells.
    peak: Option<f64>,
}

/// The memory that runs may take.
struct Memory {
    bytes: f64,
    /// Whether the device's pool must stay within it, if there is one.
    pooled: bool,
}

impl Memory {
    fn holds(&self, run: &Run) -> bool {
        run.peak.filter(|_| self.pooled).unwrap_or(run.held) <= self.bytes
    }
}

/// Policies with the measurements at their batches.
pub(crate) type Runs = Vec<(PolicyRun, Vec<Run>)>;

/// Runs a figure's policies as far as `--policy` names them; without `--memory-cap` they have
/// `gib`. Published rates stand beside ours where the model is the figure's `own`.
///
/// # Errors
/// Where a policy or the device refuses, and where not one sequence fits.
pub(crate) fn run(
    bench: &mut ModelBench<'_>,
    name: &str,
    figure: &ByBatch,
    options: &PaperOptions,
    gib: f64,
    own: bool,
) -> anyhow::Result<()> {
    let quick = bench.common.quick;
    let size = figure.size.of(quick).within(bench.model.config().max_positions)?;
    let policy_runs = PolicyRun::all(&(figure.policies)())?;
    let memory = match options.memory_cap {
        None if quick => {
            let full = footprint(bench, &policy_runs[0], size)?;
            let bytes = full.weights + QUICK_SEQUENCES * full.sequence + full.shared;
            // Pools are coarser than so little memory.
            Memory { bytes: bytes / FILLED, pooled: false }
        }
        cap => Memory { bytes: cap.unwrap_or(gib) * GIB, pooled: true },
    };
    let mut plans = Vec::new();
    for policy_run in bench.common.select(policy_runs)? {
        let most = footprint(bench, &policy_run, size)?.largest(memory.bytes);
        let label = &policy_run.label;
        let most = most.with_context(|| format!("{label}: the memory does not hold one sequence"));
        let asked = &options.batches;
        let most = most?;
        plans.push((policy_run, if asked.is_empty() { growing(most) } else { asked.clone() }));
    }
    if memory.pooled && plans.len() > 1 && bench.device.memory_pool_usage().is_some() {
        bench.note(APART.into());
    }
    if plans.iter().all(|(policy_run, _)| policy_run.label != FULL) {
        bench.note(format!("speed-ups are over `{FULL}`, which --policy leaves out"));
    }
    let steps = plans.iter().map(|(_, batches)| batches.len()).sum();
    let mut progress = Progress::new(steps, name);
    let mut all = Vec::new();
    for (policy_run, batches) in plans {
        let mut left = batches.len();
        let found = search(Order::Growing, &batches, |batch| {
            let run = time(bench, &policy_run, size, batch)?;
            progress.step();
            left -= 1;
            Ok(memory.holds(&run).then_some(run))
        })
        .with_context(|| format!("policy {}", policy_run.label))?;
        progress.advance(left);
        if let Some((batch, error)) = found.failed {
            // Most likely memory ended, but readers of the table must know.
            bench.note(format!("{} at batch {batch}: {error:#}", policy_run.label));
        }
        all.push((policy_run, found.fits.into_iter().map(|(_, run)| run).collect()));
    }
    progress.finish();
    record(bench, name, &size, &all);
    // Times of quick forms compare with no published time.
    for &(label, batch, rate) in figure.published.iter().filter(|_| own && !quick) {
        let case = case(name, &size, "by batch", batch);
        bench.record(SUITE, &case, (label, None), metric::DECODE_TOKENS_PER_SECOND, rate);
    }
    (figure.more)(bench, name, &size, &all);
    Ok(())
}

/// The case of a part of the table.
pub(crate) fn case(name: &str, size: &Size, part: &str, batch: usize) -> Case {
    Case::of(format!("{name} {part}")).length(size.context).batch(batch)
}

/// The bytes of the model and of a policy's caches.
fn footprint(
    bench: &ModelBench<'_>,
    policy_run: &PolicyRun,
    size: Size,
) -> anyhow::Result<Footprint> {
    Ok(Footprint::of(bench, &start(bench, policy_run, size, 1)?.memory(), 1))
}

fn start<'a>(
    bench: &'a ModelBench<'_>,
    policy_run: &PolicyRun,
    size: Size,
    batch: usize,
) -> anyhow::Result<Session<'a>> {
    let new = WARM_UP + size.steps;
    let length = size.context - new;
    let prompts = varied_prompts(bench, batch, length);
    let seeds: Vec<u64> = (0..batch as u64).collect();
    let policy = policy_run.policy.clone();
    Session::start(&bench.model, policy, &prompts, &seeds, new).context("prefill")
}

fn time(
    bench: &ModelBench<'_>,
    policy_run: &PolicyRun,
    size: Size,
    batch: usize,
) -> anyhow::Result<Run> {
    empty_pool(&bench.device)?;
    let session = start(bench, policy_run, size, batch)?;
    let held = bench.weight_bytes() + session.memory().total() as f64;
    let mut decoder = session.decoder(&vec![Sampling::greedy(); batch])?.overlapped();
    for _ in 0..WARM_UP {
        decoder.next_tokens()?;
    }
    let clock = Instant::now();
    // Each waits for its tokens.
    for _ in 0..size.steps {
        decoder.next_tokens()?;
    }
    let seconds = clock.elapsed().as_secs_f64();
    let peak = bench.device.memory_pool_usage().map(|usage| usage.bytes_reserved as f64);
    Ok(Run { batch, rate: (batch * size.steps) as f64 / seconds, held, peak })
}

fn record(bench: &mut ModelBench<'_>, name: &str, size: &Size, all: &Runs) {
    let full = all.iter().find(|(policy_run, _)| policy_run.label == FULL);
    let full = full.and_then(|(_, runs)| runs.last()).map(|run| run.rate);
    let of_full = |batch: usize| {
        let (_, runs) = all.iter().find(|(policy_run, _)| policy_run.label == FULL)?;
        runs.iter().find(|run| run.batch == batch).map(|run| run.rate)
    };
    for (policy_run, runs) in all {
        let setup = policy_run.setup();
        for run in runs {
            let case = case(name, size, "by batch", run.batch);
            write(bench, &case, setup, run);
            if let Some(full) = of_full(run.batch).filter(|_| policy_run.label != FULL) {
                bench.record(SUITE, &case, setup, metric::SPEED_UP, run.rate / full);
            }
        }
    }
    for (policy_run, runs) in all {
        let setup = policy_run.setup();
        let Some(run) = runs.last() else { continue };
        let case = case(name, size, "at each one's largest batch", run.batch);
        write(bench, &case, setup, run);
        if let Some(full) = full {
            bench.record(SUITE, &case, setup, metric::SPEED_UP, run.rate / full);
        }
    }
}

fn write(bench: &mut ModelBench<'_>, case: &Case, setup: (&str, Option<f64>), run: &Run) {
    bench.record(SUITE, case, setup, metric::DECODE_TOKENS_PER_SECOND, run.rate);
    bench.record(SUITE, case, setup, metric::TOTAL_BYTES, run.held);
    if let Some(peak) = run.peak {
        bench.record(SUITE, case, setup, metric::PEAK_BYTES, peak);
    }
}
