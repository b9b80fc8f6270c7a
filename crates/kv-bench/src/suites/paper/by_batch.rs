//! Policies at growing batches, each up to the largest that a given memory holds.

use std::time::Instant;

use anyhow::{Context, ensure};
use kv_models::{Sampling, Session};

use crate::args::Paper;
use crate::bench::ModelBench;
use crate::contenders::Contender;
use crate::progress::Progress;
use crate::record::{Case, FULL, metric};
use crate::suites::paper::SUITE;
use crate::suites::throughput::empty_pool;
use crate::suites::varied_prompts;

/// Tokens of prompt and output, where the model has the positions, and tokens of the output that
/// are timed.
#[derive(Clone, Copy)]
pub(super) struct Size {
    pub(super) context: usize,
    pub(super) steps: usize,
}

impl Size {
    /// The size within a model's positions.
    ///
    /// # Errors
    /// Where the model has too few of them.
    pub(super) fn within(self, positions: usize) -> anyhow::Result<Self> {
        let context = self.context.min(positions);
        ensure!(context > 2 * (WARM_UP + self.steps), "the model has too few positions");
        Ok(Self { context, ..self })
    }
}

/// Steps before the clock starts, in which kernels are tuned and steps recorded.
const WARM_UP: usize = 8;
/// Full caches that the quick form's memory holds beside the weights.
const QUICK_SEQUENCES: f64 = 2.5;
/// Share of the memory that caches and weights may take, beside activations and what pools round
/// up.
const FILLED: f64 = 0.94;
/// What all runs on a device with a pool have in common.
const APART: &str = "policies share the device's pool, which keeps pages of the largest size so \
    far: each may hold larger batches in a run of its own, by --policy";
const GIB: f64 = (1u64 << 30) as f64;

/// One policy at one batch.
pub(super) struct Run {
    pub(super) batch: usize,
    /// Tokens a second.
    pub(super) rate: f64,
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

/// Contenders with the measurements at their batches.
pub(super) type Runs = Vec<(Contender, Vec<Run>)>;

/// Runs contenders, the full cache first; `--policy` chooses among them by name,
/// and without `--memory-cap` they have `gib`.
///
/// # Errors
/// Where a policy or the device refuses, and where not one sequence fits.
pub(super) fn run(
    bench: &mut ModelBench<'_>,
    options: &Paper,
    contenders: Vec<Contender>,
    size: Size,
    gib: f64,
) -> anyhow::Result<Runs> {
    let full = &contenders[0];
    let memory = match options.memory_cap {
        None if bench.common.quick => {
            let each = bytes_of(bench, full, &size)?;
            let bytes = (weights(bench) + QUICK_SEQUENCES * each.one + each.once) / FILLED;
            // Pools are coarser than so little memory.
            Memory { bytes, pooled: false }
        }
        cap => Memory { bytes: cap.unwrap_or(gib) * GIB, pooled: true },
    };
    let contenders = bench.common.chosen(contenders)?;
    let mut plans = Vec::new();
    for contender in contenders {
        let each = bytes_of(bench, &contender, &size)?;
        let most = (FILLED * memory.bytes - weights(bench) - each.once) / each.one;
        ensure!(most >= 1.0, "{}: the memory does not hold one sequence", contender.label);
        let asked = &options.batches;
        plans.push((
            contender,
            if asked.is_empty() { batches(most as usize) } else { asked.clone() },
        ));
    }
    if memory.pooled && plans.len() > 1 && bench.device.memory_pool_usage().is_some() {
        bench.note(APART.into());
    }
    if plans.iter().all(|(contender, _)| contender.label != FULL) {
        bench.note(format!("speed-ups are over `{FULL}`, which --policy leaves out"));
    }
    let steps = plans.iter().map(|(_, batches)| batches.len()).sum();
    let mut progress = Progress::new(steps, &options.figure.name());
    let mut all = Vec::new();
    for (contender, batches) in plans {
        let runs = climb(bench, &contender, &size, &memory, &batches, &mut progress)
            .with_context(|| format!("policy {}", contender.label))?;
        all.push((contender, runs));
    }
    progress.finish();
    record(bench, options, &size, &all);
    Ok(all)
}

/// The case of a part of the table.
pub(super) fn case(options: &Paper, size: &Size, part: &str, batch: usize) -> Case {
    Case {
        task: Some(format!("{} {part}", options.figure.name())),
        length: Some(size.context),
        batch: Some(batch),
        ..Case::default()
    }
}

/// Powers of two below half of the batch that should fit, and then an eighth of it more at a time:
/// nothing is to be measured behind a batch that does not fit, as the device's pool keeps pages of
/// the size that it needed.
fn batches(most: usize) -> Vec<usize> {
    let powers = std::iter::successors(Some(1), |batch| Some(2 * batch));
    let mut batches: Vec<usize> = powers.take_while(|batch| 2 * batch < most).collect();
    let below = batches.last().copied().unwrap_or(0);
    batches.extend((4..=8).map(|eighths| most * eighths / 8).filter(|batch| *batch > below));
    batches.dedup();
    batches
}

/// Runs at growing batches until memory ends.
fn climb(
    bench: &mut ModelBench<'_>,
    contender: &Contender,
    size: &Size,
    memory: &Memory,
    batches: &[usize],
    progress: &mut Progress,
) -> anyhow::Result<Vec<Run>> {
    let mut runs: Vec<Run> = Vec::new();
    let mut ended = false;
    for &batch in batches {
        if !ended {
            match time(bench, contender, size, batch) {
                Ok(run) if memory.holds(&run) => runs.push(run),
                Ok(_) => ended = true,
                Err(error) if Some(&batch) == batches.first() => return Err(error),
                Err(error) => {
                    // Most likely memory, but who reads the table must know.
                    bench.note(format!("{} at batch {batch}: {error:#}", contender.label));
                    ended = true;
                }
            }
        }
        progress.step();
    }
    ensure!(!runs.is_empty(), "batch {} needs more memory than there is", batches[0]);
    Ok(runs)
}

/// Bytes of a cache: those that every sequence adds, and those that all share.
struct Bytes {
    one: f64,
    once: f64,
}

fn bytes_of(bench: &ModelBench<'_>, contender: &Contender, size: &Size) -> anyhow::Result<Bytes> {
    let memory = start(bench, contender, size, 1)?.memory();
    let (total, scratch) = (memory.total() as f64, memory.scratch as f64);
    Ok(Bytes { one: total - scratch, once: scratch })
}

fn weights(bench: &ModelBench<'_>) -> f64 {
    let config = bench.model.config();
    config.parameter_count() as f64 * bench.model.llama().dtype().size() as f64
}

fn start<'a>(
    bench: &'a ModelBench<'_>,
    contender: &Contender,
    size: &Size,
    batch: usize,
) -> anyhow::Result<Session<'a>> {
    let new = WARM_UP + size.steps;
    let length = size.context - new;
    let prompts = varied_prompts(bench, batch, length);
    let seeds: Vec<u64> = (0..batch as u64).collect();
    let policy = contender.policy.clone();
    Session::start(&bench.model, policy, &prompts, &seeds, new).context("prefill")
}

fn time(
    bench: &ModelBench<'_>,
    contender: &Contender,
    size: &Size,
    batch: usize,
) -> anyhow::Result<Run> {
    empty_pool(&bench.device)?;
    let session = start(bench, contender, size, batch)?;
    let held = weights(bench) + session.memory().total() as f64;
    let mut decoder = session.decoder(&vec![Sampling::greedy(); batch])?.ahead();
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

fn record(bench: &mut ModelBench<'_>, options: &Paper, size: &Size, all: &Runs) {
    let full = all.iter().find(|(contender, _)| contender.label == FULL);
    let full = full.and_then(|(_, runs)| runs.last()).map(|run| run.rate);
    let of_full = |batch: usize| {
        let (_, runs) = all.iter().find(|(contender, _)| contender.label == FULL)?;
        runs.iter().find(|run| run.batch == batch).map(|run| run.rate)
    };
    for (contender, runs) in all {
        let setup = (contender.label.as_str(), contender.budget);
        for run in runs {
            let case = case(options, size, "by batch", run.batch);
            write(bench, &case, setup, run);
            if let Some(full) = of_full(run.batch).filter(|_| contender.label != FULL) {
                bench.record(SUITE, &case, setup, metric::SPEED_UP, run.rate / full, "times");
            }
        }
    }
    for (contender, runs) in all {
        let setup = (contender.label.as_str(), contender.budget);
        let Some(run) = runs.last() else { continue };
        let case = case(options, size, "at each one's largest batch", run.batch);
        write(bench, &case, setup, run);
        if let Some(full) = full {
            bench.record(SUITE, &case, setup, metric::SPEED_UP, run.rate / full, "times");
        }
    }
}

fn write(bench: &mut ModelBench<'_>, case: &Case, setup: (&str, Option<f64>), run: &Run) {
    let rate = metric::DECODE_TOKENS_PER_SECOND;
    bench.record(SUITE, case, setup, rate, run.rate, "tokens/s");
    bench.record(SUITE, case, setup, metric::TOTAL_BYTES, run.held, "bytes");
    if let Some(peak) = run.peak {
        bench.record(SUITE, case, setup, metric::PEAK_BYTES, peak, "bytes");
    }
}

#[cfg(test)]
mod tests {
    use super::batches;

    #[test]
    fn batches_double_and_then_grow_by_eighths_of_the_largest() {
        assert_eq!(batches(1), [1]);
        assert_eq!(batches(2), [1, 2]);
        assert_eq!(batches(7), [1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(batches(24), [1, 2, 4, 8, 12, 15, 18, 21, 24]);
    }
}
