//! Relative error of one layer's attention by rate: BalanceKV and uniform sampling, on real
//! queries, keys and values and on made-up ones (BalanceKV, figure 1).

use serde_json::json;

use super::SUITE;
use super::layer::{self, Clustered, LayerPrompt, mean_and_deviation, relative_error};
use crate::bench::ModelBench;
use crate::options::PaperOptions;
use crate::policy_runs::PolicyRun;
use crate::progress::Progress;
use crate::record::{Case, FULL, metric};

/// Rates `2^-T`.
const ROUNDS: u32 = 4;
/// First tokens kept exactly in the paper, as far as a quarter of the prompt goes.
const SINKS: usize = 256;

/// The seeds, queries and prompts that errors are means over.
pub(crate) struct Size {
    /// Seeds of each policy.
    pub(crate) seeds: u64,
    /// Last queries of a prompt.
    pub(crate) window: usize,
    /// Prompts, which `--limit` replaces.
    pub(crate) prompts: usize,
}

/// Runs the figure.
///
/// # Errors
/// Where a policy or the device refuses.
pub(crate) fn run(
    bench: &mut ModelBench<'_>,
    name: &str,
    options: &PaperOptions,
    size: &Size,
) -> anyhow::Result<()> {
    let (source, prompts) = layer::prompts(bench, options, size.prompts, size.window)?;
    let count = bench.model.config().num_layers;
    let layers: Vec<usize> = (0..count).collect();
    let mut progress = Progress::new(prompts.len() * count + 1, name);
    let mut sums: Vec<Vec<Vec<f64>>> = vec![Vec::new(); count];
    for tokens in &prompts {
        layer::observe(bench, tokens, &layers, &mut |prompt| {
            add(&mut sums[prompt.layer.index], errors(prompt, size)?);
            progress.step();
            Ok(())
        })?;
    }
    for (layer, sums) in sums.iter().enumerate() {
        let case = Case::of(name).layer(layer).samples_of(&source, prompts.len());
        record(bench, &case, sums, prompts.len());
    }
    let clustered = Clustered { query_heads: 8, kv_heads: 2, tokens: 4096, head_dim: 128 };
    let device = bench.device.clone();
    let prompt = clustered.draw(bench.common.seed, &device, bench.model.llama().dtype());
    let case = Case::of(format!("{name}, clustered"));
    record(bench, &case, &errors(&prompt, size)?, 1);
    progress.step();
    progress.finish();
    Ok(())
}

/// The policies and rates, in the order of all errors.
fn setups() -> impl Iterator<Item = (&'static str, u32)> {
    let names = ["balancekv", "uniform"].into_iter();
    names.flat_map(|name| (1..=ROUNDS).map(move |rounds| (name, rounds)))
}

/// Errors by setup and seed.
fn errors(prompt: &LayerPrompt, size: &Size) -> anyhow::Result<Vec<Vec<f64>>> {
    let tokens = prompt.keys.dims()[2] - size.window;
    let sinks = SINKS.min(tokens / 4);
    let full = PolicyRun::of(&json!({"policy": FULL}))?;
    let exact = prompt.run(&*full.policy, size.window, 0)?.output;
    setups()
        .map(|(name, rounds)| {
            let budget = sinks + ((tokens - sinks) >> rounds);
            let config = json!({"policy": name, "budget": budget, "sinks": sinks, "recents": 0});
            let policy = PolicyRun::of(&config)?.policy;
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
fn record(bench: &mut ModelBench<'_>, case: &Case, sums: &[Vec<f64>], count: usize) {
    for ((name, rounds), sums) in setups().zip(sums) {
        let errors: Vec<f64> = sums.iter().map(|sum| sum / count as f64).collect();
        let (mean, deviation) = mean_and_deviation(&errors);
        let setup = (name, Some(0.5f64.powi(rounds as i32)));
        bench.record(SUITE, case, setup, metric::RELATIVE_ERROR, mean);
        bench.record(SUITE, case, setup, metric::ERROR_DEVIATION, deviation);
    }
}
