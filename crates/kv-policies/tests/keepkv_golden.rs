//! KeepKV against vectors of its authors' code.

use std::sync::Arc;

use burn::tensor::{DType, Tensor};
use kv_kernels::KeyRule;
use kv_policies::{KeepKv, KeepKvOptions, Order, Policy, Predictor, read_votes};
use kv_testing::{Golden, exact_devices, golden_files, relative_error};
use serde_json::json;

use super::keepkv::{around, floats};
use super::support::{Given, LAYER, Prompt, kept, policy, step};

/// The authors' merge of a prompt: votes, keys and values, by mean keys and the window's mean
/// scores.
#[test]
fn golden_official_prefill() {
    for golden in golden_files("golden_official_prefill", "keepkv_official_kv_update") {
        let number = |name: &str| golden.number(name);
        let recents = number("recent_budget") as usize;
        let threshold = number("similarity_threshold") as f32;
        let rows = |name: &str| -> Vec<Vec<u32>> {
            let tensor = golden.tensor(name);
            let [_, width] = tensor.dims();
            tensor.indices().chunks(width).map(<[u32]>::to_vec).collect()
        };
        for tested in exact_devices("golden_official_prefill") {
            let kept = rows("f32.prefill.keep_idx");
            let tokens = kept[0].len() + rows("f32.prefill.discard_idx")[0].len();
            let prompt = of_golden(&golden, tokens, recents, &tested.device);
            let options = KeepKvOptions {
                threshold,
                key: KeyRule::Mean,
                predictor: Predictor::Cumulative,
                window: recents,
                epsilon: number("epsilon"),
                order: Order::EvictFirst,
                ..Default::default()
            };
            let limit = kept[0].len();
            let cache = prompt.compress(&around(kept, limit, options), 1);
            let votes = read_votes(&cache).unwrap();
            let expected = golden.tensor("f32.prefill.cluster_cnt").values;
            let votes: Vec<f64> = votes.into_iter().map(|votes| votes as f64).collect();
            assert_eq!(votes, expected, "{}", tested.name);
            let live = |pool: &Tensor<2>| {
                let rows = cache.layout().live_slots().map(|slot| slot as i32);
                let rows: Vec<i32> = rows.collect();
                let rows = Tensor::from_data(rows.as_slice(), (&tested.device, DType::I32));
                floats(pool.clone().select(0, rows))
            };
            for (name, pool) in [("keys", cache.keys()), ("values", cache.values())] {
                let expected = golden.tensor(&format!("f32.prefill.{name}")).values;
                let error = relative_error(&live(pool), &expected);
                assert!(error < 1e-4, "{}: {name} off by {error}", tested.name);
            }
        }
    }
}

/// Which tokens the authors keep: those of the highest scores, summed without normalising, behind
/// sinks and recents.
#[test]
fn golden_official_selection() {
    for golden in golden_files("golden_official_selection", "keepkv_official_kv_update") {
        let number = |name: &str| golden.number(name);
        let recents = number("recent_budget") as usize;
        let kept = golden.tensor("f32.prefill.keep_idx");
        let [heads, limit] = kept.dims();
        let tokens = limit + golden.tensor("f32.prefill.discard_idx").dims::<2>()[1];
        for tested in exact_devices("golden_official_selection") {
            let prompt = of_golden(&golden, tokens, recents, &tested.device);
            let selecting = policy(json!({
                "policy": "recent-attention", "budget": limit, "layers": "uniform",
                "sinks": number("sink_len") as usize, "recents": recents, "rows": recents,
                "last": number("distance_weight"), "unnormalised": true,
            }));
            let chosen = prompt.observed(|seen| selecting.select(seen)).unwrap().selection;
            for head in 0..heads {
                let mut expected = kept.indices()[head * limit..][..limit].to_vec();
                expected.sort_unstable();
                assert_eq!(chosen.kept().unwrap()[head], expected, "{} head {head}", tested.name);
            }
        }
    }
}

/// The authors' steps: outputs, and what the cache holds in the end. Their scores are means over
/// the last queries.
#[test]
fn golden_official_steps() {
    for golden in golden_files("golden_official_steps", "keepkv_official_kv_update") {
        let number = |name: &str| golden.number(name);
        let (recents, steps) = (number("recent_budget") as usize, number("steps") as usize);
        let indices = golden.tensor("f32.prefill.keep_idx");
        let [heads, limit] = indices.dims();
        let indices: Vec<Vec<u32>> = indices.indices().chunks(limit).map(<[u32]>::to_vec).collect();
        let tokens = number("T") as usize;
        let (outs, gone) =
            (golden.tensor("f32.decode.out"), golden.tensor("f32.decode.discard_idx"));
        let (width, gone) = (outs.values.len() / steps, gone.indices());
        for tested in exact_devices("golden_official_steps") {
            let prompt = of_golden(&golden, tokens, recents, &tested.device);
            let options = KeepKvOptions {
                threshold: number("similarity_threshold") as f32,
                key: KeyRule::Mean,
                predictor: Predictor::Window,
                window: recents,
                epsilon: number("epsilon"),
                order: Order::EvictFirst,
                ..Default::default()
            };
            let mut cache = prompt.compress(&around(indices.clone(), limit, options), steps);
            let [q, k, v] = ["q", "k", "v"].map(|name| golden.tensor(name).on::<4>(&tested.device));
            for index in 0..steps {
                let now = tokens + index;
                // Their victims count along the cache, the new token at its end.
                let victims = (0..heads).map(|head| {
                    let mut positions = kept(&cache, head);
                    positions.push(now as u32);
                    positions[gone[index * heads + head] as usize] as i32
                });
                let given = Given { victims: victims.collect(), ..Given::new(vec![], limit) };
                let keepkv = KeepKv::new(Arc::new(given), options).unwrap();
                let pick = |tensor: &Tensor<4>, at: usize| tensor.clone().narrow(2, at, 1);
                let step = step(&pick(&q, recents + index), &pick(&k, now), &pick(&v, now), 0, now);
                let output = floats(keepkv.step(LAYER, &mut cache, step).unwrap());
                let error = relative_error(&output, &outs.values[index * width..][..width]);
                assert!(error < 1e-5, "{} step {index}: output off by {error}", tested.name);
            }
            let positions = cache.read_positions().unwrap();
            let (mut slots, mut votes) = (Vec::new(), Vec::new());
            let all = read_votes(&cache).unwrap();
            for head in 0..heads {
                let mut own: Vec<usize> = (0..limit).collect();
                let first = cache.layout().live(head).start;
                own.sort_by_key(|&at| positions[first + at]);
                votes.extend(own.iter().map(|&at| all[head * limit + at] as f64));
                slots.extend(own.iter().map(|&at| (first + at) as i32));
            }
            assert_eq!(votes, golden.tensor("f32.final.cluster_cnt").values, "{}", tested.name);
            let slots = Tensor::from_data(slots.as_slice(), (&tested.device, DType::I32));
            for (name, pool) in [("keys", cache.keys()), ("values", cache.values())] {
                let expected = golden.tensor(&format!("f32.final.{name}")).values;
                let rows = floats(pool.clone().select(0, slots.clone()));
                let error = relative_error(&rows, &expected);
                assert!(error < 1e-5, "{}: {name} off by {error}", tested.name);
            }
        }
    }
}

fn of_golden(
    golden: &Golden,
    tokens: usize,
    recents: usize,
    device: &burn::tensor::Device,
) -> Prompt {
    let prefix = |name: &str, count: usize| golden.tensor(name).on::<4>(device).narrow(2, 0, count);
    Prompt::new(prefix("q", recents), prefix("k", tokens), prefix("v", tokens))
}
