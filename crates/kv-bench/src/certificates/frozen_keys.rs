//! The attention that frozen keys move (PrHS's ETF): in a layer whose keys alone are taken from the
//! layer below, with the bound on it (theorem 8), and in a run in which all layers freeze.

use std::ops::Range;

use anyhow::Context;
use burn::tensor::Tensor;
use kv_core::read_f32;
use kv_models::PrefillPass;
use kv_policies::{
    FrozenTokens, KeyDrift, LayerContext, Needs, Observation, Policy, VisibleWindow,
};

use super::fit_check_split::FitCheck;
use super::means::{Bound, Means};
use crate::bench::ModelBench;
use crate::policy_runs::PolicyRun;
use crate::record::metric;

/// A layer's queries of the last tokens and the keys of all tokens, each `[heads, tokens,
/// head_dim]`, on the host.
struct HeadRows {
    queries: Rows,
    keys: Rows,
}

struct Rows {
    values: Vec<f32>,
    heads: usize,
    tokens: usize,
}

impl Rows {
    fn read(tensor: &Tensor<4>) -> anyhow::Result<Self> {
        let [_, heads, tokens, _] = tensor.dims();
        let values = read_f32("heads", tensor.clone().reshape([-1]))?;
        Ok(Self { values, heads, tokens })
    }

    fn head_dim(&self) -> usize {
        self.values.len() / (self.heads * self.tokens)
    }

    fn row(&self, head: usize, token: usize) -> &[f32] {
        let dim = self.head_dim();
        &self.values[(head * self.tokens + token) * dim..][..dim]
    }
}

impl HeadRows {
    /// Reads the queries of at most `last` tokens, and the keys of all tokens.
    fn read(observation: &Observation<'_>, last: usize) -> anyhow::Result<Self> {
        let queries = observation.window.as_ref().context("queries were not observed")?;
        let tokens = queries.dims()[2];
        let last = last.min(tokens);
        let queries = Rows::read(&queries.clone().narrow(2, tokens - last, last))?;
        Ok(Self { queries, keys: Rows::read(observation.keys)? })
    }

    /// A head's attention to the tokens up to `newest`, by its `at`-th query. The tokens `taken`
    /// have their keys of the layer `below`, and tokens that are `hidden` have no attention.
    fn attention(
        &self,
        (head, at, newest): (usize, usize, usize),
        below: Option<(&Self, &Range<usize>)>,
        hidden: Range<usize>,
    ) -> Vec<f64> {
        let group = self.queries.heads / self.keys.heads;
        let scale = 1.0 / (self.keys.head_dim() as f64).sqrt();
        let query = self.queries.row(head, at);
        let logit = |token: usize| {
            if hidden.contains(&token) {
                return f64::NEG_INFINITY;
            }
            let from =
                below.filter(|(_, taken)| taken.contains(&token)).map_or(self, |below| below.0);
            let pairs = query.iter().zip(from.keys.row(head / group, token));
            pairs.map(|(q, k)| f64::from(*q) * f64::from(*k)).sum::<f64>() * scale
        };
        softmax((0..=newest).map(logit).collect())
    }
}

/// The tokens of a prompt that one policy freezes in a layer.
struct FrozenLayer<'a> {
    frozen: &'a FrozenTokens,
    /// The window of the layer's queries, where they do not see all tokens.
    window: Option<VisibleWindow>,
    /// The layer as the model computes it, and the one below.
    own: &'a HeadRows,
    below: &'a HeadRows,
    /// The layer in a prefill in which the policy freezes tokens in all layers.
    run: &'a HeadRows,
}

/// The attention that the frozen tokens of one policy move in a layer.
#[derive(Clone, Default)]
pub(crate) struct FreezeError {
    /// The largest difference between a frozen key and the layer's own key, over the prompts that
    /// constants are fitted to.
    update: f64,
    /// One entry for each query that the bound is checked on, by query head.
    heads: Vec<Vec<QueryFreezeError>>,
}

/// Total variation distances of one query's attention from the attention without frozen tokens.
#[derive(Clone, Copy)]
struct QueryFreezeError {
    /// The query's norm.
    norm: f64,
    /// With this layer's keys alone taken from the layer below.
    keys: f64,
    /// In a prefill in which the policy freezes tokens in all layers, behind the layer's window if
    /// it has one.
    run: f64,
}

impl FreezeError {
    /// Adds a prompt's layer.
    fn take(&mut self, freezing: &FrozenLayer<'_>, fit_check: FitCheck) {
        let FrozenLayer { frozen, own, below, .. } = *freezing;
        if fit_check.fits {
            for head in 0..own.keys.heads {
                for token in frozen.tokens.clone() {
                    let pairs = own.keys.row(head, token).iter().zip(below.keys.row(head, token));
                    self.update = self.update.max(norm(pairs.map(|(a, b)| f64::from(a - b))));
                }
            }
        }
        if fit_check.checks {
            self.heads.resize(own.queries.heads, Vec::new());
            // A thread a head: these are whole rows of attention.
            std::thread::scope(|scope| {
                for (head, queries) in self.heads.iter_mut().enumerate() {
                    scope.spawn(move || queries.extend(freezing.queries(head)));
                }
            });
        }
    }
}

impl FrozenLayer<'_> {
    /// The errors of the prompt's last queries, as many as the run computes.
    fn queries(&self, head: usize) -> impl Iterator<Item = QueryFreezeError> {
        let Self { frozen, own, below, run, .. } = *self;
        let tokens = own.keys.tokens;
        let count = run.queries.tokens.min(own.queries.tokens);
        (0..count).map(move |step| {
            let newest = tokens - count + step;
            let row = |of: &HeadRows| (head, of.queries.tokens - count + step, newest);
            let exact = own.attention(row(own), None, 0..0);
            let by_keys = own.attention(row(own), Some((below, &frozen.tokens)), 0..0);
            let hidden = self.window.map(|window| window.sinks..window.from.first_seen(newest));
            let by_run = run.attention(row(run), None, hidden.unwrap_or(0..0));
            let query = own.queries.row(head, row(own).1);
            QueryFreezeError {
                norm: norm(query.iter().map(|x| f64::from(*x))),
                keys: distance(&exact, &by_keys),
                run: distance(&exact, &by_run),
            }
        })
    }
}

/// Checks theorem 8 on all queries that are kept for checks. Its constants are fitted to the
/// updates of all `layers`; each query's own norm takes the place of the largest norm. Returns the
/// means of each query head, layer by layer.
pub(crate) fn conclude(layers: &[&FreezeError], head_dim: usize) -> Vec<Vec<Means>> {
    let first = layers.iter().position(|moved| moved.update > 0.0).unwrap_or(0);
    let freezing = layers.iter().enumerate().filter(|(_, moved)| moved.update > 0.0);
    let updates: Vec<(usize, f64)> =
        freezing.map(|(layer, moved)| (layer - first, moved.update)).collect();
    let Some(fit) = KeyDrift::fit(&updates) else { return vec![Vec::new(); layers.len()] };
    let means = |layer: usize, queries: &Vec<QueryFreezeError>| {
        let mut means = Means::default();
        for QueryFreezeError { norm, keys, run } in queries {
            let bound = fit.gap(*norm, head_dim, layer.saturating_sub(first));
            means.take(metric::FROZEN_KEY_TV, *keys);
            means.take(metric::FROZEN_KEY_TV_BOUND, bound.min(1.0));
            means.take(metric::RUN_FROZEN_KEY_TV, *run);
            means.judge(Bound::FrozenKeys, *keys, [bound, bound]);
        }
        means
    };
    let heads = |(layer, moved): (usize, &&FreezeError)| {
        moved.heads.iter().map(|queries| means(layer, queries)).collect()
    };
    layers.iter().enumerate().map(heads).collect()
}

/// The keys that each policy freezes in one prompt, layer by layer.
pub(crate) struct FrozenKeys<'a> {
    policy_runs: &'a [PolicyRun],
    /// The layers in a prefill in which the policy freezes tokens in all layers, by policy; none
    /// where it freezes nothing.
    runs: Vec<Vec<Option<HeadRows>>>,
    /// The layer below the next one, as the model computes it.
    below: Option<HeadRows>,
    steps: usize,
    fit_check: FitCheck,
}

impl<'a> FrozenKeys<'a> {
    /// Prefills a prompt whose last `steps` tokens are decoded, once for each policy that freezes
    /// tokens.
    ///
    /// # Errors
    /// Where the model or the device refuses.
    pub(crate) fn prefill(
        bench: &ModelBench<'_>,
        policy_runs: &'a [PolicyRun],
        prompt: &[u32],
        steps: usize,
        fit_check: FitCheck,
    ) -> anyhow::Result<Self> {
        let run = |run: &PolicyRun| prefill_frozen(bench, &*run.policy, prompt, steps);
        let runs = policy_runs.iter().map(run).collect::<anyhow::Result<_>>()?;
        Ok(Self { policy_runs, runs, below: None, steps, fit_check })
    }

    /// Adds the next layer, as the model computes it, to the errors of each policy.
    ///
    /// # Errors
    /// Where the device gives nothing back.
    pub(crate) fn take<'b>(
        &mut self,
        observation: &Observation<'_>,
        errors: impl Iterator<Item = &'b mut FreezeError>,
    ) -> anyhow::Result<()> {
        if self.runs.iter().all(Vec::is_empty) {
            return Ok(());
        }
        let own = HeadRows::read(observation, self.steps)?;
        let (layer, tokens) = (observation.layer, observation.tokens());
        let policies = self.policy_runs.iter().map(|run| &run.policy);
        for ((policy, layers), errors) in policies.zip(&self.runs).zip(errors) {
            let frozen = policy.frozen_tokens(layer, tokens);
            let run = layers.get(layer.index).and_then(Option::as_ref);
            if let (Some(frozen), Some(run), Some(below)) = (&frozen, run, &self.below) {
                let window = policy.visible_window(layer);
                let freezing = FrozenLayer { frozen, window, own: &own, below, run };
                errors.take(&freezing, self.fit_check);
            }
        }
        self.below = Some(own);
        Ok(())
    }
}

/// Prefills a prompt with the frozen tokens of a policy. Of each layer that freezes tokens it
/// returns the queries of at most the last `steps` tokens, and the keys; nothing where the policy
/// freezes nothing.
fn prefill_frozen(
    bench: &ModelBench<'_>,
    policy: &dyn Policy,
    prompt: &[u32],
    steps: usize,
) -> anyhow::Result<Vec<Option<HeadRows>>> {
    let count = bench.model.config().num_layers;
    let frozen = |index| policy.frozen_tokens(LayerContext { index, count }, prompt.len());
    let ends = (0..count).filter_map(|layer| Some(frozen(layer)?.tokens.end));
    let Some(deepest) = ends.max() else { return Ok(Vec::new()) };
    // Frozen tokens have no queries.
    let window = steps.min(prompt.len() - deepest);
    let needs = Needs { window, ..Needs::default() };
    let pass = PrefillPass { needs, by: Some(policy), ..PrefillPass::default() };
    let mut layers: Vec<Option<HeadRows>> = Vec::new();
    bench.observe(prompt, pass, &mut |observation| {
        let freezes = frozen(observation.layer.index).is_some();
        layers.push(freezes.then(|| HeadRows::read(observation, window)).transpose()?);
        Ok(())
    })?;
    Ok(layers)
}

fn norm(values: impl Iterator<Item = f64>) -> f64 {
    values.map(|x| x * x).sum::<f64>().sqrt()
}

/// The total variation distance of two distributions.
fn distance(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).sum::<f64>() / 2.0
}

fn softmax(mut logits: Vec<f64>) -> Vec<f64> {
    let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    logits.iter_mut().for_each(|logit| *logit = (*logit - max).exp());
    let sum: f64 = logits.iter().sum();
    logits.iter_mut().for_each(|weight| *weight /= sum);
    logits
}

#[cfg(test)]
mod tests {
    use kv_kernels::Share;
    use kv_policies::{FrozenTokens, Reuse, VisibleWindow};

    use super::{FitCheck, FreezeError, FrozenLayer, HeadRows, Rows, conclude};
    use crate::record::metric;

    const BOTH: FitCheck = FitCheck { class: 0, fits: true, checks: true };

    fn rows(values: &[f32], heads: usize, dim: usize) -> Rows {
        Rows { values: values.to_vec(), heads, tokens: values.len() / heads / dim }
    }

    /// The last tokens' queries over keys of one number.
    fn heads(queries: &[f32], keys: &[f32]) -> HeadRows {
        HeadRows { queries: rows(queries, 1, 1), keys: rows(keys, 1, 1) }
    }

    /// The attention that is moved, for queries of 1 whose first key is frozen at 0: by this
    /// layer's keys, the bound, in the run.
    fn moved(own: &[f32], run: &[f32], window: Option<VisibleWindow>, by: FitCheck) -> Vec<f64> {
        let frozen = FrozenTokens { tokens: 0..1, reuse: Reuse::KeysValues };
        // The run computes the last of two queries alone.
        let (own, below) = (heads(&[5.0, 1.0], own), heads(&[1.0], &vec![0.0; own.len()]));
        let run = heads(&[1.0], run);
        let freezing = FrozenLayer { frozen: &frozen, window, own: &own, below: &below, run: &run };
        let (still, mut moved) = (FreezeError::default(), FreezeError::default());
        moved.take(&freezing, by);
        let layers = conclude(&[&still, &moved], 1);
        assert!(layers[0].is_empty(), "nothing is frozen");
        let metrics = [
            metric::FROZEN_KEY_TV,
            metric::FROZEN_KEY_TV_BOUND,
            metric::RUN_FROZEN_KEY_TV,
            metric::BOUND_GT_1_SHARE,
            metric::BROKEN,
        ];
        let all = layers[1].first().map(|means| means.all()).unwrap_or_default();
        let of = |name| all.iter().find(|(own, _)| *own == name).map(|(_, value)| *value);
        metrics.into_iter().filter_map(of).collect()
    }

    fn near(actual: &[f64], expected: [f64; 5]) {
        let off = actual.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(actual.len() == 5 && off < 1e-6, "{actual:?}, expected {expected:?}");
    }

    #[test]
    fn groups_attend_to_their_keys() {
        // Two queries of four heads, three keys of two; vectors of two numbers.
        let queries: Vec<f32> = (0..16).map(|i| i as f32 * 0.1).collect();
        let keys: Vec<f32> = (0..12).map(|i| (i * i % 7) as f32 * 0.3).collect();
        let heads = HeadRows { queries: rows(&queries, 4, 2), keys: rows(&keys, 2, 2) };
        for head in 0..4 {
            let query = &queries[(head * 2 + 1) * 2..][..2];
            let logit = |token: usize| {
                let key = &keys[(head / 2 * 3 + token) * 2..][..2];
                f64::from(query[0] * key[0] + query[1] * key[1]) / 2f64.sqrt()
            };
            let exponents = [0, 1, 2].map(|token| logit(token).exp());
            let attention = heads.attention((head, 1, 2), None, 0..0);
            for (actual, expected) in attention.iter().zip(exponents) {
                let expected = expected / exponents.iter().sum::<f64>();
                assert!((actual - expected).abs() < 1e-6, "head {head}: {attention:?}");
            }
        }
    }

    /// Attention of 3/4 and 1/4 becomes even.
    #[test]
    fn what_a_frozen_key_moves() {
        let third = 3f32.ln();
        // |q| |dk| = ln 3.
        near(&moved(&[third, 0.0], &[0.0; 2], None, BOTH), [0.25, 1.0, 0.25, 1.0, 0.0]);
        let small = 0.1 * third;
        let own = 1.0 / (1.0 + (-f64::from(small)).exp()) - 0.5;
        // In the run the key is another.
        let moved = moved(&[small, 0.0], &[9f32.ln(), 0.0], None, BOTH);
        near(&moved, [own, f64::from(small), 0.4 - own, 0.0, 0.0]);
    }

    #[test]
    fn windows_hide_in_the_run() {
        // The first of three tokens is out of sight.
        let window = VisibleWindow { from: Share::of_depth([1e-18, 1.0], 0, 0, 2), sinks: 0 };
        assert_eq!(window.from.first_seen(2), 1);
        let moved = moved(&[3f32.ln(), 0.0, 0.0], &[0.0; 3], Some(window), BOTH);
        near(&moved, [0.6 - 1.0 / 3.0, 1.0, 0.6, 1.0, 0.0]);
    }

    #[test]
    fn constants_are_fitted_to_some_and_checked_on_others() {
        let only = |fits: bool| FitCheck { class: 0, fits, checks: !fits };
        let of = |fit_check| moved(&[1.0, 0.0], &[0.0; 2], None, fit_check);
        assert!(of(only(true)).is_empty(), "no queries");
        assert!(of(only(false)).is_empty(), "no constants");
    }
}
