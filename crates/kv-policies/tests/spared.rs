//! Merges that spare the tokens which an evictor always keeps.

use burn::tensor::Tensor;
use kv_core::{LayerCache, read_f32};
use kv_testing::{Numbers, quick_devices};
use serde_json::{Value, json};

use super::support::{LAYER, Prompt, policy, step};

const TOKENS: usize = 60;
const STEPS: usize = 8;
const DIM: usize = 8;
const SINKS: usize = 2;
const RECENTS: usize = 6;

/// Rows `[H][N]` of a tensor `[1, H, N, D]`.
fn rows(tensor: &Tensor<4>) -> Vec<Vec<f32>> {
    let all = read_f32("rows", tensor.clone()).unwrap();
    all.chunks(DIM).map(<[f32]>::to_vec).collect()
}

/// Which of a cache's protected slots, and of its others, are no longer what their tokens were.
fn changed(cache: &LayerCache, tokens: [&[Vec<f32>]; 2], newest: usize) -> [Vec<i32>; 2] {
    let positions = cache.read_positions().unwrap();
    let pools = [cache.keys(), cache.values()];
    let pools = pools.map(|pool| read_f32("pool", pool.clone()).unwrap());
    let mut changed = [Vec::new(), Vec::new()];
    for range in 0..2 {
        for slot in cache.layout().live(range) {
            let position = positions[slot];
            let token = range * (TOKENS + STEPS) + position as usize;
            let same = pools.iter().zip(tokens).all(|(pool, tokens)| {
                let slot = pool[slot * DIM..][..DIM].iter();
                slot.zip(&tokens[token]).all(|(a, b)| (a - b).abs() < 1e-6)
            });
            let protected = position < SINKS as i32 || position + RECENTS as i32 > newest as i32;
            if !same {
                changed[usize::from(!protected)].push(position);
            }
        }
    }
    changed
}

/// First and last tokens stay as they are, of the prompt and at every step; others take the merges.
#[test]
fn protected_tokens_take_no_merges() {
    let around = |evictor: &str, own: Value| {
        let mut config = json!({"budget": 20, "evictor": {"policy": evictor, "sinks": SINKS,
            "recents": RECENTS}});
        config.as_object_mut().unwrap().extend(own.as_object().unwrap().clone());
        config
    };
    for tested in quick_devices("spared") {
        let mut numbers = Numbers::new(7);
        let mut draw = |heads: usize| -> Tensor<4> {
            numbers.tensor([1, heads, TOKENS + STEPS, DIM], &tested.device)
        };
        let (query, keys, values) = (draw(4), draw(2), draw(2));
        let part = |tensor: &Tensor<4>| tensor.clone().narrow(2, 0, TOKENS);
        let prompt = Prompt::new(part(&query), part(&keys), part(&values));
        let tokens = [rows(&keys), rows(&values)];
        for config in [
            around("h2o", json!({"policy": "keepkv", "threshold": -1.0})),
            around("h2o", json!({"policy": "keepkv", "threshold": 0.3, "order": "evict-first"})),
            around("h2o", json!({"policy": "keepkv", "threshold": 0.3, "predictor": "window"})),
            around("longflow", json!({"policy": "keepkv", "threshold": -1.0})),
            around("h2o", json!({"policy": "d2o"})),
            around("h2o", json!({"policy": "d2o", "official": true})),
        ] {
            for spare in [true, false] {
                let mut config = config.clone();
                config["spare_protected"] = spare.into();
                let context = format!("{config} on {}", tested.name);
                let policy = policy(config);
                let mut cache = prompt.compress(&*policy, STEPS);
                for at in 0..=STEPS {
                    let newest = TOKENS + at - 1;
                    let tokens = [tokens[0].as_slice(), tokens[1].as_slice()];
                    let [protected, others] = changed(&cache, tokens, newest);
                    if spare || at == 0 {
                        let kept = protected.is_empty();
                        assert_eq!(kept, spare, "{context} step {at}: {protected:?}");
                    }
                    assert!(!others.is_empty(), "{context} step {at}");
                    if at < STEPS {
                        let next = step(&query, &keys, &values, TOKENS + at, TOKENS + at);
                        policy.step(LAYER, &mut cache, next).unwrap();
                    }
                }
            }
        }
    }
}
