//! Policies that keep the whole cache and read a part of it: against their authors' numbers, and
//! against selections in f64, step by step.

mod double_sparsity;
mod duo_attention;
mod hshare;
mod quest;

use std::sync::Arc;

use burn::tensor::{DType, Device, Int, Tensor};
use kv_core::{CacheOptions, KvCache, LayerCache, Origin, read_f32, read_i32};
use kv_kernels::{
    PageHeads, PageOptions, PageSpan, SlotRanges, page_bounds, page_rows, page_scores,
};
use kv_policies::{
    HShare, LayerContext, Needs, Observation, OwnedObservation, PageBounds, Policy, Reads,
    SlotList, Step, build, copies, share_map,
};
use kv_testing::{Numbers, devices, exact_devices, golden_files, quick_devices, relative_error};
use serde_json::{Value, json};

use super::support::{self, Prompt, policy, step};

const DIM: usize = 16;
const KV_HEADS: usize = 2;
/// Behind the layers that attend to everything.
const DEEP: LayerContext = LayerContext { index: 2, count: 3 };
/// Prompts of the batch's rows.
const TOKENS: [usize; 2] = [90, 61];
const STEPS: usize = 9;

/// Rows of a tensor `[1, H, N, D]` as f64, by head and token.
fn rows(tensor: &Tensor<4>) -> Vec<Vec<Vec<f64>>> {
    let [_, _, tokens, dim] = tensor.dims();
    let all = read_f32("rows", tensor.clone()).unwrap();
    let head = |head: &[f32]| -> Vec<Vec<f64>> {
        head.chunks(dim).map(|row| row.iter().map(|x| f64::from(*x)).collect()).collect()
    };
    all.chunks(tokens * dim).map(head).collect()
}

/// One sequence's heads, `[1, H, N, D]`.
struct Trace {
    tokens: usize,
    tensors: [Tensor<4>; 3],
    heads: [Vec<Vec<Vec<f64>>>; 3],
}

impl Trace {
    fn new(seed: u64, group: usize, tokens: usize, device: &Device) -> Self {
        let mut numbers = Numbers::new(seed);
        let mut draw = |heads: usize| numbers.tensor([1, heads, tokens + STEPS, DIM], device);
        let tensors = [draw(KV_HEADS * group), draw(KV_HEADS), draw(KV_HEADS)];
        let heads = [0, 1, 2].map(|at| rows(&tensors[at]));
        Self { tokens, tensors, heads }
    }

    fn prompt(&self) -> Prompt {
        let [q, k, v] = [0, 1, 2].map(|at| self.tensors[at].clone().narrow(2, 0, self.tokens));
        Prompt::new(q, k, v)
    }

    fn prefill(&self, policy: &dyn Policy, layer: LayerContext) -> LayerCache {
        let options = CacheOptions::new(&self.tensors[0].device(), DType::F32);
        self.prompt().observed(|seen| {
            let seen = Observation { layer, ..seen.clone() };
            policy.prefill(&seen, STEPS, options).unwrap()
        })
    }

    fn step(&self, index: usize) -> Step {
        let at = self.tokens + index;
        step(&self.tensors[0], &self.tensors[1], &self.tensors[2], at, at)
    }

    fn query(&self, head: usize, at: usize) -> &[f64] {
        &self.heads[0][head][at]
    }

    fn keys(&self, head: usize) -> &[Vec<f64>] {
        let group = self.heads[0].len() / KV_HEADS;
        &self.heads[1][head / group]
    }

    /// Attention of a query head at a token over others.
    fn attend(&self, head: usize, at: usize, list: &[usize]) -> Vec<f64> {
        let values = &self.heads[2][head / (self.heads[0].len() / KV_HEADS)];
        let logit = |&t: &usize| dot(self.query(head, at), &self.keys(head)[t]) / 4.0;
        let logits: Vec<f64> = list.iter().map(logit).collect();
        let top = logits.iter().copied().fold(f64::MIN, f64::max);
        let sum: f64 = logits.iter().map(|logit| (logit - top).exp()).sum();
        let mut output = vec![0.0; DIM];
        for (&t, logit) in list.iter().zip(logits) {
            let share = (logit - top).exp() / sum;
            output.iter_mut().zip(&values[t]).for_each(|(o, v)| *o += share * v);
        }
        output
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// The indices of the `count` highest scores, ascending.
fn best(scores: &[f64], count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
    order.truncate(count);
    order.sort_unstable();
    order
}

/// Steps of two sequences as one batch.
fn joined(a: &Step, b: &Step) -> Step {
    use kv_policies::Qkv::Rotated;
    let cat = |a: &Tensor<3>, b: &Tensor<3>| Tensor::cat(vec![a.clone(), b.clone()], 0);
    let (Rotated { query, key, value, .. }, Rotated { query: q, key: k, value: v, .. }) =
        (&a.heads, &b.heads)
    else {
        unreachable!("steps of rotated heads");
    };
    let position = Tensor::cat(vec![a.position.clone(), b.position.clone()], 0);
    Step::new(cat(query, q), cat(key, k), cat(value, v), position)
}

/// What a query head may read at a token: sequence, head, slots there are.
type Select<'a> = dyn FnMut(&LayerCache, usize, usize, usize) -> Vec<usize> + 'a;

/// Decodes both sequences as one batch, a part of the steps from a saved and loaded cache, and
/// compares with attention over what `select` says.
fn follow(config: &Value, traces: &[Trace; 2], layer: LayerContext, select: &mut Select<'_>) {
    let policy = policy(config.clone());
    let parts = traces.iter().map(|trace| trace.prefill(&*policy, layer)).collect();
    let mut cache = LayerCache::concat(parts).unwrap();
    let heads = traces[0].heads[0].len();
    let device = cache.options().device.clone();
    for index in 0..STEPS {
        if index == STEPS / 2 {
            cache = reloaded(cache, &device);
            policy.restore(&mut cache).unwrap();
        }
        let step = joined(&traces[0].step(index), &traces[1].step(index));
        let output = read_f32("output", policy.step(layer, &mut cache, step).unwrap()).unwrap();
        for (row, trace) in traces.iter().enumerate() {
            let at = trace.tokens + index;
            for head in 0..heads {
                let list = select(&cache, row, head, at + 1);
                let exact = trace.attend(head, at, &list);
                let own = &output[(row * heads + head) * DIM..][..DIM];
                let error = relative_error(own, &exact);
                assert!(error < 1e-4, "{config} step {index} row {row} head {head}: {error}");
            }
        }
    }
}

fn reloaded(cache: LayerCache, device: &Device) -> LayerCache {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cache.safetensors");
    let seen = cache.layout().lengths().chunks(KV_HEADS).map(|row| row[0]).collect();
    let whole = KvCache { layers: vec![cache], seen, origin: Origin::default() };
    whole.save(&path).unwrap();
    KvCache::load(&path, device).unwrap().layers.remove(0)
}

fn traces(group: usize, device: &Device) -> [Trace; 2] {
    [0, 1].map(|row| Trace::new(row as u64 + 3, group, TOKENS[row], device))
}

/// Budgets that are shares of prompts of unequal length.
#[test]
fn rows_read_as_they_do_alone() {
    for tested in quick_devices("read_subset") {
        let traces = traces(2, &tested.device);
        let gates = json!([[0.5, 0.9], [0.4, 0.2], [0.2, 0.6]]);
        for config in [
            json!({"policy": "quest", "budget": 0.4}),
            json!({"policy": "double-sparsity", "budget": 0.3}),
            json!({"policy": "hshare", "budget": 0.3}),
            json!({"policy": "duo-attention", "budget": 0.4, "alpha": gates}),
        ] {
            let policy = policy(config.clone());
            let mut alone = [0, 1].map(|row| traces[row].prefill(&*policy, DEEP));
            let mut both = LayerCache::concat(alone.to_vec()).unwrap();
            for index in 0..STEPS {
                let steps = [0, 1].map(|row: usize| traces[row].step(index));
                let step = joined(&steps[0], &steps[1]);
                let output = policy.step(DEEP, &mut both, step).unwrap();
                let output = read_f32("output", output).unwrap();
                let mut expected = Vec::new();
                for (cache, step) in alone.iter_mut().zip(steps) {
                    let output = policy.step(DEEP, cache, step).unwrap();
                    expected.extend(read_f32("output", output).unwrap());
                }
                let worst = output.iter().zip(&expected).map(|(a, b)| (a - b).abs());
                let worst = worst.fold(0.0, f32::max);
                assert!(worst < 1e-5, "{config} on {} step {index}: {worst}", tested.name);
            }
        }
    }
}

#[test]
fn what_cannot_be_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let (no_json, no_gates) = (file("a.json", "{"), file("b.tsv", "0.5\t0.1\n0.2\tx\n"));
    for (config, expected) in [
        (json!({"policy": "quest", "budget": 15, "fit_page": false}), "15 tokens is below a page"),
        (json!({"policy": "quest", "budget": 64, "page": 0}), "`page` is 0"),
        (json!({"policy": "quest", "budget": 64, "heads": "min"}), "unknown variant `min`"),
        (json!({"policy": "double-sparsity", "budget": 64, "labels": 0}), "`labels` is 0"),
        (json!({"policy": "double-sparsity", "budget": 64, "window": 0}), "`window` is 0"),
        (json!({"policy": "double-sparsity", "budget": 64, "channels": []}), "no layers"),
        (json!({"policy": "double-sparsity", "budget": 64, "channels": no_json}), "a.json"),
        (json!({"policy": "double-sparsity", "budget": 64, "channels": "no/file"}), "no/file"),
        (json!({"policy": "hshare", "budget": 64, "queries": 0.4}), "`queries` is 0.4"),
        (json!({"policy": "hshare", "budget": 64, "layers": 0.0}), "`layers` is 0"),
        (json!({"policy": "hshare", "budget": 64, "heads": 1.5}), "`heads` is 1.5"),
        (json!({"policy": "hshare", "budget": 8, "sinks": 4, "recents": 4}), "leave none of 8"),
        (
            json!({"policy": "duo-attention"}),
            r#"missing field `alpha`, as in {"policy": "duo-attention", "#,
        ),
        (json!({"policy": "duo-attention", "alpha": [[0.1], [0.2, 0.3]]}), "no matrix"),
        (json!({"policy": "duo-attention", "alpha": no_gates}), "line 2: `x` is no number"),
        (json!({"policy": "duo-attention", "alpha": [[0.1]], "sparsity": 2.0}), "`sparsity` is 2"),
        (json!({"policy": "duo-attention", "alpha": [[0.1]], "recents": 0}), "`recents` is 0"),
    ] {
        let error = build(&config).unwrap_err().to_string();
        assert!(error.contains(expected), "{config}: {error}");
    }
    let device = &devices()[0].device;
    let trace = Trace::new(1, 2, 90, device);
    for (config, expected) in [
        (json!({"policy": "double-sparsity", "budget": 20, "channels": [[[0]]]}), "has 1 layer,"),
        (
            json!({"policy": "double-sparsity", "budget": 20,
                "channels": [[[0]], [[0]], [[0], [1], [2]]]}),
            "has 3 heads, expected 4 or 2",
        ),
        (
            json!({"policy": "double-sparsity", "budget": 20,
                "channels": [[[0]], [[0]], [[0], [16]]]}),
            "expected 1 different ones below 16",
        ),
        (json!({"policy": "double-sparsity", "budget": 20, "labels": 17}), "`labels` is 17"),
        (json!({"policy": "duo-attention", "alpha": [[0.1, 0.2]]}), "`alpha` has 1 layer,"),
    ] {
        let policy = policy(config.clone());
        let options = CacheOptions::new(device, DType::F32);
        let error = trace.prompt().observed(|seen| {
            let seen = Observation { layer: DEEP, ..seen.clone() };
            policy.prefill(&seen, STEPS, options).unwrap_err().to_string()
        });
        assert!(error.contains(expected), "{config}: {error}");
    }
}
