//! BalanceKV, figure 1: relative error of one layer's attention by rate, beside uniform sampling, on
//! real queries, keys and values and on made-up ones.

use anyhow::ensure;
use kv_models::PrefillPass;
use kv_policies::Needs;
use serde_json::json;

use super::SUITE;
use super::layer::{Clustered, LayerPrompt, relative_error, spread};
use crate::contenders::Contender;
use crate::progress::Progress;
use crate::prompts::Prompts;
use crate::record::{Case, FULL, metric};
use crate::run::Bench;

/// Rates `2^-T`.
const ROUNDS: u32 = 4;
/// Seeds, and last queries, of the paper and for small machines.
const PAPER: Size = Size { seeds: 10, window: 256, prompts: 4 };
const QUICK: Size = Size { seeds: 3, window: 64, prompts: 2 };
/// First tokens kept exactly in the paper, as far as a quarter of the prompt goes.
const SINKS: usize = 256;

struct Size {
    seeds: u64,
    window: usize,
    prompts: usize,
}

/// Runs the figure.
///
/// # Errors
/// Where a policy or the device refuses.
pub(crate) fn run(bench: &mut Bench<'_>) -> anyhow::Result<()> {
    let size = if bench.common.quick { QUICK } else { PAPER };
    let mut prompts = Prompts::load(None)?;
    let longest = prompts.list.iter().map(|prompt| prompt.length).max().unwrap_or_default();
    prompts.list.retain(|prompt| prompt.length == longest);
    prompts.limit(size.prompts);
    let layers = bench.model.config().num_layers;
    let mut progress = Progress::new(prompts.list.len() * layers + 1, "balancekv-fig1");
    let mut sums: Vec<Vec<Vec<f64>>> = Vec::new();
    for prompt in &prompts.list {
        let tokens = bench.model.encode(&prompt.prompt)?;
        ensure!(tokens.len() > 2 * size.window, "the prompts are shorter than two windows");
        let mut observed = Vec::new();
        let pass = PrefillPass {
            needs: Needs { window: usize::MAX, column_sums: false, raw_queries: false },
            ..PrefillPass::default()
        };
        bench.model.llama().prefill(&[&tokens], pass, &mut |observation| {
            if let Some(queries) = &observation.window {
                observed.push(LayerPrompt {
                    queries: queries.clone(),
                    keys: observation.keys.clone(),
                    values: observation.values.clone(),
                    layer: observation.layer,
                });
            }
            Ok(None)
        })?;
        for (layer, prompt) in observed.iter().enumerate() {
            if sums.len() <= layer {
                sums.push(Vec::new());
            }
            add(&mut sums[layer], errors(prompt, &size)?);
            progress.step();
        }
    }
    let count = prompts.list.len();
    for (layer, sums) in sums.iter().enumerate() {
        let case = Case {
            task: Some("balancekv-fig1".into()),
            layer: Some(layer),
            samples: Some(count),
            ..Case::default()
        };
        record(bench, &case, sums, count);
    }
    let clustered = Clustered { query_heads: 8, kv_heads: 2, tokens: 4096, head_dim: 128 };
    let device = bench.device.clone();
    let prompt = clustered.draw(bench.common.seed, &device, bench.model.llama().dtype());
    let case = Case { task: Some("balancekv-fig1, clustered".into()), ..Case::default() };
    record(bench, &case, &errors(&prompt, &size)?, 1);
    progress.step();
    progress.finish();
    Ok(())
}

/// Who runs at which rate, in the order of all errors.
fn setups() -> impl Iterator<Item = (&'static str, u32)> {
    let names = ["balancekv", "uniform"].into_iter();
    names.flat_map(|name| (1..=ROUNDS).map(move |rounds| (name, rounds)))
}

/// Errors by setup and seed.
fn errors(prompt: &LayerPrompt, size: &Size) -> anyhow::Result<Vec<Vec<f64>>> {
    let tokens = prompt.keys.dims()[2] - size.window;
    let sinks = SINKS.min(tokens / 4);
    let full = Contender::of(&json!({"policy": FULL}))?;
    let exact = prompt.run(&*full.policy, size.window, 0)?.output;
    setups()
        .map(|(name, rounds)| {
            let budget = sinks + ((tokens - sinks) >> rounds);
            let config = json!({"policy": name, "budget": budget, "sinks": sinks, "recents": 0});
            let policy = Contender::of(&config)?.policy;
            (0..size.seeds)
                .map(|seed| {
                    let outcome = prompt.run(&*policy, size.window, seed)?;
                    Ok(relative_error(&outcome.output, &exact))
                })
                .collect()
        })
        .collect()
}

/// Sums errors of another prompt.
fn add(sums: &mut Vec<Vec<f64>>, errors: Vec<Vec<f64>>) {
    if sums.is_empty() {
        *sums = errors;
        return;
    }
    for (sums, errors) in sums.iter_mut().zip(errors) {
        sums.iter_mut().zip(errors).for_each(|(sum, error)| *sum += error);
    }
}

/// Records mean and deviation over seeds of errors that are means over `count` prompts.
fn record(bench: &mut Bench<'_>, case: &Case, sums: &[Vec<f64>], count: usize) {
    for ((name, rounds), sums) in setups().zip(sums) {
        let errors: Vec<f64> = sums.iter().map(|sum| sum / count as f64).collect();
        let (mean, deviation) = spread(&errors);
        let setup = (name, Some(0.5f64.powi(rounds as i32)));
        bench.record(SUITE, case, setup, metric::RELATIVE_ERROR, mean, "ratio");
        bench.record(SUITE, case, setup, metric::ERROR_DEVIATION, deviation, "ratio");
    }
}
