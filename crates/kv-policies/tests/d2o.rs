use std::sync::Arc;

use burn::tensor::{DType, Tensor};
use kv_core::{LayerCache, read_f32};
use kv_policies::{D2o, D2oOptions};
use kv_testing::{Numbers, devices, exact_devices, golden_files, relative_error};
use serde_json::json;

use super::support::{Given, LAYER, Prompt, policy, step};

fn live(cache: &LayerCache, pool: &Tensor<2>) -> Vec<f32> {
    let slots: Vec<i32> = cache.layout().live_slots().map(|slot| slot as i32).collect();
    let slots = Tensor::from_data(slots.as_slice(), (&pool.device(), DType::I32));
    read_f32("rows", pool.clone().select(0, slots)).unwrap()
}

/// The authors' merge of a prompt and its threshold.
#[test]
fn golden_official_prefill() {
    for golden in golden_files("golden_official_prefill", "d2o_official") {
        let keep = golden.tensor("keep_idx");
        let [_, width] = keep.dims();
        let kept: Vec<Vec<u32>> = keep.indices().chunks(width).map(<[u32]>::to_vec).collect();
        let tokens = golden.tensor("score_at_compress").dims::<2>()[1];
        for tested in exact_devices("golden_official_prefill") {
            let part = |name: &str| golden.tensor(name).on::<4>(&tested.device);
            let (keys, values) = (part("k").narrow(2, 0, tokens), part("v").narrow(2, 0, tokens));
            let prompt = Prompt::new(part("q_decode").narrow(2, 0, 1), keys, values);
            let options = D2oOptions { official: true, ..Default::default() };
            let d2o = D2o::new(Arc::new(Given::new(kept.clone(), width)), options);
            let cache = prompt.compress(&d2o.unwrap(), 1);
            for (name, pool) in [("k_merged", cache.keys()), ("v_merged", cache.values())] {
                let expected = golden.tensor(name).values;
                let error = relative_error(&live(&cache, pool), &expected);
                assert!(error < 1e-5, "{}: {name} off by {error}", tested.name);
            }
            let threshold = cache.state("threshold").unwrap().clone();
            let threshold = read_f32("threshold", threshold).unwrap()[0];
            let expected = golden.tensor("threshold").values[0];
            let error = (f64::from(threshold) - expected).abs();
            assert!(error < 1e-6, "{}: threshold {threshold} for {expected}", tested.name);
        }
    }
}

/// The paper's weights, by hand: `e` for the kept token, `exp(cos)` for what goes into it; below the
/// mean cosine a victim is dropped.
#[test]
fn weights_are_the_papers() {
    for tested in exact_devices("weights_are_the_papers") {
        let device = &tested.device;
        // Cosines with token 0: 1, 0.8 and −1.
        let rows = [[2.0f32, 0.0], [3.0, 0.0], [0.8, 0.6], [-1.0, 0.0]];
        let keys = Tensor::<2>::from_data(rows, (device, DType::F32)).unsqueeze::<4>();
        let prompt = Prompt::new(keys.clone(), keys.clone(), keys);
        let given = Given::new(vec![vec![0]], 1);
        let d2o = D2o::new(Arc::new(given), D2oOptions::default()).unwrap();
        let cache = prompt.compress(&d2o, 1);
        let (e, near) = (1f32.exp(), 0.8f32.exp());
        let sum = 2.0 * e + near;
        let expected = [(2.0 * e + 3.0 * e + 0.8 * near) / sum, 0.6 * near / sum];
        for pool in [cache.keys(), cache.values()] {
            for (actual, expected) in live(&cache, pool).iter().zip(expected) {
                assert!((actual - expected).abs() < 1e-6, "{}: {actual}", tested.name);
            }
        }
        assert!(cache.log_weights().is_none(), "{}", tested.name);
    }
}

/// A prompt within the budget leaves the threshold to the first victims; cosines below 0 do no harm.
#[test]
fn thresholds_start_with_the_first_victims() {
    for tested in devices() {
        let mut numbers = Numbers::new(2);
        let mut draw = |heads: usize, tokens: usize| {
            numbers.tensor::<4>([1, heads, tokens, 4], &tested.device)
        };
        let prompt = Prompt::new(draw(2, 3), draw(2, 3), draw(2, 3));
        let steps = [draw(2, 6), draw(2, 6), draw(2, 6)];
        for official in [false, true] {
            let d2o = policy(json!({"policy": "d2o", "budget": 3, "official": official}));
            let mut cache = prompt.compress(&*d2o, 6);
            let threshold = |cache: &LayerCache| {
                read_f32("threshold", cache.state("threshold").unwrap().clone()).unwrap()[0]
            };
            assert_eq!(threshold(&cache), -2.0, "{}", tested.name);
            for index in 0..6 {
                let step = step(&steps[0], &steps[1], &steps[2], index, 3 + index);
                let output = d2o.step(LAYER, &mut cache, step).unwrap();
                let output = read_f32("output", output).unwrap();
                assert!(output.iter().all(|x| x.is_finite()), "{} {official}", tested.name);
                assert!((-1.0..=1.0).contains(&threshold(&cache)), "{}", tested.name);
            }
            let rows = live(&cache, cache.keys());
            assert!(rows.iter().all(|x| x.is_finite()), "{} {official}", tested.name);
        }
    }
}

/// Steps merge what H2O evicts, each sequence by its own threshold.
#[test]
fn steps_merge_into_the_most_similar_slot() {
    for tested in devices() {
        let mut numbers = Numbers::new(1);
        let mut draw = |heads: usize, tokens: usize| {
            numbers.tensor::<4>([2, heads, tokens, 16], &tested.device)
        };
        let prompt = Prompt::new(draw(4, 40), draw(2, 40), draw(2, 40));
        let steps = [draw(4, 20), draw(2, 20), draw(2, 20)];
        for official in [false, true] {
            let config = json!({"policy": "d2o", "budget": 16, "official": official});
            let d2o = policy(config);
            let mut cache = prompt.compress(&*d2o, 20);
            let before = read_f32("threshold", cache.state("threshold").unwrap().clone()).unwrap();
            assert_ne!(before[0], before[1], "{}", tested.name);
            for index in 0..20 {
                let step = step(&steps[0], &steps[1], &steps[2], index, 40 + index);
                let output = d2o.step(LAYER, &mut cache, step).unwrap();
                let output = read_f32("output", output).unwrap();
                assert!(output.iter().all(|x| x.is_finite()), "{} {official}", tested.name);
                assert!(cache.layout().lengths().iter().all(|&length| length == 16));
            }
            let after = read_f32("threshold", cache.state("threshold").unwrap().clone()).unwrap();
            assert_ne!(before, after, "{}", tested.name);
        }
    }
}
