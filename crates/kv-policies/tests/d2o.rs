use std::sync::Arc;

use burn::tensor::{DType, Tensor};
use kv_core::{CacheOptions, LayerCache, read_f32};
use kv_policies::{D2o, D2oOptions, LayerContext, Observation, OwnedObservation, Policy};
use kv_testing::{
    Numbers, exact_devices, golden_files, quick_devices, quick_exact_devices, relative_error,
};
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

/// The paper's weights, by hand: `e` for the kept token, `exp(cos)` for what goes into it; below
/// the mean cosine a victim is dropped.
#[test]
fn weights_are_the_papers() {
    for tested in quick_exact_devices("weights_are_the_papers") {
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

/// A prompt within the budget leaves the threshold to the first victims; cosines below 0 do no
/// harm.
#[test]
fn thresholds_start_with_the_first_victims() {
    for tested in quick_devices("d2o") {
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
    for tested in quick_devices("d2o") {
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

/// The authors' steps: outputs, thresholds, and what the cache holds in the end.
#[test]
fn golden_official_steps() {
    for golden in golden_files("golden_official_steps", "d2o_official") {
        let keep = golden.tensor("keep_idx");
        let [heads, width] = keep.dims();
        let kept: Vec<Vec<u32>> = keep.indices().chunks(width).map(<[u32]>::to_vec).collect();
        let tokens = golden.tensor("score_at_compress").dims::<2>()[1];
        let steps = golden.number("steps") as usize;
        for tested in exact_devices("golden_official_steps") {
            let [q, k, v] =
                ["q_decode", "k", "v"].map(|name| golden.tensor(name).on::<4>(&tested.device));
            let part = |tensor: &Tensor<4>| tensor.clone().narrow(2, 0, tokens);
            let prompt = Prompt::new(q.clone().narrow(2, 0, 1), part(&k), part(&v));
            let options = D2oOptions { official: true, ..Default::default() };
            let given = D2o::new(Arc::new(Given::new(kept.clone(), width)), options).unwrap();
            let mut cache = prompt.compress(&given, steps);
            // The scores that their steps begin with; those of the sinks are infinite.
            let finite = |score: f32| if score.is_finite() { score } else { 0.0 };
            let scores = golden.tensor("hh_score_after").f32().into_iter().map(finite);
            cache.set_live_track("score", &scores.collect::<Vec<_>>(), 0.0).unwrap();
            let h2o = policy(json!({
                "policy": "h2o", "budget": width, "sinks": 4,
                "recents": golden.number("recent_size") as usize,
            }));
            let d2o = D2o::new(h2o, options).unwrap();
            let (outs, thresholds) = (golden.tensor("step_out"), golden.tensor("threshold"));
            let out_width = outs.values.len() / steps;
            for index in 0..steps {
                let pick = |tensor: &Tensor<4>| tensor.clone().narrow(2, tokens + index, 1);
                let query = q.clone().narrow(2, index, 1);
                let step = step(&query, &pick(&k), &pick(&v), 0, tokens + index);
                let output = d2o.step(LAYER, &mut cache, step).unwrap();
                let output = read_f32("output", output).unwrap();
                let context = format!("{} step {index}", tested.name);
                let expected = &outs.values[index * out_width..][..out_width];
                let error = relative_error(&output, expected);
                assert!(error < 1e-5, "{context}: output off by {error}");
                let threshold = cache.state("threshold").unwrap().clone();
                let threshold = f64::from(read_f32("threshold", threshold).unwrap()[0]);
                let expected = thresholds.values[index + 1];
                let error = (threshold - expected).abs();
                assert!(error < 1e-6, "{context}: threshold {threshold} for {expected}");
            }
            let positions = cache.read_positions().unwrap();
            let mut slots: Vec<usize> = Vec::new();
            for head in 0..heads {
                let mut own: Vec<usize> = cache.layout().live(head).collect();
                own.sort_by_key(|&slot| positions[slot]);
                slots.extend(own);
            }
            let score = cache.track("score").unwrap().clone().unsqueeze_dim::<2>(1);
            for (name, pool) in
                [("k_final", cache.keys()), ("v_final", cache.values()), ("hh_score_final", &score)]
            {
                let rows = read_f32("rows", pool.clone()).unwrap();
                let dim = pool.dims()[1];
                let rows = slots.iter().flat_map(|&slot| rows[slot * dim..][..dim].to_vec());
                let expected = golden.tensor(name).values;
                let both = rows.zip(expected).filter(|(_, expected)| expected.is_finite());
                let (rows, expected): (Vec<f32>, Vec<f64>) = both.unzip();
                let error = relative_error(&rows, &expected);
                assert!(error < 1e-5, "{}: {name} off by {error}", tested.name);
            }
        }
    }
}

const LAYERS: usize = 6;
const TOKENS: usize = 80;

/// Layers whose attention goes to one token in the first and to ever more of them behind, for two
/// sequences.
fn layers(d2o: &dyn Policy, device: &burn::tensor::Device) -> Vec<OwnedObservation> {
    let layer = |index: usize| {
        let mut numbers = Numbers::new(40 + index as u64);
        let mut draw = |heads: usize| numbers.tensor::<4>([2, heads, TOKENS, 8], device);
        let prompt = Prompt::new(draw(4), draw(2), draw(2));
        let mut sums = numbers.normal(2 * 4 * TOKENS);
        for (at, sum) in sums.iter_mut().enumerate() {
            let token = at % TOKENS;
            // The second sequence the other way round.
            let depth = if at < 4 * TOKENS { index } else { LAYERS - 1 - index };
            let heavy = token == 0 || (token.is_multiple_of(2) && token <= 16 * depth);
            *sum = 0.02 * sum.abs() + if heavy { 1.0 } else { 0.0 };
        }
        let sums = Tensor::<1>::from_data(sums.as_slice(), (device, DType::F32));
        prompt.observed(|seen| {
            let layer = LayerContext { index, count: LAYERS };
            let column_sums = Some(sums.reshape([2, 4, TOKENS]));
            let seen = Observation { layer, column_sums, ..seen.clone() };
            OwnedObservation::new(&seen, d2o.needs())
        })
    };
    (0..LAYERS).map(layer).collect()
}

/// `softmax(−f)` of each sequence in f64, `[B][layers]`.
fn shares(layers: &[OwnedObservation]) -> [Vec<f64>; 2] {
    let variations = layers.iter().map(|layer| {
        let sums = read_f32("sums", layer.view().column_sums.unwrap()).unwrap();
        let variance = |head: &[f32]| {
            let most = head.iter().copied().fold(f32::MIN, f32::max);
            let least = head.iter().copied().fold(f32::MAX, f32::min);
            let own = head.iter().map(|x| f64::from((x - least) / (most - least)));
            let mean = own.clone().sum::<f64>() / TOKENS as f64;
            own.map(|x| (x - mean) * (x - mean)).sum::<f64>() / TOKENS as f64
        };
        let heads: Vec<f64> = sums.chunks(TOKENS).map(variance).collect();
        [&heads[..4], &heads[4..]].map(|heads| heads.iter().sum::<f64>() / 4.0)
    });
    let variations: Vec<[f64; 2]> = variations.collect();
    [0, 1].map(|row| {
        let sum: f64 = variations.iter().map(|f| (-f[row]).exp()).sum();
        variations.iter().map(|f| (-f[row]).exp() / sum).collect()
    })
}

/// Each sequence's layers share the budget by how much their attention varies: exactly, in memory
/// too, and while decoding.
#[test]
fn layers_share_the_budget_by_their_attention() {
    for tested in quick_devices("d2o") {
        for (budget, base) in [(json!(20), 20), (json!(0.25), 20), (json!(0.97), 77)] {
            let d2o = policy(json!({"policy": "d2o", "budget": budget}));
            assert!(d2o.capabilities().needs_all_layers);
            let layers = layers(&*d2o, &tested.device);
            let options = CacheOptions::new(&tested.device, DType::F32);
            let mut caches = d2o.prefill_layers(&layers, 5, options.clone()).unwrap();
            let context = format!("{budget} on {}", tested.name);
            for (row, shares) in shares(&layers).iter().enumerate() {
                let lengths = caches.iter().map(|cache| cache.layout().lengths()[2 * row]);
                let lengths: Vec<usize> = lengths.collect();
                assert_eq!(lengths.iter().sum::<usize>(), LAYERS * base, "{context}: {lengths:?}");
                assert!(lengths.iter().all(|&length| length <= TOKENS), "{context}: {lengths:?}");
                if base == 20 {
                    assert!(lengths.iter().min() < lengths.iter().max(), "{context}: {lengths:?}");
                    for (length, share) in lengths.iter().zip(shares) {
                        let exact = share * (LAYERS * base) as f64;
                        assert!(
                            (*length as f64 - exact).abs() < 1.0,
                            "{context}: {length} of {exact}"
                        );
                    }
                }
            }
            for (index, cache) in caches.iter_mut().enumerate() {
                let lengths = cache.layout().lengths().to_vec();
                assert_eq!([lengths[0], lengths[2]], [lengths[1], lengths[3]], "{context}");
                // A step appends before it evicts.
                let slots = cache.layout().capacities().iter().zip(&lengths);
                assert!(
                    slots.clone().all(|(capacity, length)| capacity - length == 1),
                    "{context}"
                );
                assert_eq!(cache.keys().dims()[0], cache.layout().total(), "{context}");
                let mut numbers = Numbers::new(70);
                let mut draw = |heads| numbers.tensor::<4>([2, heads, 5, 8], &tested.device);
                let (q, k, v) = (draw(4), draw(2), draw(2));
                for at in 0..5 {
                    let layer = LayerContext { index, count: LAYERS };
                    d2o.step(layer, cache, step(&q, &k, &v, at, TOKENS + at)).unwrap();
                }
                assert_eq!(cache.layout().lengths(), lengths, "{context}");
            }
            // A sequence has the same alone.
            let alone: Vec<OwnedObservation> = layers.iter().map(|layer| layer.row(1)).collect();
            let alone = d2o.prefill_layers(&alone, 5, options).unwrap();
            for (cache, alone) in caches.iter().zip(alone) {
                assert_eq!(alone.layout().lengths(), &cache.layout().lengths()[2..], "{context}");
            }
        }
    }
}

/// In the authors' code three layers stay whole, and what is cut off goes to no other.
#[test]
fn official_layers_exceed_the_budget() {
    for tested in quick_devices("d2o") {
        let d2o = policy(json!({"policy": "d2o", "budget": 20, "official": true}));
        let layers = layers(&*d2o, &tested.device);
        let options = CacheOptions::new(&tested.device, DType::F32);
        let mut caches = d2o.prefill_layers(&layers, 3, options).unwrap();
        for (row, shares) in shares(&layers).iter().enumerate() {
            for (index, cache) in caches.iter().enumerate() {
                let whole = [0, 1, LAYERS - 1].contains(&index);
                let own = (shares[index] * (LAYERS * 20) as f64) as usize;
                let expected = if whole { TOKENS } else { own };
                let length = cache.layout().lengths()[2 * row];
                // The share is of the prompt first, and cut off twice.
                assert!(
                    length.abs_diff(expected) <= usize::from(!whole),
                    "{length} for {expected}"
                );
            }
        }
        let mut numbers = Numbers::new(71);
        let mut draw = |heads| numbers.tensor::<4>([2, heads, 3, 8], &tested.device);
        let (q, k, v) = (draw(4), draw(2), draw(2));
        for at in 0..3 {
            d2o.step(LAYER, &mut caches[0], step(&q, &k, &v, at, TOKENS + at)).unwrap();
        }
        assert_eq!(caches[0].layout().lengths(), [TOKENS + 3; 4], "{}", tested.name);
    }
}
