//! The overview that runs without a suite: a little of everything, on the embedded model.

use super::{attention, perplexity, quality, throughput};
use crate::bench::ModelBench;
use crate::options::{Attention, Throughput, WARM_UP};
use crate::prompts::{Mode, Prompts};

/// Shares kept where no budget is given.
const BUDGETS: [f64; 2] = [0.5, 0.25];

/// Prompts, so that two processor cores are done within two minutes.
const PROMPTS: usize = 16;
const QUICK_PROMPTS: usize = 8;

/// Runs the overview.
pub(crate) fn run(bench: &mut ModelBench<'_>) -> anyhow::Result<()> {
    let policy_runs = bench.common.policy_runs(&BUDGETS)?;
    let mut prompts = Prompts::load(None)?;
    prompts.limit(if bench.common.quick { QUICK_PROMPTS } else { PROMPTS });
    quality::retrieval(bench, &policy_runs, prompts, Mode::Both)?;
    let texts = perplexity::Text::read(bench, None, &[])?;
    perplexity::run(bench, &policy_runs, texts)?;
    let attention = Attention { limit: 2, steps: 8, ..Attention::default() };
    attention::measure(bench, &policy_runs, &attention)?;
    let positions = bench.model.config().max_positions;
    let lengths = vec![1000.min(positions / 2)];
    let throughput = Throughput {
        lengths,
        batches: vec![1],
        steps: 32,
        warm_up: WARM_UP,
        memory_cap: None,
        tensor_parallel: None,
    };
    throughput::run(bench, &throughput)
}
