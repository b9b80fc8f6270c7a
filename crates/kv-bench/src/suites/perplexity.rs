//! Perplexity of real text behind a compressed context, by position, and the divergence from the
//! full cache's next-token distributions.
//!
//! The full cache's logits stay in host memory while the policies are compared with them: a row of
//! the vocabulary for each token behind the context in f32, 96 MiB for 512 tokens and 49,152
//! entries. The logits of the policies are there for a bucket of tokens at a time. No policy
//! prefills for it again.

use std::path::Path;

use anyhow::ensure;
use kv_core::counted;
use kv_models::{Sampling, Session};
use kv_policies::Policy;

use super::next_token::{by_position, judge_rows, rows};
use crate::bench::ModelBench;
use crate::policy_runs::PolicyRun;
use crate::progress::Progress;
use crate::prompts;
use crate::record::{Case, metric};

const SUITE: &str = "quality";
/// Tokens of a bucket of positions.
const BUCKET: usize = 64;
const TASK: &str = "perplexity";
/// The cost of a bucket that is decoded token by token, over the cost of a bucket that is fed at
/// once. The ratio was measured on CPUs; progress is weighed by it.
const TOKEN_BY_TOKEN: usize = 8;

/// A text, its context to be compressed.
#[derive(Debug, Clone)]
pub(crate) struct Text {
    source: String,
    context: Vec<u32>,
    next: Vec<u32>,
}

impl Text {
    /// The file's name.
    pub(crate) fn source(&self) -> &str {
        &self.source
    }

    /// The tokens of the context and of the text behind it.
    pub(crate) fn tokens(&self) -> Vec<u32> {
        [&self.context[..], &self.next].concat()
    }

    /// Reads a file, or the embedded text, for each of `contexts`; for one that fits, where there
    /// are none.
    ///
    /// # Errors
    /// Where the file cannot be read, is too short, or a context leaves the model no positions.
    pub(crate) fn read(
        bench: &ModelBench<'_>,
        path: Option<&Path>,
        contexts: &[usize],
    ) -> anyhow::Result<Vec<Self>> {
        let (source, text) = prompts::text(path)?;
        let tokens = bench.model.encode(&text)?;
        let positions = bench.model.config().max_positions;
        let (default, continued) = if bench.common.quick { (512, 128) } else { (1536, 512) };
        let own = [default.min(positions * 3 / 4).min(tokens.len() / 2)];
        let contexts = if contexts.is_empty() { &own } else { contexts };
        let text = |&context: &usize| {
            let most = positions.min(tokens.len());
            ensure!(
                context + continued <= most || contexts == own,
                "{source} has {} and the model {}: no perplexity of {continued} tokens behind \
                 {context}",
                counted(tokens.len(), "token"),
                counted(positions, "position")
            );
            let next = tokens[context..most.min(context + continued)].to_vec();
            Ok(Self { source: source.clone(), context: tokens[..context].to_vec(), next })
        };
        let anew = |at: usize| !contexts[..at].contains(&contexts[at]);
        (0..contexts.len()).filter(|at| anew(*at)).map(|at| text(&contexts[at])).collect()
    }
}

/// Runs texts under all policies: a context is compressed, the rest is fed token by token.
pub(crate) fn run(
    bench: &mut ModelBench<'_>,
    policy_runs: &[PolicyRun],
    texts: Vec<Text>,
) -> anyhow::Result<()> {
    texts.into_iter().try_for_each(|text| measure(bench, policy_runs, text))
}

fn measure(
    bench: &mut ModelBench<'_>,
    policy_runs: &[PolicyRun],
    text: Text,
) -> anyhow::Result<()> {
    let Text { source, context: prompt, next } = text;
    let (context, continued) = (prompt.len(), next.len());
    let policies = PolicyRun::policies(policy_runs);
    let seed = bench.common.seed;
    let work =
        |policy: &dyn Policy| if policy.capabilities().changes_decode { TOKEN_BY_TOKEN } else { 1 };
    let buckets = continued.div_ceil(BUCKET);
    let all = policies.iter().map(|policy| work(&**policy) * buckets).sum();
    let mut progress = Progress::new(all, TASK);
    let sessions = Session::start_many(&bench.model, &policies, &[prompt], &[seed], continued)?;
    let vocabulary = bench.model.config().vocab_size;
    let mut results: Vec<Vec<(f64, u32)>> = Vec::new();
    let mut divergences: Vec<Vec<f64>> = Vec::new();
    let mut full: Vec<f32> = Vec::new();
    for session in sessions {
        let mut decoder = session.decoder(&[Sampling::greedy()])?;
        let first = results.is_empty();
        let (mut judged, mut divergence) = (Vec::new(), Vec::new());
        for (index, tokens) in next.chunks(BUCKET).enumerate() {
            let rows = rows(decoder.append(&[tokens])?)?;
            judged.extend(judge_rows(&rows, tokens, vocabulary));
            // The full cache runs first.
            if first {
                full.extend_from_slice(&rows);
            }
            let full = &full[index * BUCKET * vocabulary..][..rows.len()];
            divergence.extend(by_position(full, &rows, vocabulary));
            progress.advance(work(decoder.session().policy()));
        }
        results.push(judged);
        divergences.push(divergence);
    }
    progress.finish();
    let full: Vec<u32> = results[0].iter().map(|(_, best)| *best).collect();
    for ((policy_run, judged), divergences) in policy_runs.iter().zip(&results).zip(&divergences) {
        let setup = policy_run.setup();
        let perplexity = |judged: &[(f64, u32)]| {
            (-judged.iter().map(|(logprob, _)| logprob).sum::<f64>() / judged.len() as f64).exp()
        };
        let case = Case::of(TASK).length(context).samples_of(&source, continued);
        bench.record(SUITE, &case, setup, metric::PERPLEXITY, perplexity(judged));
        let same = judged.iter().zip(&full).filter(|((_, best), full)| best == *full).count();
        let agreement = same as f64 / full.len() as f64;
        bench.record(SUITE, &case, setup, metric::TEXT_AGREEMENT, agreement);
        let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
        bench.record(SUITE, &case, setup, metric::TEXT_KL_DIVERGENCE, mean(divergences));
        let buckets = judged.chunks(BUCKET).zip(divergences.chunks(BUCKET));
        for (index, (bucket, divergences)) in buckets.enumerate() {
            let (position, samples) = (Some(context + index * BUCKET), Some(bucket.len()));
            let case = Case { position, samples, ..case.clone() };
            bench.record(SUITE, &case, setup, metric::PERPLEXITY, perplexity(bucket));
            bench.record(SUITE, &case, setup, metric::TEXT_KL_DIVERGENCE, mean(divergences));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::TASK;
    use crate::args::Args;
    use crate::record::{metric, read_json};
    use crate::testing::ran;

    fn quality(options: &str, json: &std::path::Path) -> anyhow::Result<()> {
        let line = format!(
            "kv-bench quality --quick --device cpu --policy full --limit 1 {options} --json {} \
             --report {}",
            json.display(),
            json.with_extension("html").display()
        );
        crate::run::run(&Args::try_parse_from(line.split_whitespace())?).map(drop)
    }

    #[test]
    fn divergences_are_from_the_full_cache() {
        let policy = r#"{"policy": "streaming-llm", "decode": false}"#;
        let (records, report) =
            ran(&["quality", "--quick", "--policy", policy, "--budget", "1.0,0.1"]).unwrap();
        for name in [metric::KL_DIVERGENCE, metric::TEXT_KL_DIVERGENCE] {
            let of = |budget: Option<f64>| -> Vec<f64> {
                let own = records.iter().filter(|r| r.metric == name && r.budget == budget);
                own.map(|r| r.value).collect()
            };
            let (full, all, tenth) = (of(None), of(Some(1.0)), of(Some(0.1)));
            assert!(!full.is_empty() && full.len() == all.len() && full.len() == tenth.len());
            assert!(full.iter().all(|value| *value == 0.0), "{name}: {full:?}");
            // All tokens are kept: logits differ by the rounding of other launches, about 1e-3.
            assert!(all.iter().all(|value| (0.0..1e-5).contains(value)), "{name}: {all:?}");
            let mean = tenth.iter().sum::<f64>() / tenth.len() as f64;
            assert!(mean > 0.01 && tenth.iter().all(|value| *value >= 0.0), "{name}: {tenth:?}");
        }
        assert!(report.contains("KL<br>on text"));
    }

    #[test]
    fn every_context_has_its_perplexity() {
        let folder = tempfile::tempdir().unwrap();
        let json = folder.path().join("records.json");
        quality("--contexts 200,300,200", &json).unwrap();
        let records = read_json(&json).unwrap();
        let whole = records.iter().filter(|record| {
            let task = record.case.task.as_deref() == Some(TASK);
            task && record.metric == metric::PERPLEXITY && record.case.position.is_none()
        });
        let lengths: Vec<_> = whole.map(|record| record.case.length).collect();
        assert_eq!(lengths, [Some(200), Some(300)]);
        let refused = |options: &str| quality(options, &json).unwrap_err().to_string();
        assert!(refused("--contexts 9000").contains("no perplexity of 128 tokens behind 9000"));
        assert!(refused("--contexts 200 --no-perplexity").contains("reads no text"));
    }
}
