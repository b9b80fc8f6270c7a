//! PSAW in decode against masked attention in f64, and what it frees.

use burn::tensor::{DType, Device, Int, Tensor};
use kv_core::{CacheOptions, LayerCache, read_f32};
use kv_policies::{LayerContext, Policy, Psaw};
use kv_testing::{Numbers, devices, quick_devices, relative_error};
use serde_json::{Value, json};

use super::support::{Prompt, kept, policy};

const HEADS: usize = 2;
const GROUP: usize = 2;
const DIM: usize = 16;

/// Queries, keys and values of a prompt of `tokens` and of what follows,
/// `[1, H, tokens + steps, D]`.
struct Sequence {
    tokens: usize,
    all: [Tensor<4>; 3],
}

impl Sequence {
    fn new(tokens: usize, steps: usize, device: &Device) -> Self {
        let mut numbers = Numbers::new(tokens as u64);
        let mut draw = |heads: usize| numbers.tensor([1, heads, tokens + steps, DIM], device);
        Self { tokens, all: [draw(HEADS * GROUP), draw(HEADS), draw(HEADS)] }
    }

    fn cache(&self, policy: &dyn Policy, layer: LayerContext, steps: usize) -> LayerCache {
        let part = |tensor: &Tensor<4>| tensor.clone().narrow(2, 0, self.tokens);
        let [query, keys, values] = self.all.each_ref().map(part);
        Prompt::new(query, keys, values).observed(|seen| {
            let mut seen = seen.clone();
            seen.layer = layer;
            let options = CacheOptions::new(&seen.keys.device(), DType::F32);
            policy.prefill(&seen, steps, options).unwrap()
        })
    }

    /// Attention of all heads at token `at` to those that `sees`, in f64.
    fn attention(&self, at: usize, sees: impl Fn(usize) -> bool) -> Vec<f64> {
        let [queries, keys, values] =
            self.all.each_ref().map(|all| read_f32("all", all.clone()).unwrap());
        let length = self.all[0].dims()[2];
        let row = |all: &[f32], head: usize, token: usize| -> Vec<f64> {
            all[(head * length + token) * DIM..][..DIM].iter().map(|x| f64::from(*x)).collect()
        };
        let mut outputs = Vec::new();
        for head in 0..HEADS * GROUP {
            let query = row(&queries, head, at);
            let seen: Vec<usize> = (0..=at).filter(|&token| sees(token)).collect();
            let logits = seen.iter().map(|&token| {
                let key = row(&keys, head / GROUP, token);
                query.iter().zip(&key).map(|(q, k)| q * k).sum::<f64>() / (DIM as f64).sqrt()
            });
            let logits: Vec<f64> = logits.collect();
            let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = logits.iter().map(|logit| (logit - max).exp()).sum();
            let mut output = vec![0.0; DIM];
            for (&token, logit) in seen.iter().zip(&logits) {
                let value = row(&values, head / GROUP, token);
                let share = (logit - max).exp() / sum;
                output.iter_mut().zip(&value).for_each(|(o, v)| *o += share * v);
            }
            outputs.extend(output);
        }
        outputs
    }
}

/// Decodes sequences of different lengths as one batch; `see` gets each step's outputs and the
/// cache.
fn decode(
    sequences: &[Sequence],
    policy: &dyn Policy,
    layer: LayerContext,
    steps: usize,
    mut see: impl FnMut(usize, Vec<f32>, &LayerCache),
) {
    let caches = sequences.iter().map(|sequence| sequence.cache(policy, layer, steps)).collect();
    let mut cache = LayerCache::concat(caches).unwrap();
    let device = sequences[0].all[0].device();
    for index in 0..steps {
        let pick = |part: usize| -> Tensor<3> {
            let rows = sequences.iter().map(|sequence| {
                let all = sequence.all[part].clone();
                all.narrow(2, sequence.tokens + index, 1).squeeze_dim::<3>(2)
            });
            Tensor::cat(rows.collect(), 0)
        };
        let positions: Vec<i32> =
            sequences.iter().map(|sequence| (sequence.tokens + index) as i32).collect();
        let positions = Tensor::<1, Int>::from_data(positions.as_slice(), (&device, DType::I32));
        let step = kv_policies::Step::new(pick(0), pick(1), pick(2), positions);
        let output = policy.step(layer, &mut cache, step).unwrap();
        see(index, read_f32("output", output).unwrap(), &cache);
    }
}

/// `P_l(t)` in floats, eq. (15), as `t` less what is seen: exact where the share is next to 1 too.
fn first_visible(psaw: &Psaw, layer: LayerContext, number: usize) -> usize {
    let start = psaw.start.unwrap_or(3 * layer.count / 4);
    if layer.index < start {
        return 0;
    }
    let depth = (layer.index + 1 - start) as f64 / (layer.count - start) as f64;
    number - (psaw.phi.powf(psaw.alpha * depth) * number as f64).ceil() as usize
}

/// Parameters, layers, and prompt lengths: prompts shorter than the sinks, models of fewer than
/// four layers, windows of hardly a token.
fn cases() -> Vec<(Value, LayerContext, Vec<usize>)> {
    let layer = |index: usize, count: usize| LayerContext { index, count };
    vec![
        (json!({"phi": 0.7, "sinks": 4}), layer(7, 8), vec![40, 131]),
        (json!({}), layer(31, 32), vec![90, 7]),
        (json!({"phi": 0.31, "alpha": 2.0, "start": 1, "sinks": 0}), layer(2, 3), vec![61]),
        (json!({"phi": 0.2, "start": 0, "sinks": 16}), layer(1, 2), vec![1, 3, 200]),
        (json!({"phi": 1e-9, "alpha": 3.0, "start": 0, "sinks": 2}), layer(9, 10), vec![50]),
        (json!({"phi": 0.01}), layer(0, 1), vec![20]),
        (json!({"phi": 0.1, "start": 9}), layer(3, 4), vec![20]),
    ]
}

fn psaw(mut config: Value, free: bool) -> (Psaw, std::sync::Arc<dyn Policy>) {
    config["free"] = free.into();
    let options = serde_json::from_value(config.clone()).unwrap();
    config["policy"] = "psaw".into();
    (options, policy(config))
}

#[test]
fn decode_is_masked_attention() {
    const STEPS: usize = 12;
    for tested in quick_devices("psaw") {
        for free in [false, true] {
            for (config, layer, lengths) in cases() {
                let (options, policy) = psaw(config.clone(), free);
                let sequences: Vec<Sequence> = lengths
                    .iter()
                    .map(|&tokens| Sequence::new(tokens, STEPS, &tested.device))
                    .collect();
                decode(&sequences, &*policy, layer, STEPS, |index, outputs, _| {
                    let expected = sequences.iter().flat_map(|sequence| {
                        let at = sequence.tokens + index;
                        let first = first_visible(&options, layer, at + 1);
                        sequence.attention(at, |token| token < options.sinks || token + 1 >= first)
                    });
                    let error = relative_error(&outputs, &expected.collect::<Vec<f64>>());
                    let context = format!("{config} free {free} on {}", tested.name);
                    assert!(error < 1e-5, "{context}: step {index} off by {error}");
                });
            }
        }
    }
}

/// With `free`, the outputs are the same, and the slots are those of the schedule: exactly behind
/// the prompt, up to a bulk more while decoding. Rows of different lengths free at their own steps.
#[test]
fn freeing_changes_bytes_alone() {
    const STEPS: usize = 260;
    let layer = LayerContext { index: 3, count: 4 };
    let config = json!({"phi": 0.1, "start": 1, "sinks": 5});
    for tested in quick_devices("psaw") {
        let steps = if tested.name == "cpu" { STEPS } else { 180 };
        let sequences = [30, 333].map(|tokens| Sequence::new(tokens, steps, &tested.device));
        let (options, free) = psaw(config.clone(), true);
        let (_, whole) = psaw(config.clone(), false);
        let mut expected = Vec::new();
        let mut all_bytes = 0;
        decode(&sequences, &*whole, layer, steps, |_, outputs, cache| {
            expected.push(outputs);
            all_bytes = cache.memory().in_use;
        });
        // What the next query may see.
        let visible = |tokens: usize| {
            let first = first_visible(&options, layer, tokens + 1);
            (0..tokens).filter(|token| *token < options.sinks || token + 1 >= first).count()
        };
        let row_bytes = 2 * DIM * 4;
        for sequence in &sequences {
            let cache = sequence.cache(&*free, layer, steps);
            let slots = HEADS * visible(sequence.tokens);
            assert_eq!(cache.memory().in_use, slots * row_bytes, "{}", tested.name);
            let most = HEADS * (visible(sequence.tokens + steps) + 64);
            let most = most.min(slots + HEADS * steps);
            assert_eq!(cache.memory().allocated, most * row_bytes);
            let first = first_visible(&options, layer, sequence.tokens + 1) as u32;
            let tokens = 0..sequence.tokens as u32;
            let stays = |token: &u32| *token < options.sinks as u32 || token + 1 >= first;
            assert_eq!(kept(&cache, 0), tokens.filter(stays).collect::<Vec<u32>>());
        }
        let mut freed = 0;
        let mut before = 0;
        decode(&sequences, &*free, layer, steps, |index, outputs, cache| {
            if tested.name == "cpu" {
                assert_eq!(outputs, expected[index], "step {index}");
            } else {
                let expected: Vec<f64> = expected[index].iter().map(|x| f64::from(*x)).collect();
                let error = relative_error(&outputs, &expected);
                assert!(error < 1e-5, "{} step {index}: off by {error}", tested.name);
            }
            for (range, &length) in cache.layout().lengths().iter().enumerate() {
                let now = visible(sequences[range / HEADS].tokens + index + 1);
                assert!((now..now + 64).contains(&length), "step {index}: {length} for {now}");
            }
            let bytes = cache.memory().in_use;
            freed += usize::from(bytes < before);
            before = bytes;
        });
        assert!(freed >= 2, "{}: freed {freed} times", tested.name);
        assert!(before < 2 * all_bytes / 3, "{before} of {all_bytes} bytes");
    }
}

/// A row that has ended goes on at its position; it neither fills the cache nor disturbs the
/// others.
#[test]
fn rows_that_end_keep_within_their_room() {
    let layer = LayerContext { index: 3, count: 4 };
    let (options, policy) = psaw(json!({"phi": 0.2, "start": 0, "sinks": 3}), true);
    let device = devices()[0].device.clone();
    let steps = 400;
    let sequences = [50, 20].map(|tokens| Sequence::new(tokens, steps, &device));
    let caches = sequences.iter().map(|sequence| sequence.cache(&*policy, layer, steps)).collect();
    let mut cache = LayerCache::concat(caches).unwrap();
    for index in 0..steps {
        let pick = |part: usize| -> Tensor<3> {
            let rows = sequences.iter().map(|sequence| {
                let all = sequence.all[part].clone();
                all.narrow(2, sequence.tokens + index, 1).squeeze_dim::<3>(2)
            });
            Tensor::cat(rows.collect(), 0)
        };
        let positions = [50 + index as i32, 20 + index.min(10) as i32];
        let positions = Tensor::<1, Int>::from_data(positions, (&device, DType::I32));
        let step = kv_policies::Step::new(pick(0), pick(1), pick(2), positions);
        let output = policy.step(layer, &mut cache, step).unwrap();
        let output = read_f32("output", output.narrow(0, 0, 1)).unwrap();
        let at = 50 + index;
        let first = first_visible(&options, layer, at + 1);
        let sees = |token: usize| token < options.sinks || token + 1 >= first;
        let error = relative_error(&output, &sequences[0].attention(at, sees));
        assert!(error < 1e-5, "step {index} off by {error}");
    }
}

/// Behind another policy's choice of the prompt, with gaps between positions, freeing still changes
/// nothing.
#[test]
fn gaps_in_a_prompt_are_seen_by_position() {
    const STEPS: usize = 150;
    let layer = LayerContext { index: 5, count: 6 };
    for tested in quick_devices("psaw") {
        let steps = if tested.name == "cpu" { STEPS } else { 90 };
        let sequences = [100, 220].map(|tokens| Sequence::new(tokens, steps, &tested.device));
        let combined = |free: bool| {
            policy(json!({
                "policy": "combine",
                "prefill": {"policy": "knorm", "budget": 0.6},
                "decode": {"policy": "psaw", "phi": 0.3, "start": 2, "sinks": 4, "free": free},
            }))
        };
        let mut expected = Vec::new();
        decode(&sequences, &*combined(false), layer, steps, |_, outputs, _| expected.push(outputs));
        let mut last = Vec::new();
        decode(&sequences, &*combined(true), layer, steps, |index, outputs, cache| {
            let expected: Vec<f64> = expected[index].iter().map(|x| f64::from(*x)).collect();
            let error = relative_error(&outputs, &expected);
            assert!(error < 1e-5, "{} step {index}: off by {error}", tested.name);
            last = cache.layout().lengths().to_vec();
        });
        let (psaw, _) = psaw(json!({"phi": 0.3, "start": 2, "sinks": 4}), true);
        for (range, length) in last.into_iter().enumerate() {
            let tokens = sequences[range / HEADS].tokens + steps;
            let first = first_visible(&psaw, layer, tokens + 1);
            assert!(length < tokens + 1 - first + 4 + 64, "{length} slots of {tokens} tokens");
        }
    }
}

#[test]
fn schedules_that_change_nothing_say_so() {
    for (config, layers, says) in [
        (json!({"policy": "psaw"}), 4, false),
        (json!({"policy": "psaw"}), 8, false),
        (json!({"policy": "psaw", "start": 0}), 4, false),
        (json!({"policy": "psaw", "start": 7}), 8, false),
        (json!({"policy": "psaw", "start": 8}), 8, true),
        (json!({"policy": "psaw", "start": 40}), 8, true),
        // Fewer layers than quarters of them.
        (json!({"policy": "psaw"}), 1, false),
        (json!({"policy": "psaw"}), 3, false),
        (json!({"policy": "psaw", "start": 1}), 1, true),
        (json!({"policy": "etf"}), 2, false),
        (json!({"policy": "etf", "start": 0}), 3, false),
        (json!({"policy": "etf", "start": 3}), 3, true),
        (json!({"policy": "cpe", "budget": 64}), 3, false),
        (
            json!({"policy": "cpe", "budget": 64, "psaw": {"start": 4}, "etf": {"start": 5}}),
            4,
            true,
        ),
        (json!({"policy": "cpe", "budget": 64}), 32, false),
        (json!({"policy": "cis", "budget": 64}), 4, false),
    ] {
        let remarks = policy(config.clone()).warnings(layers);
        assert_eq!(!remarks.is_empty(), says, "{config} in {layers} layers: {remarks:?}");
        // It is true: no layer's windows or frozen tokens.
        let idle = (0..layers).all(|index| {
            let layer = LayerContext { index, count: layers };
            let own = policy(config.clone());
            own.visible_window(layer).is_none() && own.frozen_tokens(layer, 1_000).is_none()
        });
        assert_eq!(idle, says || config["policy"] == "cis", "{config} in {layers} layers");
    }
}
