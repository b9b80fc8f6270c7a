//! BalanceKV's anchors by the authors' criterion, against plain loops.

use std::collections::BTreeSet;

use burn::tensor::{DType, Device, Tensor};
use kv_core::{CacheOptions, read_f32};
use kv_policies::{LayerContext, Observation, OwnedObservation, Policy};
use kv_testing::{Numbers, quick_devices};
use serde_json::{Value, json};

use super::balancekv::weights;
use super::support::{Prompt, policy};

const TOKENS: usize = 400;
/// Tokens kept at either end.
const ENDS: usize = 20;
const MIDDLE: usize = TOKENS - 2 * ENDS;
const BLOCK: usize = 64;
const HEADS: usize = 2;
const DIM: usize = 16;
const LAYERS: usize = 3;
/// Tokens between the ends whose keys point away from their block's, by layer and head. Only those
/// of the second layer count.
const APART: [[&[usize]; HEADS]; LAYERS] = [[&[60], &[]], [&[5, 100], &[290]], [&[180], &[180]]];
/// A block whose keys point away from all others, but not from each other.
const REVERSED: usize = 3;
/// Anchors of the second layer: the heads' most, 25 tokens on each side of places 5 and 100.
const ANCHORS: usize = 31 + 51;
/// Anchors, and half of the other tokens: one round of the walk.
const BUDGET: usize = 2 * ENDS + ANCHORS + (MIDDLE - ANCHORS) / 2;

/// A layer's prompt. Keys lie around one direction; that of single tokens and of one block is
/// reversed.
fn prompt(layer: usize, device: &Device) -> Prompt {
    let mut numbers = Numbers::new(layer as u64 + 1);
    let mut keys = Vec::new();
    for apart in APART[layer] {
        let centre: Vec<f32> = numbers.normal(DIM);
        for token in 0..TOKENS {
            let place = token.wrapping_sub(ENDS);
            let reversed = place / BLOCK == REVERSED;
            let sign = if reversed != apart.contains(&place) { -1.0 } else { 1.0 };
            let noise = numbers.normal(DIM);
            keys.extend(centre.iter().zip(noise).map(|(c, n)| sign * c + 0.1 * n));
        }
    }
    let keys = Tensor::<1>::from_data(keys.as_slice(), (device, DType::F32));
    let keys = keys.reshape([1, HEADS, TOKENS, DIM]);
    let values = numbers.tensor([1, HEADS, TOKENS, DIM], device);
    let query = numbers.tensor([1, HEADS, TOKENS, DIM], device);
    Prompt::new(query, keys, values)
}

fn observed(prompt: &Prompt, index: usize, policy: &dyn Policy) -> OwnedObservation {
    prompt.observed(|seen| {
        let layer = LayerContext { index, count: LAYERS };
        OwnedObservation::new(&Observation { layer, ..seen.clone() }, policy.needs())
    })
}

/// The middle tokens of each head, as f64.
fn rows(tensor: &Tensor<4>) -> Vec<Vec<Vec<f64>>> {
    let all = read_f32("rows", tensor.clone()).unwrap();
    let head = |head: &[f32]| {
        let tokens = head.chunks(DIM).skip(ENDS).take(MIDDLE);
        tokens.map(|row| row.iter().map(|x| f64::from(*x)).collect()).collect()
    };
    all.chunks(TOKENS * DIM).map(head).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Each key's mean inner product with its block, whose last one is filled up with zeros.
fn means(keys: &[Vec<f64>]) -> Vec<f64> {
    let mut means = Vec::new();
    for (at, key) in keys.iter().enumerate() {
        let first = at / BLOCK * BLOCK;
        let mut sum = 0.0;
        for place in first..first + BLOCK {
            let product = keys.get(place).map_or(0.0, |other| dot(key, other));
            sum += product + 1e-8;
        }
        means.push(sum / BLOCK as f64);
    }
    means
}

/// The anchors of every head: tokens within 25 of one whose mean is not above 0, and the next
/// lowest means where another head has more.
fn anchors(keys: &[Vec<Vec<f64>>]) -> Vec<BTreeSet<usize>> {
    let means: Vec<Vec<f64>> = keys.iter().map(|keys| means(keys)).collect();
    let mut heads = Vec::new();
    for means in &means {
        let mut own = BTreeSet::new();
        for (at, &mean) in means.iter().enumerate() {
            if mean <= 0.0 {
                own.extend(at.saturating_sub(25)..(at + 26).min(MIDDLE));
            }
        }
        heads.push(own);
    }
    let most = heads.iter().map(BTreeSet::len).max().unwrap();
    for (own, means) in heads.iter_mut().zip(&means) {
        while own.len() < most {
            let free = (0..MIDDLE).filter(|at| !own.contains(at));
            let lowest = free.min_by(|&a, &b| means[a].total_cmp(&means[b])).unwrap();
            own.insert(lowest);
        }
    }
    heads
}

/// Both halves of every block of the tokens that are no anchors, as a walk that tosses no coins but
/// the first divides them.
fn halves(
    keys: &[Vec<f64>],
    values: &[Vec<f64>],
    anchors: &BTreeSet<usize>,
) -> Vec<[BTreeSet<usize>; 2]> {
    let list: Vec<usize> = (0..MIDDLE).filter(|at| !anchors.contains(at)).collect();
    let mut centre = vec![0.0; DIM];
    for &at in &list {
        centre.iter_mut().zip(&keys[at]).for_each(|(sum, x)| *sum += x / list.len() as f64);
    }
    let key =
        |at: usize| -> Vec<f64> { keys[at].iter().zip(&centre).map(|(x, c)| x - c).collect() };
    let mut all = Vec::new();
    for block in list.chunks(BLOCK) {
        let mut halves = [BTreeSet::from([block[0]]), BTreeSet::new()];
        for &at in &block[1..] {
            let mut sum = 0.0;
            for (half, sign) in halves.iter().zip([1.0, -1.0]) {
                for &other in half {
                    let kernel = (dot(&key(at), &key(other)) / (DIM as f64).sqrt()).exp();
                    sum += sign * kernel * (dot(&values[at], &values[other]) + 0.025);
                }
            }
            let mut joins = usize::from(sum > 0.0);
            if halves[joins].len() == block.len() / 2 {
                joins = 1 - joins;
            }
            halves[joins].insert(at);
        }
        all.push(halves);
    }
    all
}

fn config(name: &str, options: Value) -> Value {
    let mut config = json!({"policy": name, "budget": BUDGET, "sinks": ENDS, "recents": ENDS,
        "block": BLOCK, "gamma": 1e12});
    config.as_object_mut().unwrap().extend(options.as_object().unwrap().clone());
    config
}

/// What all layers keep: nothing apart in the first one, the second one's spans in it and in all
/// behind it, whatever their own keys say, and one half of each block of the rest.
#[test]
fn block_means_keep_what_plain_loops_do() {
    for tested in quick_devices("block_anchors") {
        let name = tested.name;
        let policy_of = |name: &str, options| policy(config(name, options));
        let augmented = policy_of("balancekv-augmented", json!({"anchors_by": "block-mean"}));
        assert!(augmented.capabilities().needs_all_layers);
        let prompts: Vec<Prompt> = (0..LAYERS).map(|layer| prompt(layer, &tested.device)).collect();
        let layers: Vec<OwnedObservation> =
            (0..LAYERS).map(|layer| observed(&prompts[layer], layer, &*augmented)).collect();
        let options = CacheOptions::new(&tested.device, DType::F32);
        let caches = augmented.prefill_layers(&layers, 1, options.clone()).unwrap();

        let plain = policy_of("balancekv", json!({}));
        let first = plain.prefill(&layers[0].view(), 1, options.clone()).unwrap();
        for head in 0..HEADS {
            assert_eq!(weights(&caches[0], head), weights(&first, head), "{name}");
        }
        // A model of one layer has no second one.
        let alone = augmented.prefill_layers(&layers[..1], 1, options).unwrap();
        assert_eq!(weights(&alone[0], 0), weights(&first, 0), "{name}");

        let anchors = anchors(&rows(&prompts[1].keys));
        assert!(anchors.iter().all(|own| own.len() == ANCHORS), "{name}");
        for (layer, (prompt, cache)) in prompts.iter().zip(&caches).enumerate().skip(1) {
            let (keys, values) = (rows(&prompt.keys), rows(&prompt.values));
            for (head, anchors) in anchors.iter().enumerate() {
                let context = format!("layer {layer}, head {head} on {name}");
                let kept = weights(cache, head);
                assert_eq!(kept.len(), BUDGET, "{context}");
                let of = |wanted: f32| -> BTreeSet<usize> {
                    let own = kept.iter().filter(|(_, weight, _)| (weight - wanted).abs() < 1e-5);
                    own.map(|(at, ..)| *at as usize).collect()
                };
                let exact: BTreeSet<usize> = anchors.iter().map(|at| ENDS + at).collect();
                let ends = (0..ENDS).chain(TOKENS - ENDS..TOKENS);
                assert_eq!(of(1.0), exact.into_iter().chain(ends).collect(), "{context}");
                let mut walked = of(2.0);
                for halves in halves(&keys[head], &values[head], anchors) {
                    let halves: [BTreeSet<usize>; 2] =
                        halves.map(|half| half.iter().map(|at| ENDS + at).collect());
                    let half = halves.iter().find(|half| half.is_subset(&walked));
                    walked = &walked - half.expect(&context);
                }
                assert!(walked.is_empty(), "{context}: {walked:?}");
            }
        }
    }
}
