//! Speed and bytes: prefill, time to the first token, decode.

use std::time::Instant;

use anyhow::bail;
use burn::tensor::Device;
use kv_core::{MemoryReport, counted};
use kv_models::{Sampling, Session};
use kv_policies::Archive;

use super::max_batch::{Footprint, GIB};
use super::policy_records::{reads_of, record_memory, record_reads};
use crate::bench::ModelBench;
use crate::options::Throughput;
use crate::policy_runs::PolicyRun;
use crate::progress::Progress;
use crate::record::{Case, metric};

const SUITE: &str = "throughput";
const BUDGETS: [f64; 1] = [0.25];

/// Runs the suite.
pub(crate) fn run(bench: &mut ModelBench<'_>, options: &Throughput) -> anyhow::Result<()> {
    let policy_runs = bench.common.policy_runs(&BUDGETS)?;
    measure(bench, &policy_runs, options)
}

/// Measures given policies.
pub(crate) fn measure(
    bench: &mut ModelBench<'_>,
    policy_runs: &[PolicyRun],
    options: &Throughput,
) -> anyhow::Result<()> {
    bench.remark(policy_runs, options.lengths.iter().copied().max().unwrap_or_default())?;
    let steps = if bench.common.quick { options.steps.min(16) } else { options.steps };
    let warm_up = options.warm_up;
    let (new, positions) = (warm_up + steps, bench.model.config().max_positions);
    if let Some(length) = options.lengths.iter().find(|length| *length + new > positions) {
        let longest = bench.model.config().longest();
        let [prompt, steps] = [(*length, "token"), (new, "step")].map(|(n, of)| counted(n, of));
        bail!("a prompt of {prompt} with {steps} behind it exceeds the model's {longest}");
    }
    let runs = policy_runs.len() * options.lengths.len() * options.batches.len();
    let mut progress = Progress::new(runs, "throughput");
    for &length in &options.lengths {
        for &batch in &options.batches {
            for policy_run in policy_runs {
                let memory = time(bench, policy_run, length, batch, [warm_up, steps])?;
                if let Some(gib) = options.memory_cap {
                    largest_batch(bench, policy_run, length, batch, &memory, gib);
                }
                progress.step();
            }
        }
    }
    progress.finish();
    Ok(())
}

fn time(
    bench: &mut ModelBench<'_>,
    policy_run: &PolicyRun,
    length: usize,
    batch: usize,
    [warm_up, steps]: [usize; 2],
) -> anyhow::Result<MemoryReport> {
    let new = warm_up + steps;
    let prompts = varied_prompts(bench, batch, length);
    let seeds: Vec<u64> = (0..batch as u64).collect();
    let start = || Session::start(&bench.model, policy_run.policy.clone(), &prompts, &seeds, new);
    empty_pool(&bench.device)?;
    // Once without the clock.
    drop(start()?.read_logits()?);
    let clock = Instant::now();
    let mut decoder = start()?.decoder(&vec![Sampling::greedy(); batch])?.overlapped();
    decoder.next_tokens()?;
    let first = clock.elapsed().as_secs_f64();
    let kept = decoder.session().memory();

    for _ in 0..warm_up {
        decoder.next_tokens()?;
    }
    // State that a policy makes at its first step counts.
    let memory = MemoryReport { policy: decoder.session().memory().policy, ..kept };
    // Every step waits for its tokens while the next step is under way, so that as many steps end
    // as begin.
    let clock = Instant::now();
    let mut slowest = 0.0f64;
    for _ in 0..steps {
        let step = Instant::now();
        decoder.next_tokens()?;
        slowest = slowest.max(step.elapsed().as_secs_f64());
    }
    let decode = clock.elapsed().as_secs_f64();

    let layers = decoder.session().cache().layers.iter();
    let transfers = layers.filter_map(|layer| layer.policy_state()).map(Archive::transfers);
    let (count, copying, waiting) =
        transfers.fold((0, 0.0, 0.0), |(count, copying, waiting), own| {
            (
                count + own.count,
                copying + own.copying.as_secs_f64(),
                waiting + own.waiting.as_secs_f64(),
            )
        });
    let reads = reads_of(decoder.session())?;
    let case = Case::default().length(length).batch(batch);
    let setup = policy_run.setup();
    let pool = bench.device.memory_pool_usage();
    let mut record = |name: &str, value: f64| bench.record(SUITE, &case, setup, name, value);
    let rows = batch as f64;
    record(metric::PREFILL_TOKENS_PER_SECOND, rows * length as f64 / first);
    record(metric::TIME_TO_FIRST_TOKEN, first * 1e3);
    record(metric::DECODE_TOKENS_PER_SECOND, rows * steps as f64 / decode);
    record(metric::SLOWEST_STEP, slowest * 1e3);
    if count > 0 {
        record(metric::COPY_TIME, copying / count as f64 * 1e3);
        record(metric::COPY_WAIT, waiting / count as f64 * 1e3);
    }
    if let Some(usage) = pool {
        record(metric::PEAK_BYTES, usage.bytes_reserved as f64);
    }
    record_memory(bench, SUITE, &case, policy_run, &[memory]);
    record_reads(bench, SUITE, &case, policy_run, reads);
    Ok(memory)
}

/// Prompts whose tokens differ from row to row. The tokens themselves do not matter.
pub(crate) fn varied_prompts(bench: &ModelBench<'_>, batch: usize, length: usize) -> Vec<Vec<u32>> {
    let vocabulary = bench.model.config().vocab_size as u32;
    let token = |row: u32, at: u32| (at * 7_919 + row * 104_729 + 11) % vocabulary;
    let row = |row| (0..length as u32).map(|at| token(row, at)).collect();
    (0..batch as u32).map(row).collect()
}

/// Gives back the memory that earlier runs left in the device's pool: its peak is then the peak of
/// the next run.
pub(crate) fn empty_pool(device: &Device) -> anyhow::Result<()> {
    sync(device)?;
    device.memory_cleanup();
    Ok(())
}

fn sync(device: &Device) -> anyhow::Result<()> {
    device.sync().map_err(|error| anyhow::anyhow!("{error}"))
}

/// Records how many sequences fit beside the weights.
fn largest_batch(
    bench: &mut ModelBench<'_>,
    policy_run: &PolicyRun,
    length: usize,
    batch: usize,
    memory: &MemoryReport,
    gib: f64,
) {
    let fits = Footprint::of(bench, memory, batch).sequences(gib * GIB);
    let case = Case::default().length(length).batch(batch);
    let setup = policy_run.setup();
    bench.record(SUITE, &case, setup, metric::LARGEST_BATCH, fits);
}

#[cfg(test)]
mod tests {
    use burn::tensor::Tensor;

    use super::*;

    #[test]
    fn an_empty_pool_forgets_earlier_runs() {
        const BYTES: u64 = 64 << 20;
        let mut pools = 0;
        for test in kv_testing::devices() {
            let reserved = || test.device.memory_pool_usage().map(|usage| usage.bytes_reserved);
            let Some(before) = reserved() else { continue };
            pools += 1;
            drop(Tensor::<1>::zeros([BYTES as usize / 4], &test.device));
            assert!(reserved().unwrap() >= before + BYTES);
            empty_pool(&test.device).unwrap();
            assert!(reserved().unwrap() <= before, "{} is reserved", reserved().unwrap());
        }
        if pools == 0 {
            kv_testing::skip("an_empty_pool_forgets_earlier_runs", "no device has a pool");
        }
    }
}
