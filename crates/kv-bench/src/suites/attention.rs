//! Relative output error and retained mass, on the queries, keys and values of a real prompt.

mod frozen;
mod measures;
mod queries;
mod reading;
mod windows;

use std::sync::Arc;

use anyhow::{Context, bail, ensure};
use burn::tensor::{DType, Int, Tensor};
use kv_core::{CacheOptions, DecodeAttentionOptions, LayerCache, read_f32, read_i32};
use kv_kernels::{PrefillOptions, prefill_attention};
use kv_models::PrefillPass;
use kv_policies::{Needs, NewHeads, Observation, Reads, Step, certify};

use crate::args::Attention;
use crate::contenders::Contender;
use crate::progress::Progress;
use crate::prompts::Prompts;
use crate::record::{Case, metric};
use crate::run::Bench;
use frozen::{Heads, Moved};
use measures::Measures;
use queries::Similarity;
use reading::{Exact, Reading};

const SUITE: &str = "attention";
const BUDGETS: [f64; 4] = [0.5, 0.25, 0.1, 0.05];
const QUICK_BUDGETS: [f64; 2] = [0.5, 0.25];

/// Policies of which a part is what layers take from each other.
const BETWEEN_LAYERS: [&str; 3] = ["etf", "cpe", "hshare"];

/// The share by which a target may be exceeded in silence.
const AMISS: f64 = 0.1;
/// Rounding of masses in f32.
const ROUNDING: f64 = 1e-5;

/// One contender's sums over steps in a layer.
#[derive(Clone, Default)]
struct Sums {
    difference: f64,
    norm: f64,
    mass: f64,
    rows: f64,
    /// How wrong LongFlow's measure is.
    measures: Measures,
    /// What policies read that keep more.
    reading: Reading,
    reads: Reads,
    /// What heads whose sizes are steered dropped when they were last measured, in all, and how many of them there are.
    steered: f64,
    heads: f64,
    /// What frozen keys move.
    moved: Moved,
    /// Of the layer's queries, among the first contender's sums.
    similarity: Similarity,
}

/// Runs the suite: the end of each prompt is decoded step by step, each layer by itself, and
/// compared with the full cache's attention.
pub(crate) fn run(bench: &mut Bench<'_>, options: &Attention) -> anyhow::Result<()> {
    let budgets: &[f64] = if bench.common.quick { &QUICK_BUDGETS } else { &BUDGETS };
    let contenders = bench.common.contenders(budgets)?;
    measure(bench, &contenders, options)
}

/// Measures given contenders.
pub(crate) fn measure(
    bench: &mut Bench<'_>,
    contenders: &[Contender],
    options: &Attention,
) -> anyhow::Result<()> {
    bench.remark(contenders)?;
    let compares_hidden =
        |contender: &&Contender| contender.policy.config()["similarity"] == "hidden";
    if let Some(contender) = contenders.iter().find(compares_hidden) {
        bail!(
            "policy `{}`: attention observes queries, keys and values, not the hidden states that `similarity` \
             compares; quality runs whole models",
            contender.label
        );
    }
    let name = |contender: &Contender| contender.policy.name();
    if contenders.iter().any(|contender| BETWEEN_LAYERS.contains(&name(contender))) {
        bench.note(
            "attention: every layer is seen by itself, without etf's frozen tokens, and hshare's layers choose for \
             themselves"
                .into(),
        );
    }
    let mut prompts = Prompts::load(options.prompts.as_deref())?;
    prompts.limit(options.limit);
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
    let shortest = prompts.iter().map(Vec::len).min().unwrap_or_default() - options.steps;
    let mut contenders = contenders.to_vec();
    let mut uncovered = Vec::new();
    for contender in contenders.iter_mut().filter(|_| options.certificates) {
        match contender.certified(shortest) {
            Some(certified) => *contender = certified,
            None if contender.policy.config().get("certified").is_some() => {
                uncovered.push(contender.label.clone());
            }
            None => {}
        }
    }
    uncovered.dedup();
    if !uncovered.is_empty() {
        bench.note(format!(
            "no certificates of {} at some budgets: fewer recents than a block has tokens, or another similarity than \
             queries'",
            uncovered.join(", ")
        ));
    }
    let contenders = &contenders[..];
    let layers = bench.model.config().num_layers;
    let wanted: Vec<usize> =
        if options.layers.is_empty() { (0..layers).collect() } else { options.layers.clone() };
    if let Some(layer) = wanted.iter().find(|layer| **layer >= layers) {
        bail!("--layers names layer {layer}, the model has {layers}");
    }
    let mut progress = Progress::new(prompts.len() * wanted.len(), "attention");
    let mut sums = vec![vec![Sums::default(); contenders.len()]; layers];
    let pass = PrefillPass {
        needs: Needs { window: usize::MAX, column_sums: false, raw_queries: true },
        ..PrefillPass::default()
    };
    for tokens in &prompts {
        let mut failed = None;
        let mut below = None;
        bench.model.llama().prefill(&[tokens], pass, &mut |observation| {
            let layer = observation.layer.index;
            if wanted.contains(&layer) && failed.is_none() {
                let seed = bench.common.seed;
                let own = &mut sums[layer];
                let compared = compare(observation, contenders, options, seed, own).and_then(
                    |()| match options.certificates {
                        true => freeze(observation, contenders, options.steps, &below, own),
                        false => Ok(()),
                    },
                );
                match compared {
                    Ok(()) => progress.step(),
                    Err(error) => failed = Some(error),
                }
            }
            below = options.certificates.then(|| observation.keys.clone());
            Ok(None)
        })?;
        if let Some(error) = failed {
            return Err(error);
        }
    }
    progress.finish();
    note_targets(bench, contenders, &sums);
    let head_dim = bench.model.config().head_dim;
    let moved: Vec<_> = (0..contenders.len())
        .map(|at| {
            frozen::means(&sums.iter().map(|own| &own[at].moved).collect::<Vec<_>>(), head_dim)
        })
        .collect();
    let certified = |sums: &Sums| {
        !sums.measures.records().is_empty()
            || sums.reading.certified > 0.0
            || sums.reading.hidden.means().is_some()
    };
    let any = sums.iter().flatten().any(certified) || moved.iter().flatten().any(Option::is_some);
    if options.certificates && !any {
        let whose = "LongFlow's, of caches at their budget, and those of cis, psaw, etf and cpe where steps share sets, \
                     and layers have windows or frozen tokens";
        bench.note(format!("no certificates: they are {whose}"));
    }
    for (layer, sums) in sums.iter().enumerate().filter(|(layer, _)| wanted.contains(layer)) {
        for ((contender, sums), moved) in contenders.iter().zip(sums).zip(&moved) {
            let (source, samples) = (Some(source.clone()), Some(prompts.len()));
            let case = Case { layer: Some(layer), source, samples, ..Case::default() };
            let setup = (contender.label.as_str(), contender.budget);
            let error = (sums.difference / sums.norm.max(f64::MIN_POSITIVE)).sqrt();
            bench.record(SUITE, &case, setup, metric::RELATIVE_ERROR, error, "ratio");
            for (name, value, unit) in sums.measures.records() {
                bench.record(SUITE, &case, setup, name, value, unit);
            }
            if let Some((cosine, alike)) = sums.similarity.means() {
                bench.record(SUITE, &case, setup, metric::QUERY_COSINE, cosine, "cosine");
                bench.record(SUITE, &case, setup, metric::QUERIES_ALIKE, alike, "share");
            }
            let reading = &sums.reading;
            // What is kept says nothing where less is read.
            let mass = if reading.rows > 0.0 {
                reading.mass / reading.rows
            } else {
                sums.mass / sums.rows
            };
            bench.record(SUITE, &case, setup, metric::RETAINED_MASS, mass, "share");
            if sums.reads.steps > 0 {
                let (ratio, slots) = (sums.reads.ratio(), sums.reads.slots_each());
                bench.record(SUITE, &case, setup, metric::RETRIEVAL_RATIO, ratio, "share");
                bench.record(SUITE, &case, setup, metric::TOKENS_READ, slots, "tokens");
            }
            if reading.rows > 0.0 && contender.budget.is_some() {
                let overlap = reading.overlap / reading.rows;
                bench.record(SUITE, &case, setup, metric::OVERLAP, overlap, "share");
            }
            if options.certificates && reading.rows > 0.0 {
                let means = [
                    (metric::ORACLE_GAP, reading.gap / reading.rows, "share"),
                    (metric::INFORMATION_LOSS, reading.information / reading.rows, "nats"),
                ];
                for (name, mean, unit) in means {
                    bench.record(SUITE, &case, setup, name, mean, unit);
                }
            }
            let hidden = reading.hidden.means().filter(|_| options.certificates);
            let (mut broken, mut vacuous) = (Vec::new(), Vec::new());
            if let Some(means) = hidden {
                bench.record(SUITE, &case, setup, metric::HIDDEN_MASS, means.hidden, "share");
                bench.record(SUITE, &case, setup, metric::HIDDEN_BOUND, means.bound, "share");
                broken.push(means.broken);
                vacuous.push(means.vacuous);
            }
            if let Some(means) = &moved[layer] {
                bench.record(SUITE, &case, setup, metric::MOVED_MASS, means.moved, "share");
                bench.record(SUITE, &case, setup, metric::MOVED_BOUND, means.bound, "share");
                broken.push(f64::from(u8::from(means.broken)));
                vacuous.push(f64::from(u8::from(means.vacuous)));
            }
            if reading.certified > 0.0 {
                let means = [
                    (metric::DROPPED_MASS, reading.dropped),
                    (metric::DROPPED_BOUND, reading.paper),
                    (metric::ODDS_BOUND, reading.odds),
                ];
                for (name, sum) in means {
                    bench.record(SUITE, &case, setup, name, sum / reading.certified, "share");
                }
                broken.push(reading.broken / reading.certified);
                vacuous.push(reading.vacuous / reading.certified);
            }
            if reading.sets > 0.0 {
                let means = [
                    (metric::SET_GAP, reading.set_gap),
                    (metric::SET_GAP_BOUND, reading.set_gap_bound),
                ];
                for (name, sum) in means {
                    bench.record(SUITE, &case, setup, name, sum / reading.sets, "share");
                }
                broken.push(reading.sets_broken / reading.sets);
                vacuous.push(reading.sets_vacuous / reading.sets);
            }
            // The worst of the kinds of bounds that there are.
            for (name, shares) in [(metric::VACUOUS, vacuous), (metric::BROKEN, broken)] {
                if let Some(worst) = shares.into_iter().reduce(f64::max) {
                    bench.record(SUITE, &case, setup, name, worst, "share");
                }
            }
        }
    }
    Ok(())
}

/// What a policy's heads are to drop.
fn target_of(contender: &Contender) -> Option<f64> {
    contender.policy.config()["target"].as_f64()
}

/// Says which targets were not met.
fn note_targets(bench: &mut Bench<'_>, contenders: &[Contender], sums: &[Vec<Sums>]) {
    for (at, contender) in contenders.iter().enumerate() {
        let total = |of: &dyn Fn(&Sums) -> f64| sums.iter().map(|own| of(&own[at])).sum::<f64>();
        let dropped = total(&|own| own.steered) / total(&|own| own.heads);
        if let Some(target) = target_of(contender).filter(|target| dropped > (1.0 + AMISS) * target)
        {
            bench.note(format!(
                "{}: heads dropped {dropped:.3} when they were last measured, for a target of {target:.3}: sets grow to \
                 eight times the budget's at most, and take steps to do so",
                contender.label
            ));
        }
    }
}

/// One layer of one prompt: all but the last `steps` tokens are the prompt, the rest is decoded.
fn compare(
    observation: &Observation<'_>,
    contenders: &[Contender],
    options: &Attention,
    seed: u64,
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
    let mut caches: Vec<LayerCache> = contenders
        .iter()
        .map(|contender| contender.policy.prefill(&prompt, steps, options.clone()))
        .collect::<Result<_, _>>()?;
    if certificates && let Some(first) = sums.first_mut() {
        first.similarity.take(whole, steps)?;
    }
    for step in 0..steps {
        let at = tokens + step;
        let pick = |tensor: &Tensor<4>| tensor.clone().narrow(2, at, 1).squeeze_dim::<3>(2);
        let query = pick(whole);
        let heads = NewHeads::Rotated {
            query: query.clone(),
            key: pick(observation.keys),
            value: pick(observation.values),
            raw_query: observation.raw_queries.as_ref().map(pick),
        };
        let position = Tensor::full([1], at as i32, (&device, DType::I32));
        let inverse_frequencies = observation.inverse_frequencies.into();
        let board = Arc::default();
        let now = Step { heads, position, inverse_frequencies, hidden: None, board };
        // The full cache, which runs first, gives what the others are compared with.
        let mut exact = Vec::new();
        let (mut probabilities, mut of_queries) = (Vec::new(), Vec::new());
        for ((contender, cache), sums) in contenders.iter().zip(&mut caches).zip(sums.iter_mut()) {
            if certificates && contender.policy.name() == "longflow" {
                // Behind the prompt, its last query chose.
                let before = whole.clone().narrow(2, at - 1, 1).squeeze_dim::<3>(2);
                sums.measures.take(certify(cache, &before, &query)?);
            }
            let output = contender.policy.step(observation.layer, cache, now.clone())?;
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
            let capacity = probabilities.len() / cache.layout().pairs();
            let policy = (&*contender.policy, observation.layer);
            let exact = Exact { probabilities: &of_queries, capacity, tokens: at + 1 };
            let budget = contender.tokens(tokens).unwrap_or(tokens);
            let block = contender.block_of_sums();
            if sums.reading.take(policy, cache, &positions, &exact, budget, block)? {
                continue;
            }
            for pair in 0..cache.layout().pairs() {
                let live = cache.layout().live(pair);
                // The full cache holds each head's tokens in order.
                let mass =
                    live.map(|slot| probabilities[pair * capacity + positions[slot] as usize]);
                sums.mass += f64::from(mass.sum::<f32>());
                sums.rows += 1.0;
            }
        }
    }
    for ((contender, cache), sums) in contenders.iter().zip(&caches).zip(sums.iter_mut()) {
        sums.reads += contender.policy.reads(cache)?.unwrap_or_default();
        if let (Some(_), Some(sets)) = (target_of(contender), cache.index_sets()) {
            for head in sets.read()? {
                sums.steered += f64::from(head.measured);
                sums.heads += 1.0;
            }
        }
    }
    Ok(())
}

/// One layer of one prompt: what it would change if contenders' frozen keys were those of the layer below.
fn freeze(
    observation: &Observation<'_>,
    contenders: &[Contender],
    steps: usize,
    below: &Option<Tensor<4>>,
    sums: &mut [Sums],
) -> anyhow::Result<()> {
    let tokens = observation.tokens();
    let frozen: Vec<_> = contenders
        .iter()
        .map(|contender| contender.policy.frozen_tokens(observation.layer, tokens - steps))
        .collect();
    let Some(below) = below.as_ref().filter(|_| frozen.iter().any(Option::is_some)) else {
        return Ok(());
    };
    let queries = observation.window.as_ref().context("queries were not observed")?;
    let read = |tensor: &Tensor<4>| read_f32("heads", tensor.clone().reshape([-1]));
    let [queries, keys, below] = [queries, observation.keys, below]
        .map(|tensor| Ok::<_, anyhow::Error>((read(tensor)?, tensor.dims()[1])));
    let heads = [queries?, keys?, below?];
    let [queries, keys, below] =
        heads.each_ref().map(|(values, heads)| Heads { values, heads: *heads, tokens });
    for (frozen, sums) in frozen.iter().zip(sums) {
        if let Some(frozen) = frozen {
            sums.moved.take(frozen, [&queries, &keys, &below], steps);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::record::metric;
    use crate::testing::ran;

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
    fn measures_of_slots_are_certified_by_their_parts() {
        let line = "attention --certificates --budget 64 --limit 1 --steps 8 --policy longflow";
        let (records, report) = ran(&line.split(' ').collect::<Vec<_>>()).unwrap();
        let of = |name: &str| -> Vec<f64> {
            records.iter().filter(|r| r.metric == name).map(|r| r.value).collect()
        };
        for (value, bound) in [
            (metric::REMAINDER, metric::REMAINDER_BOUND),
            (metric::DRIFT, metric::DRIFT_BOUND),
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
