//! BalanceKV through whole models: its table 2 (speed) and its needles (retrieval).

use serde_json::json;

use super::quality;
use crate::args::Paper;
use crate::bench::ModelBench;
use crate::contenders::Contender;
use crate::options::Throughput;
use crate::record::FULL;
use crate::suites::throughput;

/// Results of the paper's table 2, on an A6000.
const PUBLISHED: &str = "the paper, 16,384 + 1,024 tokens: prefill 3.03 s exact, 3.76 SnapKV, 3.75 \
    PyramidKV, 3.68 StreamingLLM, 3.66 BalanceKV; decoding 37.8, 40.4, 37.2, 40.3 and 38.1 s";

/// Prefill and decode time at a quarter of the cache.
///
/// # Errors
/// Where a policy or the device refuses.
pub(crate) fn table2(bench: &mut ModelBench<'_>) -> anyhow::Result<()> {
    let names = ["snapkv", "pyramidkv", "streaming-llm", "balancekv"];
    let mut contenders = vec![Contender::of(&json!({"policy": FULL}))?];
    for name in names {
        contenders.push(Contender::of(&json!({"policy": name, "budget": 0.25}))?);
    }
    let quick = bench.common.quick;
    let (length, steps) = if quick { (512, 64) } else { (16_384, 1_024) };
    let options = Throughput { lengths: vec![length], batches: vec![1], steps, memory_cap: None };
    throughput::measure(bench, &contenders, &options)?;
    if !quick {
        bench.note(PUBLISHED.into());
    }
    Ok(())
}

/// Retrieval at several budgets, beside the methods that the paper compares.
///
/// # Errors
/// Where a policy or the device refuses.
pub(crate) fn needle(bench: &mut ModelBench<'_>, options: &Paper) -> anyhow::Result<()> {
    let names =
        ["balancekv", "balancekv-augmented", "uniform", "snapkv", "pyramidkv", "streaming-llm"];
    let budgets = options.budgets(&bench.common);
    let own = names.iter().map(|name| json!({"policy": name})).collect();
    let own = bench.common.built(own, &budgets)?;
    quality::run(bench, options, own, &budgets).map(drop)
}
