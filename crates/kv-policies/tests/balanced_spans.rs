//! BalanceKV's options that are ours (spans, anchors by leverage, fitted weights), against plain
//! loops.

use std::collections::BTreeSet;

use burn::tensor::{Device, Tensor};
use kv_core::read_f32;
use kv_testing::{devices, quick_devices};
use serde_json::{Value, json};

use super::balancekv::{clustered, error, weights};
use super::support::{Prompt, policy, same_but_for_ties};

const DIM: usize = 16;
const HEADS: usize = 2;
/// Tokens kept at either end.
const ENDS: usize = 20;
const BLOCK: usize = 64;
const OFFSET: f64 = 0.025;

fn prompt(seed: u64, tokens: usize, device: &Device) -> Prompt {
    clustered(seed, [1, HEADS, tokens, DIM], device)
}

/// The middle tokens of each head, as f64.
fn middle(tensor: &Tensor<4>) -> Vec<Vec<Vec<f64>>> {
    let [_, _, tokens, _] = tensor.dims();
    let all = read_f32("rows", tensor.clone()).unwrap();
    let head = |head: &[f32]| {
        let tokens = head.chunks(DIM).skip(ENDS).take(tokens - 2 * ENDS);
        tokens.map(|row| row.iter().map(|x| f64::from(*x)).collect()).collect()
    };
    all.chunks(tokens * DIM).map(head).collect()
}

fn config(name: &str, budget: usize, options: Value) -> Value {
    let mut config = json!({"policy": name, "budget": budget, "sinks": ENDS, "recents": ENDS,
        "block": BLOCK});
    config.as_object_mut().unwrap().extend(options.as_object().unwrap().clone());
    config
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// A head's tokens, keys centred by their mean.
struct Head {
    keys: Vec<Vec<f64>>,
    values: Vec<Vec<f64>>,
}

impl Head {
    fn all(prompt: &Prompt) -> Vec<Self> {
        let heads = middle(&prompt.keys).into_iter().zip(middle(&prompt.values));
        heads.map(|(keys, values)| Self::of(keys, values)).collect()
    }

    fn of(mut keys: Vec<Vec<f64>>, values: Vec<Vec<f64>>) -> Self {
        let mut mean = vec![0.0; DIM];
        for key in &keys {
            mean.iter_mut().zip(key).for_each(|(sum, x)| *sum += x / keys.len() as f64);
        }
        for key in &mut keys {
            key.iter_mut().zip(&mean).for_each(|(x, m)| *x -= m);
        }
        Self { keys, values }
    }

    /// The walk's kernel.
    fn kernel(&self, i: usize, j: usize) -> f64 {
        let logit = dot(&self.keys[i], &self.keys[j]) / (DIM as f64).sqrt();
        logit.exp() * (dot(&self.values[i], &self.values[j]) + OFFSET)
    }

    /// Each token's leverage within its block.
    fn leverages(&self) -> Vec<f32> {
        let tokens = self.keys.len();
        let leverage = |i: usize| {
            let first = i / BLOCK * BLOCK;
            let row = (first..tokens.min(first + BLOCK)).map(|j| self.kernel(i, j).abs());
            (self.kernel(i, i).abs() / row.sum::<f64>()) as f32
        };
        (0..tokens).map(leverage).collect()
    }

    /// Weights of `kept` tokens, of `before` places before them in the last round's list. Each
    /// stands for `each` of the tokens up to `end`.
    fn fitted(&self, kept: &[usize], before: usize, each: usize, end: usize) -> Vec<f64> {
        let half = BLOCK / 2;
        let mut fitted = Vec::new();
        let group_of = |index: usize| (before + index) / half;
        let groups: BTreeSet<usize> = (0..kept.len()).map(group_of).collect();
        for group in groups {
            let own: Vec<usize> =
                (0..kept.len()).filter(|at| group_of(*at) == group).map(|at| kept[at]).collect();
            let first = (group * half).max(before) * each;
            let all = first..end.min((group + 1) * half * each);
            let prior = each as f64;
            let mut weights = vec![prior; own.len()];
            for _ in 0..UPDATES {
                let update = |(j, weight): (usize, &f64)| {
                    let ridge = RIDGE * self.kernel(own[j], own[j]);
                    let target: f64 = all.clone().map(|i| self.kernel(own[j], i)).sum();
                    let (mut above, mut below) = (ridge * weight, 0.0);
                    for (&i, weight) in own.iter().zip(&weights) {
                        let term = self.kernel(own[j], i) * weight;
                        if term > 0.0 {
                            above += term;
                        } else {
                            below -= term;
                        }
                    }
                    let b = target + ridge * prior;
                    let updated =
                        weight * (b + (b * b + 4.0 * above * below).sqrt()) / (2.0 * above);
                    updated.clamp(prior / REACH, prior * REACH)
                };
                weights = weights.iter().enumerate().map(update).collect();
            }
            fitted.extend(weights);
        }
        fitted
    }
}

/// As in `fitted.rs`.
const UPDATES: usize = 30;
const RIDGE: f64 = 1.0;
const REACH: f64 = 8.0;

/// Tokens between the ends, counted from the first of them, and their weights.
fn between(cache: &kv_core::LayerCache, head: usize, tokens: usize) -> Vec<(usize, f32)> {
    let kept = weights(cache, head).into_iter();
    let kept = kept.map(|(at, weight, _)| (at as usize, weight));
    kept.filter(|(at, _)| (ENDS..tokens - ENDS).contains(at))
        .map(|(at, weight)| (at - ENDS, weight))
        .collect()
}

/// Whole rounds keep whole spans, of the same number of tokens as without spans.
#[test]
fn spans_stay_or_go_together() {
    for tested in quick_devices("balanced_spans") {
        // A short last block of 48 tokens.
        let tokens = 2 * ENDS + 3 * BLOCK + 48;
        let prompt = prompt(50, tokens, &tested.device);
        for (span, rounds) in [(2, 1), (4, 1), (4, 2), (8, 1)] {
            let target = (tokens - 2 * ENDS) >> rounds;
            let own = config("balancekv", 2 * ENDS + target, json!({"span": span}));
            let cache = prompt.compress(&*policy(own), 1);
            for head in 0..HEADS {
                let kept = between(&cache, head, tokens);
                let context = format!("span {span}, {rounds} rounds on {}", tested.name);
                assert_eq!(kept.len(), target, "{context}");
                let kept: BTreeSet<usize> = kept.into_iter().map(|(at, _)| at).collect();
                let apart = kept.iter().filter(|at| {
                    let first = *at / span * span;
                    !(first..first + span).all(|at| kept.contains(&at))
                });
                assert_eq!(apart.count(), 0, "{context}: {kept:?}");
            }
        }
    }
}

/// Anchors are the tokens of the highest leverage, or the spans of these.
#[test]
fn leverage_chooses_as_plain_loops_do() {
    for tested in quick_devices("balanced_spans") {
        let tokens = 2 * ENDS + 2 * BLOCK + 37;
        let prompt = prompt(51, tokens, &tested.device);
        // Few enough slots that the walk leaves no token the weight of an anchor.
        let target = 100;
        for span in [1, 4] {
            let anchors = target / 2 / span;
            let own = json!({"anchors_by": "leverage", "anchor_span": span});
            let own = config("balancekv-augmented", 2 * ENDS + target, own);
            let cache = prompt.compress(&*policy(own), 1);
            for (index, head) in Head::all(&prompt).iter().enumerate() {
                let kept = between(&cache, index, tokens);
                assert_eq!(kept.len(), target, "{}", tested.name);
                let exact = kept.iter().filter(|(_, weight)| *weight == 1.0);
                let exact: BTreeSet<usize> = exact.map(|(at, _)| at / span).collect();
                let actual: Vec<u32> = exact.iter().map(|span| *span as u32).collect();
                let leverages = head.leverages();
                let whole = leverages.chunks_exact(span);
                let scores: Vec<f32> =
                    whole.map(|span| span.iter().copied().fold(0.0, f32::max)).collect();
                let mut order: Vec<u32> = (0..scores.len() as u32).collect();
                order.sort_by(|a, b| scores[*b as usize].total_cmp(&scores[*a as usize]));
                let context = format!("span {span}, head {index} on {}", tested.name);
                same_but_for_ties(&context, &scores, &actual, &order[..anchors]);
            }
        }
    }
}

/// Weights are those of plain loops in f64: of whole rounds, of budgets between them, with a last
/// block that is short, and where a list of odd length loses tokens.
#[test]
fn fitted_weights_are_those_of_plain_loops() {
    for tested in quick_devices("balanced_spans") {
        // The Gram matrix is a product: rounded factors have errors of 5e-4.
        let limit = if tested.exact_products() { 1e-3 } else { 1e-2 };
        for (seed, count, target) in [(52, 256, 64), (53, 301, 100), (54, 150, 90), (55, 333, 20)] {
            let tokens = 2 * ENDS + count;
            let prompt = prompt(seed, tokens, &tested.device);
            let own = config("balancekv", 2 * ENDS + target, json!({"weights": "fitted"}));
            let cache = prompt.compress(&*policy(own), 1);
            let plain =
                prompt.compress(&*policy(config("balancekv", 2 * ENDS + target, json!({}))), 1);
            let (mut left, mut rounds) = (count, 0);
            while left / 2 >= target {
                left /= 2;
                rounds += 1;
            }
            let rest = left - target;
            for (index, head) in Head::all(&prompt).iter().enumerate() {
                let context = format!("{count} to {target}, head {index} on {}", tested.name);
                let kept = between(&cache, index, tokens);
                let paper = between(&plain, index, tokens);
                let places: Vec<usize> = kept.iter().map(|(at, _)| *at).collect();
                assert!(paper.iter().map(|(at, _)| *at).eq(places.iter().copied()), "{context}");
                let (older, newer) = places.split_at(rest);
                let mut expected = head.fitted(older, 0, 2 << rounds, rest << (rounds + 1));
                expected.extend(match rounds {
                    0 => vec![1.0; newer.len()],
                    _ => head.fitted(newer, 2 * rest, 1 << rounds, count),
                });
                // What is minimised, of all tokens at once, is less than with the paper's weights.
                let distance = |kept: &[(usize, f32)]| {
                    let signed = kept.iter().map(|(at, weight)| (*at, f64::from(*weight)));
                    let signed: Vec<_> = signed.chain((0..count).map(|at| (at, -1.0))).collect();
                    let mut sum = 0.0;
                    for &(i, a) in &signed {
                        sum += signed.iter().map(|&(j, b)| a * b * head.kernel(i, j)).sum::<f64>();
                    }
                    sum
                };
                let (own, other) = (distance(&kept), distance(&paper));
                assert!(own < other, "{context}: {own}, {other} with the paper's weights");
                for ((_, weight), expected) in kept.iter().zip(&expected) {
                    let off = (f64::from(*weight) / expected - 1.0).abs();
                    assert!(off < limit, "{context}: {weight}, expected {expected}");
                }
            }
        }
    }
}

/// A prompt of tokens alike keeps its sum of weights; values of zeros keep the paper's weights.
#[test]
fn fitted_weights_at_their_edges() {
    for tested in quick_devices("balanced_spans") {
        let tokens = 2 * ENDS + 200;
        let full = |value: f32| {
            Tensor::<4>::full(
                [1, HEADS, tokens, DIM],
                value,
                (&tested.device, burn::tensor::DType::F32),
            )
        };
        let query = prompt(56, tokens, &tested.device).query;
        for (value, offset) in [(1.0, 0.025), (0.0, 0.0), (0.0, 0.025)] {
            let prompt = Prompt::new(query.clone(), full(1.0), full(value));
            let own = json!({"weights": "fitted", "value_offset": offset});
            let cache = prompt.compress(&*policy(config("balancekv", 2 * ENDS + 50, own)), 1);
            let sum: f32 = between(&cache, 0, tokens).iter().map(|(_, weight)| weight).sum();
            let limit = if tested.exact_products() { 0.01 } else { 1.0 };
            assert!((sum - 200.0).abs() < limit, "{} {value} {offset}: {sum}", tested.name);
        }
    }
}

/// At equal slots fitted weights err less than powers of two.
#[test]
fn fitted_weights_err_less() {
    let device = &devices()[0].device;
    for rate in [0.5, 0.25, 0.125] {
        let mut sums = [0.0; 2];
        for seed in 0..6 {
            let prompt = clustered(60 + seed, [1, 2, 1024, 32], device);
            for (sum, weights) in sums.iter_mut().zip(["fitted", "paper"]) {
                let own = json!({"policy": "balancekv", "budget": rate, "weights": weights});
                *sum += error(&prompt, &own) / 6.0;
            }
        }
        println!("{rate}: fitted, paper {sums:.4?}");
        assert!(sums[0] < 0.98 * sums[1], "{rate}: {sums:?}");
    }
}
