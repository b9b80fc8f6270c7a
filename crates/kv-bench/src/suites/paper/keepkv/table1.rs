//! KeepKV, table 1: tokens a second and memory by batch, each policy up to the largest that fits, and
//! the share of a step that merging takes.

use std::time::Instant;

use anyhow::{Context, ensure};
use kv_models::{Sampling, Session};
use serde_json::{Value, json};

use super::BUDGET;
use crate::args::Paper;
use crate::contenders::Contender;
use crate::progress::Progress;
use crate::record::{Case, FULL, metric};
use crate::run::Bench;
use crate::suites::paper::SUITE;
use crate::suites::throughput::empty_pool;
use crate::suites::varied_prompts;

/// Tokens of prompt and output, where the model has the positions, and those of the output that are
/// timed.
struct Size {
    context: usize,
    steps: usize,
}

const PAPER: Size = Size { context: 4_096, steps: 64 };
const QUICK: Size = Size { context: 512, steps: 16 };
/// Steps before the clock starts, in which kernels are tuned and steps recorded.
const WARM_UP: usize = 8;
/// The paper's GPU.
const MEMORY_GIB: f64 = 80.0;
/// Full caches that the quick form's memory holds beside the weights.
const QUICK_SEQUENCES: f64 = 2.5;
/// Share of the memory that caches and weights may take, beside activations and what pools round up.
const FILLED: f64 = 0.94;
const GIB: f64 = (1u64 << 30) as f64;
/// Who merges what whom evicts.
const MERGING: [(&str, &str); 3] =
    [("d2o", "h2o"), ("keepkv(h2o)", "h2o"), ("keepkv", "recent-attention")];
/// What the paper's table shows.
const PUBLISHED: &str = "the paper, Llama-2-7B on an A100 of 80 GB: full cache 117 tokens/s at batch \
    2; at batch 8 H2O 317, D2O 215, KeepKV 256";

/// One policy at one batch.
struct Run {
    batch: usize,
    /// Tokens a second.
    rate: f64,
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

/// Runs the table.
///
/// # Errors
/// Where a policy or the device refuses, and where not one sequence fits.
pub(crate) fn run(bench: &mut Bench<'_>, options: &Paper) -> anyhow::Result<()> {
    let quick = bench.common.quick;
    let mut size = if quick { QUICK } else { PAPER };
    size.context = size.context.min(bench.model.config().max_positions);
    ensure!(size.context > 2 * (WARM_UP + size.steps), "the model has too few positions");
    let at = |name: &str| json!({"policy": name, "budget": BUDGET});
    let configs: [Value; 6] = [
        json!({"policy": FULL}),
        at("h2o"),
        at("recent-attention"),
        at("d2o"),
        json!({"policy": "keepkv", "budget": BUDGET, "evictor": "h2o"}),
        at("keepkv"),
    ];
    let mut contenders = super::contenders(&configs)?;
    let full = &contenders[0];
    let memory = match options.memory_cap {
        None if quick => {
            let each = bytes_of(bench, full, &size)?;
            let bytes = (weights(bench) + QUICK_SEQUENCES * each.one + each.once) / FILLED;
            // Pools are coarser than so little memory.
            Memory { bytes, pooled: false }
        }
        gib => Memory { bytes: gib.unwrap_or(MEMORY_GIB) * GIB, pooled: true },
    };
    if let Some(list) = &bench.common.policy {
        // `--policy` chooses among them by name.
        let named: Vec<&str> = list.split(',').map(str::trim).collect();
        contenders.retain(|contender| named.contains(&contender.policy.name()));
        ensure!(!contenders.is_empty(), "--policy names none of what the table has");
    }
    let mut plans = Vec::new();
    for contender in contenders {
        let each = bytes_of(bench, &contender, &size)?;
        let most = (FILLED * memory.bytes - weights(bench) - each.once) / each.one;
        ensure!(most >= 1.0, "{}: the memory does not hold one sequence", contender.label);
        plans.push((contender, batches(most as usize)));
    }
    let steps = plans.iter().map(|(_, batches)| batches.len()).sum();
    let mut progress = Progress::new(steps, "keepkv-table1");
    let mut all = Vec::new();
    for (contender, batches) in plans {
        let runs = climb(bench, &contender, &size, &memory, &batches, &mut progress)
            .with_context(|| format!("policy {}", contender.label))?;
        all.push((contender, runs));
    }
    progress.finish();
    record(bench, &size, &all);
    if !quick {
        bench.note(PUBLISHED.into());
    }
    Ok(())
}

/// The powers of two up to a batch, and the batch.
fn batches(most: usize) -> Vec<usize> {
    let powers = std::iter::successors(Some(1), |batch| Some(2 * batch));
    let mut batches: Vec<usize> = powers.take_while(|batch| *batch < most).collect();
    batches.push(most);
    batches
}

/// Runs at growing batches until memory ends, and then at the largest below that fits.
fn climb(
    bench: &mut Bench<'_>,
    contender: &Contender,
    size: &Size,
    memory: &Memory,
    batches: &[usize],
    progress: &mut Progress,
) -> anyhow::Result<Vec<Run>> {
    let mut runs: Vec<Run> = Vec::new();
    let mut ended = None;
    for &batch in batches {
        if ended.is_none() {
            match time(bench, contender, size, batch) {
                Ok(run) if memory.holds(&run) => runs.push(run),
                Ok(_) => ended = Some(batch),
                Err(error) if batch == 1 => return Err(error),
                Err(error) => {
                    // Most likely memory, but who reads the table must know.
                    bench.note(format!("{} at batch {batch}: {error:#}", contender.label));
                    ended = Some(batch);
                }
            }
        }
        progress.step();
    }
    let last = runs.last().context("one sequence needs more memory than there is")?.batch;
    // Pools round up, and activations take their part: halfway, as often as it makes a difference.
    let (mut fits, mut ended) = (last, ended.unwrap_or(last));
    while ended - fits > (fits / 16).max(1) {
        let batch = fits.midpoint(ended);
        match time(bench, contender, size, batch) {
            Ok(run) if memory.holds(&run) => {
                runs.push(run);
                fits = batch;
            }
            _ => ended = batch,
        }
    }
    Ok(runs)
}

/// Bytes of a cache: those that every sequence adds, and those that all share.
struct Bytes {
    one: f64,
    once: f64,
}

fn bytes_of(bench: &Bench<'_>, contender: &Contender, size: &Size) -> anyhow::Result<Bytes> {
    let memory = start(bench, contender, size, 1)?.memory();
    let (total, scratch) = (memory.total() as f64, memory.scratch as f64);
    Ok(Bytes { one: total - scratch, once: scratch })
}

fn weights(bench: &Bench<'_>) -> f64 {
    let config = bench.model.config();
    config.parameter_count() as f64 * bench.model.llama().dtype().size() as f64
}

fn start<'a>(
    bench: &'a Bench<'_>,
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
    bench: &Bench<'_>,
    contender: &Contender,
    size: &Size,
    batch: usize,
) -> anyhow::Result<Run> {
    empty_pool(&bench.device)?;
    let session = start(bench, contender, size, batch)?;
    let held = weights(bench) + session.memory().total() as f64;
    let mut decoder = session.decoder(&vec![Sampling::greedy(); batch])?;
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

fn record(bench: &mut Bench<'_>, size: &Size, all: &[(Contender, Vec<Run>)]) {
    let largest = |label: &str| {
        all.iter().find(|(contender, _)| contender.label == label).and_then(|(_, runs)| runs.last())
    };
    let full = largest(FULL).map(|run| run.rate);
    let case = |part: &str, batch: usize| Case {
        task: Some(format!("keepkv-table1 {part}")),
        length: Some(size.context),
        batch: Some(batch),
        ..Case::default()
    };
    for (contender, runs) in all {
        let setup = (contender.label.as_str(), contender.budget);
        for run in runs {
            write(bench, &case("by batch", run.batch), setup, run);
        }
    }
    for (contender, runs) in all {
        let setup = (contender.label.as_str(), contender.budget);
        let Some(run) = runs.last() else { continue };
        let case = case("at each one's largest batch", run.batch);
        write(bench, &case, setup, run);
        if let Some(full) = full {
            bench.record(SUITE, &case, setup, metric::SPEED_UP, run.rate / full, "times");
        }
    }
    let of = |label: &str| all.iter().find(|(contender, _)| contender.label == label);
    for (merging, evictor) in MERGING {
        let (Some((contender, with)), Some((_, without))) = (of(merging), of(evictor)) else {
            continue;
        };
        let setup = (contender.label.as_str(), contender.budget);
        for run in with {
            let Some(alone) = without.iter().find(|alone| alone.batch == run.batch) else {
                continue;
            };
            // Of steps, whose times are batch over rate.
            let share = 1.0 - run.rate / alone.rate;
            let case = case("by batch", run.batch);
            bench.record(SUITE, &case, setup, metric::MERGING_SHARE, share, "share");
        }
    }
}

fn write(bench: &mut Bench<'_>, case: &Case, setup: (&str, Option<f64>), run: &Run) {
    let rate = metric::DECODE_TOKENS_PER_SECOND;
    bench.record(SUITE, case, setup, rate, run.rate, "tokens/s");
    bench.record(SUITE, case, setup, metric::TOTAL_BYTES, run.held, "bytes");
    if let Some(peak) = run.peak {
        bench.record(SUITE, case, setup, metric::PEAK_BYTES, peak, "bytes");
    }
}
