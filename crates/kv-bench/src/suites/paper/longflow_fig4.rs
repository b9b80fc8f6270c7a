//! LongFlow, figure 4: throughput and memory of long outputs. The time of a step is measured at
//! some lengths and integrated over the output.

use std::time::Instant;

use anyhow::{Context, ensure};
use kv_models::{Sampling, Session};
use serde_json::json;

use super::SUITE;
use crate::args::Paper;
use crate::bench::ModelBench;
use crate::contenders::Contender;
use crate::progress::Progress;
use crate::record::{Case, metric};
use crate::suites::varied_prompts;

/// Lengths and budget.
struct Size {
    input: usize,
    output: usize,
    budget: usize,
    /// Steps between evictions of all but LongFlow.
    interval: usize,
    /// Batch that all run at, beside the largest of each.
    batches: &'static [usize],
}

const PAPER: Size =
    Size { input: 512, output: 16_000, budget: 3_200, interval: 128, batches: &[16] };
const QUICK: Size = Size { input: 64, output: 1_800, budget: 360, interval: 16, batches: &[4] };
/// Tokens that are prefilled; the rest of the input is assumed, as the figure does not compare
/// prefill.
const PROMPT: usize = 32;
/// Results of the paper's figure.
const PUBLISHED: &str = "the paper, on an A100 of 40 GB: LongFlow generates 11.8 times as many \
    tokens as the full cache, and about 4.0 times as many as H2O, VATP and R-KV";
/// Lengths at which steps are timed.
const POINTS: usize = 8;
/// Steps that are timed, and those before, in which a step is recorded.
const WINDOW: usize = 64;
const WARM_UP: usize = 6;
/// The paper's GPU.
const MEMORY_GIB: f64 = 40.0;
/// Share of the memory that caches and weights may take, beside activations and what pools round
/// up.
const FILLED: f64 = 0.94;

const GIB: f64 = (1u64 << 30) as f64;

/// One contender's measurements.
struct Run {
    contender: Contender,
    /// Slots that a head never exceeds.
    limit: usize,
    /// Steps that are timed together, so that each eviction's share counts.
    window: usize,
}

/// Runs the figure.
///
/// # Errors
/// Where a policy or the device refuses.
pub(crate) fn run(bench: &mut ModelBench<'_>, options: &Paper) -> anyhow::Result<()> {
    let quick = bench.common.quick;
    let size = if quick { QUICK } else { PAPER };
    let gib = options.memory_cap.unwrap_or(MEMORY_GIB);
    let limited =
        |name: &str| json!({"policy": name, "budget": size.budget, "interval": size.interval});
    let configs = [
        json!({"policy": "full"}),
        limited("h2o"),
        limited("vatp"),
        limited("r-kv"),
        json!({"policy": "longflow", "budget": size.budget}),
    ];
    let contenders = configs.iter().map(Contender::of).collect::<anyhow::Result<Vec<_>>>()?;
    let mut runs = Vec::new();
    for contender in bench.common.chosen(contenders)? {
        let (limit, window) = match contender.policy.name() {
            "full" => (size.input + size.output, WINDOW),
            "longflow" => (size.budget, WINDOW),
            _ => (size.budget, WINDOW.max(size.interval)),
        };
        runs.push(Run { contender, limit, window });
    }
    let mut progress = Progress::new(runs.len() * (1 + size.batches.len()), "longflow-fig4");
    for run in &runs {
        for &batch in size.batches {
            let measured = time(bench, &size, run, batch)?;
            measured.record(bench, &size, run, batch, "longflow-fig4");
            progress.step();
        }
        // Small machines stop at the equal batch.
        if !quick {
            let (batch, measured) = at_largest_batch(bench, &size, run, gib)?;
            let task = format!("longflow-fig4, largest batch in {gib} GiB");
            measured.record(bench, &size, run, batch, &task);
        }
        progress.step();
    }
    progress.finish();
    if !quick {
        bench.note(PUBLISHED.into());
    }
    Ok(())
}

/// Measures the largest batch that the memory holds.
fn at_largest_batch(
    bench: &ModelBench<'_>,
    size: &Size,
    run: &Run,
    gib: f64,
) -> anyhow::Result<(usize, Measured)> {
    let mut batch = largest_batch(bench, size, run, gib)?;
    loop {
        match time(bench, size, run, batch) {
            Ok(measured) if measured.bytes() <= gib * GIB => return Ok((batch, measured)),
            Err(error) if batch == 1 => return Err(error),
            // Pools round up, and activations take their part.
            _ => batch = (batch * 15 / 16).max(1),
        }
    }
}

/// Sequences whose caches fill the memory beside the weights, from the bytes of one.
fn largest_batch(
    bench: &ModelBench<'_>,
    size: &Size,
    run: &Run,
    gib: f64,
) -> anyhow::Result<usize> {
    let session = start(bench, size, run, 1)?;
    let memory = session.memory();
    let each = (memory.total() - memory.scratch) as f64;
    let config = bench.model.config();
    let weights = config.parameter_count() as f64 * bench.model.llama().dtype().size() as f64;
    let batch = (FILLED * gib * GIB - weights) / each;
    ensure!(batch >= 1.0, "{gib} GiB hold the weights, but no sequence beside them");
    Ok(batch as usize)
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
    let policy = run.contender.policy.clone();
    Session::start(&bench.model, policy, &prompts, &seeds, new).context("prefill")
}

/// What one run at one batch gives.
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
        let case = Case {
            task: Some(task.into()),
            length: Some(size.output),
            batch: Some(batch),
            ..Case::default()
        };
        let setup = (run.contender.label.as_str(), run.contender.budget);
        let mut record = |metric: &str, value: f64, unit: &str| {
            bench.record(SUITE, &case, setup, metric, value, unit);
        };
        record(metric::DECODE_TOKENS_PER_SECOND, self.rate, "tokens/s");
        record(metric::STEP_TIME, self.step * 1e3, "ms");
        record(metric::BYTES_ALLOCATED, self.allocated, "bytes");
        if let Some(peak) = self.peak {
            record(metric::PEAK_BYTES, peak, "bytes");
        }
    }
}

/// Times steps of a batch at lengths all over the output.
fn time(bench: &ModelBench<'_>, size: &Size, run: &Run, batch: usize) -> anyhow::Result<Measured> {
    crate::suites::throughput::empty_pool(&bench.device)?;
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
        let mut decoder = session.decoder(&vec![Sampling::greedy(); batch])?.ahead();
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
    let area = points.windows(2).map(|pair| {
        let [(from, a), (to, b)] = [pair[0], pair[1]];
        (to - from) as f64 * (a + b) / 2.0
    });
    let rate = (batch * size.output) as f64 / area.sum::<f64>();
    let peak = bench.device.memory_pool_usage().map(|usage| usage.bytes_reserved as f64);
    let step = points.last().map_or(0.0, |(_, seconds)| *seconds);
    Ok(Measured { rate, step, allocated: memory.allocated as f64, peak })
}
