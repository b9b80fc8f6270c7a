//! KeepKV, table 1: tokens a second and memory by batch, each policy up to the largest that fits,
//! and the share of a step that merging takes.

use serde_json::{Value, json};

use super::BUDGET;
use crate::args::Paper;
use crate::bench::ModelBench;
use crate::record::{FULL, metric};
use crate::suites::paper::SUITE;
use crate::suites::paper::by_batch::{self, Runs, Size, case};

const PAPER: Size = Size { context: 4_096, steps: 64 };
const QUICK: Size = Size { context: 512, steps: 16 };
/// The paper's GPU.
const MEMORY_GIB: f64 = 80.0;
/// Who merges what whom evicts.
const MERGING: [(&str, &str); 3] =
    [("d2o", "h2o"), ("keepkv(h2o)", "h2o"), ("keepkv", "recent-attention")];
/// Results of the paper's table.
const PUBLISHED: &str = "the paper, Llama-2-7B on an A100 of 80 GB: full cache 117 tokens/s at \
    batch 2; at batch 8 H2O 317, D2O 215, KeepKV 256";

/// Runs the table.
///
/// # Errors
/// As [`by_batch::run`].
pub(crate) fn run(bench: &mut ModelBench<'_>, options: &Paper) -> anyhow::Result<()> {
    let quick = bench.common.quick;
    let size = if quick { QUICK } else { PAPER };
    let size = size.within(bench.model.config().max_positions)?;
    let at = |name: &str| json!({"policy": name, "budget": BUDGET});
    let configs: [Value; 6] = [
        json!({"policy": FULL}),
        at("h2o"),
        at("recent-attention"),
        at("d2o"),
        json!({"policy": "keepkv", "budget": BUDGET, "evictor": "h2o"}),
        at("keepkv"),
    ];
    let contenders = super::contenders(&configs)?;
    let all = by_batch::run(bench, options, contenders, size, MEMORY_GIB)?;
    record_merging(bench, options, &size, &all);
    if !quick {
        bench.note(PUBLISHED.into());
    }
    Ok(())
}

/// The share of a step that merging takes, of steps at equal batch.
fn record_merging(bench: &mut ModelBench<'_>, options: &Paper, size: &Size, all: &Runs) {
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
            let case = case(options, size, "by batch", run.batch);
            bench.record(SUITE, &case, setup, metric::MERGING_SHARE, share, "share");
        }
    }
}
