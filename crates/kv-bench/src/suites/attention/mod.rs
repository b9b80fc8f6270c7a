//! Relative output error and retained mass, on the queries, keys and values of a real prompt.

mod read_metrics;
mod report;
mod sums;

use std::sync::Arc;

use anyhow::{Context, bail, ensure};
use burn::tensor::{DType, Int, Tensor};
use kv_core::{CacheOptions, LayerCache, read_f32, read_i32};
use kv_kernels::{DecodeAttentionOptions, PrefillOptions, prefill_attention};
use kv_models::PrefillPass;
use kv_policies::{
    CisIndex, LayerContext, Needs, Observation, Qkv, Reads, Step, StepAttention, certify,
};

use crate::bench::ModelBench;
use crate::certificates::{FitCheck, FrozenKeys, Mean, PromptHeads, Retrievals};
use crate::format;
use crate::options::Attention;
use crate::policy_runs::PolicyRun;
use crate::progress::Progress;
use crate::prompts::Prompts;
use read_metrics::Exact;
use report::Measured;
use sums::Sums;

const BUDGETS: [f64; 4] = [0.5, 0.25, 0.1, 0.05];
const QUICK_BUDGETS: [f64; 2] = [0.5, 0.25];

/// A policy that exceeds its target by this share of it gets a note.
const AMISS: f64 = 0.1;

/// Runs the suite: the end of each prompt is decoded step by step, each layer by itself, and
/// compared with the full cache's attention.
pub(crate) fn run(bench: &mut ModelBench<'_>, options: &Attention) -> anyhow::Result<()> {
    let budgets: &[f64] = if bench.common.quick { &QUICK_BUDGETS } else { &BUDGETS };
    let policy_runs = bench.common.policy_runs(budgets)?;
    measure(bench, &policy_runs, options)
}

/// Measures given policies.
pub(crate) fn measure(
    bench: &mut ModelBench<'_>,
    policy_runs: &[PolicyRun],
    options: &Attention,
) -> anyhow::Result<()> {
    let compares_hidden =
        |policy_run: &&PolicyRun| policy_run.policy.capabilities().compares_hidden;
    if let Some(policy_run) = policy_runs.iter().find(compares_hidden) {
        bail!(
            "policy `{}`: attention observes queries, keys and values, not the hidden states that \
             `similarity` compares; quality runs whole models",
            policy_run.label
        );
    }
    if policy_runs.iter().any(|own| own.policy.capabilities().reads_other_layers) {
        bench.note(
            "attention: errors, retained mass and what is read are of every layer by itself, \
             without etf's frozen tokens, and hshare's layers choose for themselves"
                .into(),
        );
    }
    let mut prompts = Prompts::read(&options.wanted())?;
    if let Some(note) = prompts.fit(&bench.model)? {
        bench.note(note);
    }
    let Prompts { source, list } = prompts;
    let mut prompts = Vec::new();
    for prompt in list {
        let tokens = bench.model.encode(&prompt.prompt)?;
        ensure!(tokens.len() > options.steps, "prompt {} is shorter than --steps", prompt.id);
        prompts.push(tokens);
    }
    let longest = prompts.iter().map(Vec::len).max().unwrap_or_default();
    bench.remark(policy_runs, longest)?;
    let layers = bench.model.config().num_layers;
    let mut wanted: Vec<usize> =
        if options.layers.is_empty() { (0..layers).collect() } else { options.layers.clone() };
    wanted.sort_unstable();
    wanted.dedup();
    if let Some(layer) = wanted.iter().find(|layer| **layer >= layers) {
        bail!("--layers names layer {layer}, the model has {layers}");
    }
    let mut progress = Progress::new(prompts.len() * wanted.len(), "attention");
    let mut sums = vec![vec![Sums::default(); policy_runs.len()]; layers];
    let pass = PrefillPass {
        needs: Needs { window: usize::MAX, column_sums: false, raw_queries: true },
        ..PrefillPass::default()
    };
    let fit_checks = FitCheck::of(&prompts.iter().map(Vec::len).collect::<Vec<_>>());
    for (tokens, &fit_check) in prompts.iter().zip(&fit_checks) {
        let freezing = if options.certificates { policy_runs } else { &[] };
        let mut frozen = FrozenKeys::prefill(bench, freezing, tokens, options.steps, fit_check)?;
        bench.observe(tokens, pass, &mut |observation| {
            let layer = observation.layer.index;
            let sums = &mut sums[layer];
            // Constants are of all layers, whichever are shown.
            frozen.take(observation, sums.iter_mut().map(|sums| &mut sums.frozen))?;
            if wanted.contains(&layer) {
                compare(observation, policy_runs, options, bench.common.seed, fit_check, sums)?;
                progress.step();
            }
            Ok(())
        })?;
    }
    progress.finish();
    note_targets(bench, policy_runs, &sums);
    note_errors(bench, policy_runs, &sums);
    let checked = fit_checks.iter().filter(|fit_check| fit_check.checks).count();
    let measured = Measured { policy_runs, prompts: prompts.len(), checked, source, sums: &sums };
    measured.write(bench, options, &wanted);
    Ok(())
}

/// The share of the attention that a policy's heads are to drop.
fn target_of(policy_run: &PolicyRun) -> Option<f64> {
    policy_run.policy.capabilities().target.map(f64::from)
}

/// Notes the policies whose error is larger than the output itself.
fn note_errors(bench: &mut ModelBench<'_>, policy_runs: &[PolicyRun], sums: &[Vec<Sums>]) {
    let errors = policy_runs.iter().enumerate().map(|(at, policy_run)| {
        let worst = sums.iter().map(|layer| layer[at].relative_error()).fold(0.0, f64::max);
        (policy_run, worst)
    });
    let told = errors.filter(|(_, worst)| *worst > 1.0).map(|(policy_run, worst)| {
        format!("{} at {} {worst:.1}", policy_run.label, format::budget(policy_run.budget))
    });
    let told: Vec<String> = told.collect();
    if !told.is_empty() {
        bench.note(format!(
            "attention errors above 1 exceed the output itself, to which zeros would be closer; \
             the largest of a layer: {}",
            told.join(", ")
        ));
    }
}

/// Notes the policies that missed their target.
fn note_targets(bench: &mut ModelBench<'_>, policy_runs: &[PolicyRun], sums: &[Vec<Sums>]) {
    for (at, policy_run) in policy_runs.iter().enumerate() {
        let mut steered = Mean::default();
        sums.iter().for_each(|layer| steered.add(layer[at].steered));
        if let (Some(target), Some(dropped)) = (target_of(policy_run), steered.value())
            && dropped > (1.0 + AMISS) * target
        {
            bench.note(format!(
                "{}: heads dropped {dropped:.3} when they were last measured, for a target of \
                 {target:.3}: sets grow to eight times the budget's at most, and take steps to do \
                 so",
                policy_run.label
            ));
        }
    }
}

/// One layer of one prompt: all but the last `steps` tokens are the prompt, the rest is decoded.
fn compare(
    observation: &Observation<'_>,
    policy_runs: &[PolicyRun],
    options: &Attention,
    seed: u64,
    fit_check: FitCheck,
    sums: &mut [Sums],
) -> anyhow::Result<()> {
    let Attention { steps, certificates, .. } = *options;
    let whole = observation.window.as_ref().context("queries were not observed")?;
    let tokens = observation.tokens() - steps;
    let part = |tensor: &Tensor<4>| tensor.clone().narrow(2, 0, tokens);
    let (queries, keys, values) = (part(whole), part(observation.keys), part(observation.values));
    let positions: Tensor<2, Int> = observation.positions.clone().narrow(1, 0, tokens);
    let options = PrefillOptions { column_sums: Some(usize::MAX), ..PrefillOptions::default() };
    let prompt = Observation {
        keys: &keys,
        values: &values,
        positions: &positions,
        prompt_tokens: tokens,
        column_sums: prefill_attention(&queries, &keys, &values, &options)?.column_sums,
        raw_queries: observation.raw_queries.as_ref().map(part),
        window: Some(queries),
        seeds: &[seed],
        ..observation.clone()
    };
    let device = keys.device();
    let options = CacheOptions::new(&device, keys.dtype());
    let mut caches: Vec<LayerCache> = policy_runs
        .iter()
        .map(|policy_run| policy_run.policy.prefill(&prompt, steps, options.clone()))
        .collect::<Result<_, _>>()?;
    if certificates && let Some(first) = sums.first_mut() {
        first.similarity.take(whole, steps)?;
    }
    let prompt_heads = certificates.then(|| PromptHeads::read(whole, observation.keys, steps));
    let prompt_heads = prompt_heads.transpose()?;
    let mut retrievals: Vec<Retrievals> = caches.iter().map(|_| Retrievals::default()).collect();
    for step in 0..steps {
        let at = tokens + step;
        let pick = |tensor: &Tensor<4>| tensor.clone().narrow(2, at, 1).squeeze_dim::<3>(2);
        let query = pick(whole);
        let heads = Qkv::Rotated {
            query: query.clone(),
            key: pick(observation.keys),
            value: pick(observation.values),
            raw_query: observation.raw_queries.as_ref().map(pick),
        };
        let position = Tensor::full([1], at as i32, (&device, DType::I32));
        let inverse_frequencies = observation.inverse_frequencies.into();
        let board = Arc::default();
        let now = Step { heads, position, inverse_frequencies, input: None, board };
        // The full cache runs first: the others are compared with its output and attention.
        let mut exact = Vec::new();
        let (mut probabilities, mut of_queries) = (Vec::new(), Vec::new());
        for (((policy_run, cache), sums), retrievals) in
            policy_runs.iter().zip(&mut caches).zip(sums.iter_mut()).zip(&mut retrievals)
        {
            if certificates && chooses_victim(policy_run, observation.layer, cache)? {
                // Behind the prompt, its last query chose.
                let before = whole.clone().narrow(2, at - 1, 1).squeeze_dim::<3>(2);
                sums.measures.take(certify(cache, &before, &query)?);
            }
            let output = policy_run.policy.step(observation.layer, cache, now.clone())?;
            let output = read_f32("output", output)?;
            if exact.is_empty() {
                let wanted = DecodeAttentionOptions { probabilities: true, ..Default::default() };
                let full = cache.attend(query.clone(), wanted)?;
                let full = full.probabilities.context("probabilities were asked for")?;
                let flat = full.clone().reshape([full.dims().iter().product::<usize>()]);
                of_queries = read_f32("probabilities", flat)?;
                probabilities = read_f32("probabilities", full.mean_dim(1).squeeze_dim::<1>(1))?;
                exact = output.clone();
            }
            for (a, e) in output.iter().zip(&exact) {
                sums.difference += f64::from(a - e).powi(2);
                sums.norm += f64::from(*e).powi(2);
            }
            let positions = read_i32("positions", cache.positions().clone())?;
            let capacity = probabilities.len() / cache.layout().head_ranges();
            let policy = (&*policy_run.policy, observation.layer);
            let exact = Exact {
                probabilities: &of_queries,
                capacity,
                tokens: at + 1,
                fit_check,
                heads: prompt_heads.as_ref(),
            };
            let budget = policy_run.tokens(tokens).unwrap_or(tokens);
            let block = policy_run.policy.capabilities().block_of_sums;
            let heads = (&mut sums.reading, retrievals);
            if read_metrics::take(heads, policy, cache, &positions, &exact, budget, block)? {
                continue;
            }
            for pair in 0..cache.layout().head_ranges() {
                let live = cache.layout().live(pair);
                // The full cache holds each head's tokens in order.
                let mass =
                    live.map(|slot| probabilities[pair * capacity + positions[slot] as usize]);
                sums.mass.take(f64::from(mass.sum::<f32>()));
            }
        }
    }
    for ((policy_run, cache), sums) in policy_runs.iter().zip(&caches).zip(sums.iter_mut()) {
        sums.reads += Reads::of(cache)?.unwrap_or_default();
        if let (Some(_), Some(index)) = (target_of(policy_run), cache.policy_state::<CisIndex>()) {
            for head in index.sets().read()? {
                sums.steered.take(f64::from(head.measured));
            }
        }
    }
    Ok(())
}

/// Whether the launch that attends chooses the slot of the next token.
fn chooses_victim(
    policy_run: &PolicyRun,
    layer: LayerContext,
    cache: &LayerCache,
) -> anyhow::Result<bool> {
    let plan = policy_run.policy.plan(layer, cache)?;
    Ok(matches!(plan.attention, StepAttention::ChooseVictim(_)))
}

#[cfg(test)]
mod tests {
    use crate::record::{Record, metric};
    use crate::testing::ran;

    #[test]
    fn heads_are_shown_apart() {
        let policies = r#"[{"policy": "psaw", "start": 0}, {"policy": "etf", "start": 1}]"#;
        let run = |line: &str| {
            let words: Vec<&str> = line.split(' ').chain(["--policy", policies]).collect();
            ran(&words).unwrap()
        };
        let (records, report) = run("attention --certificates --by-head --limit 2 --steps 8");
        for (policy, name) in [
            ("psaw start=0", metric::WINDOW_DROPPED_MASS),
            ("etf start=1", metric::FROZEN_KEY_TV),
            ("etf start=1", metric::RUN_FROZEN_KEY_TV),
        ] {
            let of = |layer: usize, whole: bool| -> Vec<f64> {
                let own = |r: &&Record| {
                    let part = r.case.layer == Some(layer) && r.case.head.is_none() == whole;
                    r.policy == policy && r.metric == name && part
                };
                records.iter().filter(own).map(|r| r.value).collect()
            };
            let (layer, heads) = (of(3, true), of(3, false));
            assert_eq!((layer.len(), heads.len()), (1, 4), "{policy}: {name}");
            let mean = heads.iter().sum::<f64>() / 4.0;
            assert!(mean > 0.0 && (mean - layer[0]).abs() < 1e-12, "{policy}: {heads:?}");
        }
        assert!(report.contains("by head") && !report.contains("the one prompt"));
        assert!(report.contains("over 1 prompt that constants are checked on"));
        let (records, report) = run("attention --certificates --limit 1 --steps 8");
        assert!(records.iter().all(|record| record.case.head.is_none()));
        assert!(report.contains("fitted to the one prompt"));
    }

    /// Below the first layer that freezes, nothing has changed. So in this layer reused hidden
    /// states give unchanged keys, and the bound holds for keys of the layer below.
    #[test]
    fn runs_begin_where_bounds_do() {
        let policies = r#"[{"policy": "etf", "start": 1},
            {"policy": "etf", "start": 1, "reuse": "keys-values"}]"#;
        let line = "attention --certificates --limit 1 --steps 8 --policy";
        let words: Vec<&str> = line.split(' ').chain([policies]).collect();
        let (records, _) = ran(&words).unwrap();
        let of = |policy: &str, layer: usize, name: &str| {
            let own =
                |r: &&Record| r.policy == policy && r.case.layer == Some(layer) && r.metric == name;
            records.iter().find(own).map(|r| r.value).unwrap()
        };
        let (hidden, keys) = ("etf start=1", "etf reuse=keys-values start=1");
        // From the second of four layers on, the first one behind `start`.
        assert!(of(hidden, 1, metric::RUN_FROZEN_KEY_TV) < 1e-6);
        let [moved, run] =
            [metric::FROZEN_KEY_TV, metric::RUN_FROZEN_KEY_TV].map(|name| of(keys, 1, name));
        assert!(moved > 0.01 && (moved - run).abs() < 1e-6, "{moved}, in the run {run}");
        assert!(of(hidden, 3, metric::RUN_FROZEN_KEY_TV) > 1e-4);
        let [moved, run] =
            [metric::FROZEN_KEY_TV, metric::RUN_FROZEN_KEY_TV].map(|name| of(keys, 3, name));
        assert!((moved - run).abs() > 0.01, "{moved}, in the run {run}");
    }

    #[test]
    fn what_is_dropped_stands_beside_the_least_that_must_be() {
        let line =
            "attention --certificates --budget 64 --limit 1 --steps 8 --policy h2o,top-k-oracle";
        let (records, _) = ran(&line.split(' ').collect::<Vec<_>>()).unwrap();
        let of = |policy: &str, name: &str| -> Vec<f64> {
            let own = records.iter().filter(|r| r.policy == policy && r.metric == name);
            own.map(|r| r.value).collect()
        };
        let [gaps, masses] =
            [metric::ORACLE_GAP, metric::RETAINED_MASS].map(|name| of("h2o", name));
        // A group's heads share the oracle's choice, so that it is each one's best no more than
        // nearly.
        let [least, best] =
            [metric::ORACLE_GAP, metric::RETAINED_MASS].map(|name| of("top-k-oracle", name));
        assert!(gaps.len() == 4 && least.len() == 4, "a layer each");
        for layer in 0..4 {
            assert!(gaps[layer] > 2.0 * least[layer], "{gaps:?}, {least:?}");
            // Both are of as many tokens.
            let sums = (gaps[layer] + masses[layer], least[layer] + best[layer]);
            assert!((sums.0 - sums.1).abs() < 0.02, "{sums:?}");
        }
        assert!(of("full", metric::ORACLE_GAP).iter().all(|gap| gap.abs() < 1e-6));
        assert!(of("h2o", metric::INFORMATION_LOSS).iter().all(|loss| *loss > 0.0));
    }

    #[test]
    fn targets_that_are_not_met_are_told() {
        let told = |target: f64| {
            let policy = format!(r#"{{"policy": "cis", "budget": 48, "target": {target}}}"#);
            let line = "attention --limit 1 --steps 12 --policy";
            let words: Vec<&str> = line.split(' ').chain([policy.as_str()]).collect();
            ran(&words).unwrap().1.contains(&format!("for a target of {target:.3}"))
        };
        assert!(told(0.001) && !told(0.9));
    }

    #[test]
    fn errors_above_the_output_are_told() {
        // Buckets of norms far apart, whose numerators and denominators lose different tokens.
        let policy = r#"[{"policy": "balancekv-stream", "joint": false}, "streaming-llm"]"#;
        let line = "attention --limit 1 --steps 8 --budget 0.25 --policy";
        let words: Vec<&str> = line.split(' ').chain([policy]).collect();
        let (records, report) = ran(&words).unwrap();
        for name in ["balancekv-stream", "streaming-llm"] {
            let own =
                |r: &&Record| r.policy.starts_with(name) && r.metric == metric::RELATIVE_ERROR;
            let worst = records.iter().filter(own).map(|r| r.value).fold(0.0, f64::max);
            // The label says which options are no defaults.
            let label = &records.iter().find(own).unwrap().policy;
            let told = format!("{label} at 25 % {worst:.1}");
            assert_eq!(report.contains(&told), worst > 1.0, "{name}: {worst}");
            assert_eq!(worst > 1.0, name == "balancekv-stream", "{name}: {worst}");
        }
    }

    #[test]
    fn measures_of_slots_are_certified_by_their_parts() {
        let line = "attention --certificates --budget 64 --limit 1 --steps 8 --policy longflow";
        let (records, report) = ran(&line.split(' ').collect::<Vec<_>>()).unwrap();
        let of = |name: &str| -> Vec<f64> {
            records.iter().filter(|r| r.metric == name).map(|r| r.value).collect()
        };
        for (value, bound) in [
            (metric::EVICTION_RESIDUAL, metric::EVICTION_RESIDUAL_BOUND),
            (metric::LOGIT_CHANGE, metric::LOGIT_CHANGE_BOUND),
            (metric::OBSERVED_ERROR, metric::ERROR_BOUND),
        ] {
            let (values, bounds) = (of(value), of(bound));
            assert!(values.len() == 4 && bounds.len() == 4, "a layer each: {value}");
            assert!(values.iter().zip(&bounds).all(|(value, bound)| 0.0 < *value && value < bound));
        }
        assert_eq!(of(metric::BROKEN), [0.0; 4]);
        assert!(report.contains("certificates"));
    }
}
