//! Perplexity of a text's own tokens in prefill, under policies that change a prompt's computation
//! by windows or frozen tokens: frozen tokens' own predictions count.

use anyhow::ensure;
use burn::tensor::Tensor;
use kv_core::read_f32;
use kv_models::PrefillPass;
use kv_policies::Policy;

use super::next_token::judge;
use super::perplexity::Text;
use crate::bench::ModelBench;
use crate::policy_runs::PolicyRun;
use crate::progress::Progress;
use crate::record::{Case, metric};

const SUITE: &str = "quality";
const TASK: &str = "prefill-perplexity";
/// Tokens whose logits are on the host at a time.
const CHUNK: usize = 256;

/// Prefills every text, context and continuation together: once as the model computes it, and once
/// under each policy that changes prefill. Policies that prune tokens are left out with a note, as
/// pruned tokens predict nothing.
///
/// # Errors
/// Where a policy refuses, and for NaN in the model's output.
pub(crate) fn run(
    bench: &mut ModelBench<'_>,
    policy_runs: &[PolicyRun],
    texts: &[Text],
) -> anyhow::Result<()> {
    let full = &policy_runs[..1];
    let changing = policy_runs[1..].iter().filter(|own| own.policy.capabilities().changes_prefill);
    let policy_runs: Vec<&PolicyRun> = full.iter().chain(changing).collect();
    let mut progress = Progress::new(texts.len() * policy_runs.len(), TASK);
    for text in texts {
        let tokens = text.tokens();
        for policy_run in &policy_runs {
            let perplexity = perplexity(bench, &*policy_run.policy, &tokens)?;
            progress.step();
            let Some(perplexity) = perplexity else {
                let label = &policy_run.label;
                bench.note(format!("{label} prunes tokens in prefill, which then predict nothing"));
                continue;
            };
            let case =
                Case::of(TASK).length(tokens.len()).samples_of(text.source(), tokens.len() - 1);
            let setup = policy_run.setup();
            bench.record(SUITE, &case, setup, metric::PREFILL_PERPLEXITY, perplexity);
        }
    }
    progress.finish();
    Ok(())
}

/// The perplexity of all tokens but the first, each given the tokens before it; `None` where some
/// are pruned.
fn perplexity(
    bench: &ModelBench<'_>,
    policy: &dyn Policy,
    tokens: &[u32],
) -> anyhow::Result<Option<f64>> {
    let llama = bench.model.llama();
    let seeds = [bench.common.seed];
    let by = policy.capabilities().changes_prefill.then_some(policy);
    let needs = by.map(Policy::needs).unwrap_or_default();
    let pass = PrefillPass { needs, by, seeds: &seeds, ..PrefillPass::default() };
    let mut prunes = false;
    let prefilled = llama.prefill(&[tokens], pass, &mut |observation| {
        if let Some(policy) = by {
            prunes |= policy.prune(observation)?.is_some();
        }
        Ok(None)
    })?;
    if prunes {
        return Ok(None);
    }
    let [_, count, width] = prefilled.hidden.dims();
    let hidden: Tensor<2> = prefilled.hidden.reshape([count, width]);
    let mut sum = 0.0;
    for start in (0..count - 1).step_by(CHUNK) {
        let rows = CHUNK.min(count - 1 - start);
        let logits = llama.logits(hidden.clone().narrow(0, start, rows))?;
        let logits = read_f32("logits", logits)?;
        let next = tokens[start + 1..].iter();
        for (logits, &token) in logits.chunks(bench.model.config().vocab_size).zip(next) {
            sum += judge(logits, token).0;
        }
    }
    ensure!(sum.is_finite(), "the model's output holds NaN or Inf");
    Ok(Some((-sum / (count - 1) as f64).exp()))
}

#[cfg(test)]
mod tests {
    use kv_models::{Model, Session};
    use kv_parallel::Ranks;
    use serde_json::json;

    use super::*;
    use crate::args::Args;
    use crate::bench::Bench;
    use crate::record_log::RecordLog;
    use crate::suites::next_token::rows;
    use clap::Parser;

    /// The perplexity of the tokens that a session is fed one by one.
    fn fed(model: &Model, policy: &PolicyRun, tokens: &[u32]) -> f64 {
        let first = [vec![tokens[0]]];
        let mut session =
            Session::start(model, policy.policy.clone(), &first, &[0], tokens.len()).unwrap();
        let rows = rows(session.append(&[&tokens[1..]]).unwrap()).unwrap();
        let rows = rows.chunks(model.config().vocab_size).zip(&tokens[1..]);
        let sum: f64 = rows.map(|(logits, &token)| judge(logits, token).0).sum();
        (-sum / (tokens.len() - 1) as f64).exp()
    }

    #[test]
    fn a_prompt_s_own_tokens_are_judged_under_what_policies_do_to_prefill() {
        let text = "The sea was calm that day, and the old boat lay upon the sand. ".repeat(8);
        let args = Args::try_parse_from(["kv-bench", "--device", "cpu"]).unwrap();
        let mut bench = Bench::new(&args.common, Ranks::alone(), RecordLog::begin(None)).unwrap();
        let bench = ModelBench::load(&mut bench, "needle-1m").unwrap();
        let tokens = bench.model.encode(&text).unwrap();
        let of = |config| {
            let policy_run = PolicyRun::of(&config).unwrap();
            perplexity(&bench, &*policy_run.policy, &tokens).unwrap()
        };
        let full = PolicyRun::of(&json!({"policy": "full"})).unwrap();
        let own = perplexity(&bench, &*full.policy, &tokens).unwrap().unwrap();
        let expected = fed(&bench.model, &full, &tokens);
        assert!((own / expected - 1.0).abs() < 1e-4, "{own} for {expected}");
        for config in [
            json!({"policy": "psaw", "start": 0, "phi": 0.1, "sinks": 0}),
            json!({"policy": "etf", "start": 0, "psi": 0.1, "sinks": 0}),
        ] {
            let changed = of(config.clone()).unwrap();
            assert!((changed - own).abs() > 1e-3 * own, "{config}: {changed}, full {own}");
        }
        assert_eq!(of(json!({"policy": "pyramidinfer", "budget": 0.2})), None);
    }
}
