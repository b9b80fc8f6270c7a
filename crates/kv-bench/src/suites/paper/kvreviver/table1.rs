//! KVReviver, table 1: tokens a second and memory by batch, attending to the sketch and rebuilding
//! the cache, each up to the largest batch that fits.

use serde_json::json;

use crate::args::Paper;
use crate::bench::ModelBench;
use crate::contenders::Contender;
use crate::record::FULL;
use crate::suites::paper::by_batch::{self, Size};

/// Llama-2's positions.
const PAPER: Size = Size { context: 2_048, steps: 64 };
const QUICK: Size = Size { context: 512, steps: 16 };
/// Share kept.
const BUDGET: f64 = 0.1;
/// The paper's GPU.
const MEMORY_GIB: f64 = 80.0;
/// Results of the paper's table.
const PUBLISHED: &str = "the paper, Llama-2-7B on an A100 of 80 GB, at 10 %: full cache 12.7 \
    tokens/s at batch 1 and 21.5 at batch 2; KVReviver, which rebuilds, 6.5 at batch 1, 10.2 at 2, \
    19.1 at 8, 22.5 at 16";

/// Runs the table.
///
/// # Errors
/// As [`by_batch::run`].
pub(crate) fn run(bench: &mut ModelBench<'_>, options: &Paper) -> anyhow::Result<()> {
    let quick = bench.common.quick;
    let size = if quick { QUICK } else { PAPER };
    let size = size.within(bench.model.config().max_positions)?;
    let configs = [
        json!({"policy": FULL}),
        json!({"policy": "kvreviver", "budget": BUDGET}),
        json!({"policy": "kvreviver", "budget": BUDGET, "rebuild": true}),
    ];
    let contenders = configs.iter().map(Contender::of).collect::<anyhow::Result<_>>()?;
    by_batch::run(bench, options, contenders, size, MEMORY_GIB)?;
    if !quick {
        bench.note(PUBLISHED.into());
    }
    Ok(())
}
