//! Error and run time of BalanceKV's compression of one layer by block and rate (BalanceKV, figure
//! 3), on the keys and values of prompts, or on made-up ones at the size of Llama 3.1 8B's layers.

use serde_json::json;

use super::SUITE;
use super::layer::{self, Clustered, LayerPrompt, mean_and_deviation, relative_error};
use crate::bench::{Bench, ModelBench, Sizes};
use crate::options::PaperOptions;
use crate::policy_runs::PolicyRun;
use crate::progress::Progress;
use crate::record::{Case, FULL, metric};

const BLOCKS: [usize; 3] = [64, 128, 256];
const ROUNDS: [u32; 3] = [1, 2, 3];
/// Results of the paper's figure for blocks of 256, in seconds, on an A100: layers 1 and 15.
const PUBLISHED: [(&str, [f64; 3]); 2] = [
    ("A100, published: layer 1", [0.0603, 0.1190, 0.1793]),
    ("A100, published: layer 15", [0.3920, 0.4505, 0.5096]),
];
const WINDOW: usize = 256;
const SEEDS: u64 = 5;
/// The paper's layers, as far as a model has them.
const LAYERS: [usize; 2] = [1, 15];

/// The results of a setting.
struct Measured {
    block: usize,
    rounds: u32,
    /// Relative errors, a seed each.
    errors: Vec<f64>,
    /// Times of the compression.
    seconds: Vec<f64>,
}

impl Measured {
    fn label(&self) -> String {
        format!("balancekv block={}", self.block)
    }

    fn rate(&self) -> f64 {
        0.5f64.powi(self.rounds as i32)
    }

    fn median_seconds(&self) -> f64 {
        let mut seconds = self.seconds.clone();
        seconds.sort_by(f64::total_cmp);
        seconds[seconds.len() / 2]
    }
}

/// Runs the figure on a made-up layer, or on prompts where a model or prompts are asked for.
///
/// # Errors
/// Where a policy or the device refuses.
pub(crate) fn run(
    bench: &mut Bench,
    name: &str,
    options: &PaperOptions,
    prompts: Sizes<usize>,
) -> anyhow::Result<()> {
    if bench.common.model.is_some() || options.names_prompts() {
        let model = bench.common.model().to_string();
        return on_prompts(&mut ModelBench::load(bench, &model)?, name, options, prompts);
    }
    let (quick, seed) = (bench.common.quick, bench.common.seed);
    let layer = match quick {
        false => Clustered { query_heads: 32, kv_heads: 8, tokens: 8192, head_dim: 128 },
        true => Clustered { query_heads: 4, kv_heads: 2, tokens: 2048, head_dim: 64 },
    };
    let prompt = layer.draw(seed, &bench.device, bench.dtype());
    let mut progress = Progress::new(BLOCKS.len() * ROUNDS.len(), name);
    let measured = measure(&prompt, seed, &mut progress)?;
    progress.finish();
    let mut record = |policy: &str, rate: f64, metric: &str, value: f64| {
        let case = Case::of(name).length(layer.tokens);
        bench.record(SUITE, &case, (policy, Some(rate)), metric, value);
    };
    for setting in &measured {
        let (label, rate) = (setting.label(), setting.rate());
        record(&label, rate, metric::RELATIVE_ERROR, mean_and_deviation(&setting.errors).0);
        record(&label, rate, metric::TIME_US, setting.median_seconds() * 1e6);
    }
    if !quick {
        for (label, seconds) in PUBLISHED {
            for (rounds, seconds) in ROUNDS.into_iter().zip(seconds) {
                record(label, 0.5f64.powi(rounds as i32), metric::TIME_US, seconds * 1e6);
            }
        }
    }
    Ok(())
}

/// Runs the figure on the paper's layers of prompts.
///
/// # Errors
/// Where a policy or the device refuses, and where the prompts are too short.
fn on_prompts(
    bench: &mut ModelBench<'_>,
    name: &str,
    options: &PaperOptions,
    prompts: Sizes<usize>,
) -> anyhow::Result<()> {
    let limit = *prompts.of(bench.common.quick);
    let (source, prompts) = layer::prompts(bench, options, limit, WINDOW)?;
    let count = bench.model.config().num_layers;
    let layers: Vec<usize> = LAYERS.into_iter().filter(|layer| *layer < count).collect();
    let steps = prompts.len() * layers.len() * BLOCKS.len() * ROUNDS.len();
    let mut progress = Progress::new(steps, name);
    let mut all: Vec<Vec<Measured>> = layers.iter().map(|_| Vec::new()).collect();
    let seed = bench.common.seed;
    for tokens in &prompts {
        layer::observe(bench, tokens, &layers, &mut |prompt| {
            let at = layers.iter().position(|layer| *layer == prompt.layer.index);
            let measured = measure(prompt, seed, &mut progress)?;
            if let Some(all) = at.map(|at| &mut all[at]) {
                join(all, measured);
            }
            Ok(())
        })?;
    }
    progress.finish();
    let length = prompts.iter().map(Vec::len).sum::<usize>() / prompts.len();
    for (layer, measured) in layers.into_iter().zip(&all) {
        let case = Case::of(name).length(length).layer(layer).samples_of(&source, prompts.len());
        for setting in measured {
            let label = setting.label();
            let setup = (label.as_str(), Some(setting.rate()));
            let (error, micros) =
                (mean_and_deviation(&setting.errors).0, setting.median_seconds() * 1e6);
            bench.record(SUITE, &case, setup, metric::RELATIVE_ERROR, error);
            bench.record(SUITE, &case, setup, metric::TIME_US, micros);
        }
    }
    Ok(())
}

/// Adds another prompt's measurements.
fn join(all: &mut Vec<Measured>, more: Vec<Measured>) {
    if all.is_empty() {
        *all = more;
        return;
    }
    for (all, more) in all.iter_mut().zip(more) {
        all.errors.extend(more.errors);
        all.seconds.extend(more.seconds);
    }
}

/// Compresses a layer in blocks of every size at every rate.
fn measure(
    prompt: &LayerPrompt,
    seed: u64,
    progress: &mut Progress,
) -> anyhow::Result<Vec<Measured>> {
    let full = PolicyRun::of(&json!({"policy": FULL}))?;
    let exact = prompt.run(&*full.policy, WINDOW, 0)?.output;
    let tokens = prompt.keys.dims()[2] - WINDOW;
    let mut all = Vec::new();
    for block in BLOCKS {
        for rounds in ROUNDS {
            let budget = WINDOW + ((tokens - WINDOW) >> rounds);
            let config = json!({
                "policy": "balancekv", "budget": budget, "block": block, "sinks": WINDOW,
                "recents": 0,
            });
            let policy_run = PolicyRun::of(&config)?;
            let mut measured = Measured { block, rounds, errors: Vec::new(), seconds: Vec::new() };
            // The first run compiles.
            for turn in 0..=SEEDS {
                let outcome = prompt.run(&*policy_run.policy, WINDOW, seed + turn)?;
                if turn > 0 {
                    measured.errors.push(relative_error(&outcome.output, &exact));
                    measured.seconds.push(outcome.seconds);
                }
            }
            all.push(measured);
            progress.step();
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use crate::record::metric;
    use crate::testing::{quick, ran};

    #[test]
    fn blocks_are_measured_on_made_up_layers_and_on_prompts() {
        let (made_up, report) = quick("balancekv-fig3");
        assert!(made_up.iter().all(|r| r.case.layer.is_none() && r.model.is_empty()));
        assert!(report.contains("made-up clusters"));
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("own.jsonl");
        let prompt = "The sea was calm that day, and the old boat lay upon the sand. ".repeat(70);
        let line = serde_json::json!({"task": "t", "length": 900, "prompt": prompt, "answer": "a"});
        std::fs::write(&file, format!("{line}\n")).unwrap();
        let file = file.display().to_string();
        let (real, _) = ran(&["paper", "balancekv-fig3", "--quick", "--prompts", &file]).unwrap();
        let errors: Vec<_> = real.iter().filter(|r| r.metric == metric::RELATIVE_ERROR).collect();
        // One of the paper's two layers is in a model of four.
        assert_eq!(errors.len(), 9);
        for record in errors {
            assert_eq!((record.case.layer, record.model.as_str()), (Some(1), "needle-1m"));
            assert_eq!(record.case.source.as_deref(), Some("own.jsonl"));
            assert!(record.value > 0.0 && record.value < 1.0, "{}", record.value);
        }
    }
}
