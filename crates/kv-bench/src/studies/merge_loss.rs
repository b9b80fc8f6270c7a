//! The error of the log-sum-exp of a prompt's last query that merges cause (KeepKV, figure 2 c):
//! the log-sum-exp of the compressed cache, weights included, less the log-sum-exp of all tokens.
//! Evictions lose the attention of dropped tokens; merges that count their tokens as one slot lose
//! the attention to all but one of them (theorem 2).

use anyhow::Context;
use burn::tensor::Tensor;
use kv_core::{CacheOptions, LayerCache, counted, read_f32};
use kv_kernels::DecodeAttentionOptions;
use kv_models::PrefillPass;
use kv_policies::{Needs, Observation};
use serde_json::{Value, json};

use super::SUITE;
use crate::bench::ModelBench;
use crate::options::PaperOptions;
use crate::policy_runs::PolicyRun;
use crate::progress::Progress;
use crate::prompts::{Prompts, Wanted};
use crate::record::{Case, FULL, metric};
use crate::suites::policy_records::Votes;

/// The query heads that the merges were made for.
#[derive(Clone, Copy)]
struct Setting {
    name: &'static str,
    /// Whether KeepKV predicts the query's own scores, and drops nothing.
    for_query: bool,
    /// Whether each query head has keys and values of its own: exactness for all heads of a group
    /// is impossible.
    ungrouped: bool,
}

const SETTINGS: [Setting; 3] = [
    Setting { name: "made for the query, heads apart", for_query: true, ungrouped: true },
    Setting { name: "made for the query", for_query: true, ungrouped: false },
    Setting { name: "default options", for_query: false, ungrouped: false },
];
/// Share kept.
const BUDGET: f64 = 0.2;
/// The rules by which KeepKV merges keys.
const KEYS: [&str; 4] = ["paper", "additive", "votes", "mean"];

/// The sums of one policy, over prompts, layers and heads.
#[derive(Clone, Copy, Default)]
struct Sums {
    lse_error: f64,
    worst: f64,
    queries: f64,
    difference: f64,
    norm: f64,
    votes: Votes,
}

/// Attention of one query, by head.
struct Attended {
    log_sum_exp: Vec<f32>,
    output: Vec<f32>,
    votes: Votes,
}

/// Measures at most `limit` prompts, unless another number is asked for.
///
/// # Errors
/// Where a policy or the device refuses.
pub(crate) fn run(
    bench: &mut ModelBench<'_>,
    name: &str,
    options: &PaperOptions,
    limit: usize,
) -> anyhow::Result<()> {
    let labelled = PolicyRun::all(&configs(false))?;
    let apart = bench.model.config().num_query_heads > bench.model.config().num_kv_heads;
    let mut settings = Vec::new();
    // Without groups the first two are one.
    for setting in SETTINGS.into_iter().filter(|setting| apart || setting.name != SETTINGS[1].name)
    {
        let mut policy_runs = PolicyRun::all(&configs(setting.for_query))?;
        // The task names the options that differ from the defaults.
        let labels = labelled.iter().map(|policy_run| &policy_run.label);
        policy_runs.iter_mut().zip(labels).for_each(|(own, label)| own.label.clone_from(label));
        let sums = vec![Sums::default(); policy_runs.len()];
        settings.push((setting, policy_runs, sums));
    }
    let mut prompts = Prompts::read(&Wanted { limit: None, ..options.wanted() })?;
    if let Some(note) = prompts.fit(&bench.model)? {
        bench.note(note);
    }
    prompts.limit(options.limit.unwrap_or(limit));
    let layers = bench.model.config().num_layers;
    let mut progress = Progress::new(prompts.list.len() * layers, &format!("{name}, LSE error"));
    let pass = PrefillPass {
        needs: Needs { window: usize::MAX, column_sums: true, raw_queries: false },
        ..PrefillPass::default()
    };
    let seeds = [bench.common.seed];
    for prompt in &prompts.list {
        let tokens = bench.model.encode(&prompt.prompt)?;
        let pass = PrefillPass { seeds: &seeds, ..pass };
        bench.observe(&tokens, pass, &mut |observation| {
            for (setting, policy_runs, sums) in &mut settings {
                compare(observation, *setting, policy_runs, sums)?;
            }
            progress.step();
            Ok(())
        })?;
    }
    progress.finish();
    let (count, source) = (prompts.list.len(), prompts.source.clone());
    let of_prompts = counted(count, "prompt");
    bench.note(format!("LSE error: means over layers and heads of {of_prompts}, {source}"));
    for (setting, policy_runs, sums) in &settings {
        let case = Case::of(format!("{name} sag, {}", setting.name)).samples_of(&source, count);
        for (policy_run, sums) in policy_runs.iter().zip(sums) {
            let setup = policy_run.setup();
            let lse_error = sums.lse_error / sums.queries.max(1.0);
            let error = (sums.difference / sums.norm.max(f64::MIN_POSITIVE)).sqrt();
            bench.record(SUITE, &case, setup, metric::LSE_ERROR, lse_error);
            bench.record(SUITE, &case, setup, metric::WORST_LSE_ERROR, sums.worst);
            bench.record(SUITE, &case, setup, metric::QUERY_ERROR, error);
            sums.votes.record(bench, SUITE, &case, policy_run);
        }
    }
    Ok(())
}

/// An eviction alone, and policies that merge its victims.
fn configs(for_query: bool) -> Vec<Value> {
    let keepkv = |key: &&str| {
        let mut config =
            json!({"policy": "keepkv", "budget": BUDGET, "evictor": "h2o", "key": key});
        if for_query {
            config["window"] = json!(1);
            config["threshold"] = json!(-1.0);
            config["order"] = json!("evict-first");
        }
        config
    };
    let alone = |name: &str| json!({"policy": name, "budget": BUDGET});
    let keepkv: Vec<Value> = KEYS.iter().map(keepkv).collect();
    [vec![alone("h2o")], keepkv, ["d2o", "cam", "kvmerger"].map(alone).to_vec()].concat()
}

/// One layer of one prompt.
fn compare(
    observation: &Observation<'_>,
    setting: Setting,
    policy_runs: &[PolicyRun],
    sums: &mut [Sums],
) -> anyhow::Result<()> {
    let queries = observation.window.as_ref().context("queries were not observed")?;
    let query = queries.clone().narrow(2, observation.tokens() - 1, 1).squeeze_dim::<3>(2);
    let heads = query.dims()[1];
    let apart = |tensor: &Tensor<4>| match setting.ungrouped {
        true => repeat_kv_heads(tensor, heads),
        false => tensor.clone(),
    };
    let (keys, values) = (apart(observation.keys), apart(observation.values));
    let observation = Observation { keys: &keys, values: &values, ..observation.clone() };
    let options = CacheOptions::new(&keys.device(), keys.dtype());
    let attended = |policy_run: &PolicyRun| -> anyhow::Result<Attended> {
        let cache = policy_run.policy.prefill(&observation, 1, options.clone())?;
        attend(&cache, observation.tokens(), &query)
    };
    let exact = attended(&PolicyRun::of(&json!({"policy": FULL}))?)?;
    for (policy_run, sums) in policy_runs.iter().zip(sums) {
        let own = attended(policy_run)?;
        for (own, exact) in own.log_sum_exp.iter().zip(&exact.log_sum_exp) {
            let lse_error = f64::from(own - exact);
            sums.lse_error += lse_error;
            sums.queries += 1.0;
            // NaN must show, and nothing exceeds it.
            if lse_error.is_nan() || lse_error.abs() > sums.worst.abs() {
                sums.worst = lse_error;
            }
        }
        sums.votes += own.votes;
        for (own, exact) in own.output.iter().zip(&exact.output) {
            sums.difference += f64::from(own - exact).powi(2);
            sums.norm += f64::from(*exact).powi(2);
        }
    }
    Ok(())
}

/// Attention of one query `[B, Hq, D]` over a cache of `tokens` tokens.
fn attend(cache: &LayerCache, tokens: usize, query: &Tensor<3>) -> anyhow::Result<Attended> {
    let wanted = DecodeAttentionOptions { log_sum_exp: true, ..Default::default() };
    let attended = cache.attend(query.clone(), wanted)?;
    let log_sum_exp = attended.log_sum_exp.context("the log-sum-exp was asked for")?;
    Ok(Attended {
        log_sum_exp: read_f32("log-sum-exp", log_sum_exp)?,
        output: read_f32("output", attended.output)?,
        votes: Votes::of(cache, tokens)?,
    })
}

/// `[B, Hkv, T, D]` to `[B, Hq, T, D]`, each query head with its own.
fn repeat_kv_heads(tensor: &Tensor<4>, heads: usize) -> Tensor<4> {
    let [batch, kv_heads, tokens, head_dim] = tensor.dims();
    let group = heads / kv_heads;
    let spread = tensor.clone().unsqueeze_dim::<5>(2);
    let spread = spread.expand([batch, kv_heads, group, tokens, head_dim]);
    spread.reshape([batch, heads, tokens, head_dim])
}
