//! PrHS, table 5: decode throughput at 1/8.

use serde_json::{Value, json};

use super::{HSHARE, cis, contenders, hshare};
use crate::args::Paper;
use crate::bench::ModelBench;
use crate::options::Throughput;
use crate::record::FULL;
use crate::suites::throughput;

/// The paper's lengths, within Llama-2's positions with the steps behind them, and batches.
const LENGTHS: [usize; 3] = [1_024, 2_048, 4_096 - 128];
const BATCHES: [usize; 2] = [8, 16];
const QUICK: (usize, usize) = (256, 2);
const SHARE: f64 = 0.125;
const STEPS: usize = 64;
/// Results of the paper's table.
const PUBLISHED: &str = "the paper, Llama-2-7B on an A100 of 80 GB, tokens/s at batch 16 and 4k: \
    GPT-Fast 136, H2O 396, Quest 175, Double Sparsity 286, HShare 350 and 365, CIS 352 and 364, \
    CPE 362 and 384";

/// Runs the table.
///
/// # Errors
/// Where a policy or the device refuses.
pub(crate) fn run(bench: &mut ModelBench<'_>, options: &Paper) -> anyhow::Result<()> {
    let quick = bench.common.quick;
    let (own_lengths, own_batches): (&[usize], &[usize]) =
        if quick { (&[QUICK.0], &[QUICK.1]) } else { (&LENGTHS, &BATCHES) };
    let asked_or = |asked: &[usize], own: &[usize]| match asked {
        [] => own.to_vec(),
        _ => asked.to_vec(),
    };
    let lengths = asked_or(&options.lengths, own_lengths);
    let batches = asked_or(&options.batches, own_batches);
    let options = Throughput { lengths, batches, steps: STEPS, memory_cap: None };
    throughput::measure(bench, &contenders(&bench.common, &configs(quick))?, &options)?;
    if !quick {
        bench.note(PUBLISHED.into());
    }
    Ok(())
}

/// Who runs; the full cache first.
fn configs(quick: bool) -> Vec<Value> {
    let budget = json!(SHARE);
    let mut configs = vec![json!({"policy": FULL}), json!({"policy": "h2o", "budget": budget})];
    for name in ["quest", "double-sparsity"] {
        configs.push(json!({"policy": name, "budget": budget}));
    }
    configs.extend(HSHARE.map(|ratios| hshare(&budget, ratios)));
    let blocks = if quick { &[16][..] } else { &[8, 16] };
    for name in ["cis", "cpe"] {
        configs.extend(blocks.iter().map(|&block| cis(name, &budget, block)));
        // Queries of random weights are hardly alike: here all steps of a block share, as most do
        // in a trained model.
        let mut shared = cis(name, &budget, 16);
        shared["threshold"] = json!(-1.0);
        configs.push(shared);
    }
    // Sets of an eighth with the neighbours that they bring along.
    let mut star = cis("cis-star", &budget, 16);
    star["threshold"] = json!(-1.0);
    configs.push(star);
    configs
}
