use std::f64::consts::PI;
use std::sync::Arc;

use burn::tensor::{DType, Tensor};
use kv_core::{CacheOptions, read_f32};
use kv_kernels::KeyRule;
use kv_policies::{
    KeepKv, KeepKvOptions, LayerContext, Observation, Order, Policy, Predictor, VOTES_HIGH,
    read_votes,
};
use kv_testing::{Numbers, quick_devices, quick_exact_devices, relative_error};
use serde_json::json;

use super::support::{Given, LAYER, Prompt, kept, policy, step};

pub(super) fn around(kept: Vec<Vec<u32>>, limit: usize, options: KeepKvOptions) -> KeepKv {
    KeepKv::new(Arc::new(Given::new(kept, limit)), options).unwrap()
}

/// Merges made for the very last query.
fn exact(key: KeyRule) -> KeepKvOptions {
    KeepKvOptions {
        threshold: -1.0,
        key,
        alpha: 1e-9,
        window: 1,
        order: Order::EvictFirst,
        ..Default::default()
    }
}

pub(super) fn floats<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    read_f32("test", tensor).unwrap()
}

fn wide<const D: usize>(tensor: Tensor<D>) -> Vec<f64> {
    floats(tensor).into_iter().map(f64::from).collect()
}

/// A random prompt: one query head a key-value head.
fn prompt(seed: u64, tokens: usize, group: usize, device: &burn::tensor::Device) -> Prompt {
    let mut numbers = Numbers::new(seed);
    Prompt::new(
        numbers.tensor([2, 2 * group, tokens, 16], device),
        numbers.tensor([2, 2, tokens, 16], device),
        numbers.tensor([2, 2, tokens, 16], device),
    )
}

const KEYS: [KeyRule; 3] = [KeyRule::Paper, KeyRule::Additive, KeyRule::Votes];

/// Theorem 3: what the prompt's last query attends to is the same behind the merge.
#[test]
fn prefill_leaves_the_last_query_as_it_was() {
    for tested in quick_exact_devices("prefill_leaves_the_last_query_as_it_was") {
        let prompt = prompt(1, 120, 1, &tested.device);
        let query = prompt.query.clone().narrow(2, 119, 1).squeeze_dim::<3>(2);
        let full = prompt.compress(&*policy(json!({"policy": "full"})), 1);
        let expected = full.attend(query.clone(), Default::default()).unwrap().output;
        for key in KEYS {
            let kept = (0..4).map(|range| (range..range + 100).step_by(5).collect()).collect();
            let keepkv = around(kept, 20, exact(key));
            let cache = prompt.compress(&keepkv, 1);
            assert_eq!(cache.layout().lengths(), [20; 4], "{}", tested.name);
            let actual = cache.attend(query.clone(), Default::default()).unwrap().output;
            let error = relative_error(&floats(actual), &wide(expected.clone()));
            assert!(error < 1e-5, "{} {key:?}: off by {error}", tested.name);
            let votes: u64 = read_votes(&cache).unwrap().iter().sum();
            assert_eq!(votes, 4 * 120, "{} {key:?}", tested.name);
        }
        // A merge by the authors' code loses attention.
        let kept = (0..4).map(|range| (range..range + 100).step_by(5).collect()).collect();
        let cache = prompt.compress(&around(kept, 20, exact(KeyRule::Mean)), 1);
        let lossy = cache.attend(query, Default::default()).unwrap().output;
        let error = relative_error(&floats(lossy), &wide(expected));
        assert!(error > 1e-3, "{}: off by {error} only", tested.name);
    }
}

/// Every decode step's merge leaves that step's attention as it was, and votes add up to all
/// tokens.
#[test]
fn steps_leave_their_query_as_it_was() {
    for tested in quick_exact_devices("steps_leave_their_query_as_it_was") {
        let prompt = prompt(2, 30, 1, &tested.device);
        let steps = self::prompt(3, 40, 1, &tested.device);
        for key in KEYS {
            let keepkv = around(vec![(0..30).collect(); 4], 32, exact(key));
            let mut cache = prompt.compress(&keepkv, 41);
            for index in 0..40 {
                let step = step(&steps.query, &steps.keys, &steps.values, index, 30 + index);
                let query = steps.query.clone().narrow(2, index, 1).squeeze_dim::<3>(2);
                let output = keepkv.step(LAYER, &mut cache, step).unwrap();
                let again = cache.attend(query, Default::default()).unwrap().output;
                let error = relative_error(&floats(again), &wide(output));
                assert!(error < 1e-4, "{} {key:?} step {index}: off by {error}", tested.name);
                let votes: u64 = read_votes(&cache).unwrap().iter().sum();
                assert_eq!(votes, 4 * (31 + index as u64), "{} {key:?}", tested.name);
                assert!(cache.layout().lengths().iter().all(|&length| length <= 32));
            }
        }
    }
}

/// The same where victims wait for a few steps and go together.
#[test]
fn merges_every_few_steps_leave_their_query_as_it_was() {
    const INTERVAL: usize = 5;
    for tested in quick_exact_devices("merges_every_few_steps_leave_their_query_as_it_was") {
        let prompt = prompt(26, 32, 1, &tested.device);
        let steps = self::prompt(27, 23, 1, &tested.device);
        for key in ["paper", "additive", "votes"] {
            let keepkv = policy(json!({
                "policy": "keepkv", "threshold": -1.0, "alpha": 1e-9, "window": 1, "key": key,
                "evictor": {"policy": "h2o", "budget": 32, "interval": INTERVAL},
            }));
            let mut cache = prompt.compress(&*keepkv, 24);
            let mut merged = 0;
            for index in 0..23 {
                let step = step(&steps.query, &steps.keys, &steps.values, index, 32 + index);
                let query = steps.query.clone().narrow(2, index, 1).squeeze_dim::<3>(2);
                let output = keepkv.step(LAYER, &mut cache, step).unwrap();
                let again = cache.attend(query, Default::default()).unwrap().output;
                let error = relative_error(&floats(again), &wide(output));
                assert!(error < 1e-4, "{} {key} step {index}: off by {error}", tested.name);
                let votes: u64 = read_votes(&cache).unwrap().iter().sum();
                assert_eq!(votes, 4 * (33 + index as u64), "{} {key}", tested.name);
                let length = cache.layout().lengths()[0];
                assert!(length < 32 + INTERVAL, "{} {key} step {index}: {length}", tested.name);
                merged += usize::from(length == 32);
            }
            assert_eq!(merged, 4, "{} {key}", tested.name);
        }
    }
}

/// Lemma 6: tokens that are the same merge without any error, for every later query.
#[test]
fn identical_tokens_merge_for_good() {
    for tested in quick_exact_devices("identical_tokens_merge_for_good") {
        let few = prompt(4, 6, 2, &tested.device);
        // Every token eight times.
        let repeat = |tensor: Tensor<4>| Tensor::cat(vec![tensor; 8], 2);
        let prompt = Prompt::new(
            repeat(few.query.clone()),
            repeat(few.keys.clone()),
            repeat(few.values.clone()),
        );
        // Scores of one and the same query: predictions for the same key are the same then.
        let options = KeepKvOptions { order: Order::EvictFirst, window: 1, ..Default::default() };
        let kept = vec![(0..6).collect(); 4];
        let full = prompt.compress(&*policy(json!({"policy": "full"})), 1);
        for key in KEYS {
            let keepkv = around(kept.clone(), 6, KeepKvOptions { key, ..options });
            let cache = prompt.compress(&keepkv, 1);
            assert_eq!(read_votes(&cache).unwrap(), [8; 24], "{} {key:?}", tested.name);
            for token in 0..6 {
                let query = self::prompt(5 + token, 1, 2, &tested.device).query.squeeze_dim(2);
                let expected = full.attend(query.clone(), Default::default()).unwrap().output;
                let actual = cache.attend(query, Default::default()).unwrap().output;
                let error = relative_error(&floats(actual), &wide(expected));
                assert!(error < 1e-5, "{} {key:?}: off by {error}", tested.name);
            }
        }
    }
}

/// The same with defaults, through prompt and steps, whatever each of them has been scored by; with
/// grouped queries too.
#[test]
fn identical_tokens_merge_step_after_step() {
    for tested in quick_exact_devices("identical_tokens_merge_step_after_step") {
        let few = prompt(14, 6, 2, &tested.device);
        let cycle = |tensor: &Tensor<4>, times| Tensor::cat(vec![tensor.clone(); times], 2);
        let (query, steps) = (prompt(15, 30, 2, &tested.device), prompt(16, 30, 2, &tested.device));
        let tokens = Prompt::new(query.query, cycle(&few.keys, 5), cycle(&few.values, 5));
        let full = policy(json!({"policy": "full"}));
        for key in KEYS {
            let options = KeepKvOptions { key, order: Order::EvictFirst, ..Default::default() };
            // The oldest goes: always one that comes again.
            let keepkv = around(vec![(0..6).collect(); 4], 6, options);
            let (mut cache, mut all) = (tokens.compress(&keepkv, 30), tokens.compress(&*full, 30));
            let (keys, values) = (cycle(&few.keys, 5), cycle(&few.values, 5));
            for index in 0..30 {
                let next = || step(&steps.query, &keys, &values, index, 30 + index);
                let expected = wide(full.step(LAYER, &mut all, next()).unwrap());
                let actual = floats(keepkv.step(LAYER, &mut cache, next()).unwrap());
                let error = relative_error(&actual, &expected);
                assert!(error < 2e-6, "{} {key:?} step {index}: off by {error}", tested.name);
            }
            let votes: u64 = read_votes(&cache).unwrap().iter().sum();
            assert_eq!(votes, 4 * 60, "{} {key:?}", tested.name);
        }
    }
}

/// Victims like nothing that stays are dropped, their votes with them; what stays is untouched.
#[test]
fn victims_unlike_all_others_are_dropped() {
    for tested in quick_devices("keepkv") {
        let prompt = prompt(6, 40, 1, &tested.device);
        let options = KeepKvOptions { threshold: 1.0, ..exact(KeyRule::Paper) };
        let kept = vec![(0..10).collect(); 4];
        let cache = prompt.compress(&around(kept.clone(), 10, options), 1);
        assert_eq!(read_votes(&cache).unwrap(), [1; 40], "{}", tested.name);
        let given = Given::new(kept, 10);
        let plain = prompt.compress(&given, 1);
        for (a, b) in [(cache.keys(), plain.keys()), (cache.values(), plain.values())] {
            assert_eq!(floats(a.clone()), floats(b.clone()), "{}", tested.name);
        }
    }
}

/// One slot takes all.
#[test]
fn a_single_slot_takes_everything() {
    for tested in quick_devices("keepkv") {
        let prompt = prompt(7, 12, 1, &tested.device);
        let keepkv = around(vec![vec![3]; 4], 1, exact(KeyRule::Paper));
        let mut cache = prompt.compress(&keepkv, 8);
        assert_eq!(read_votes(&cache).unwrap(), [12; 4], "{}", tested.name);
        let steps = self::prompt(8, 4, 1, &tested.device);
        for index in 0..4 {
            let step = step(&steps.query, &steps.keys, &steps.values, index, 12 + index);
            let output = keepkv.step(LAYER, &mut cache, step).unwrap();
            assert!(floats(output).iter().all(|x| x.is_finite()), "{}", tested.name);
            assert_eq!(read_votes(&cache).unwrap(), [13 + index as u64; 4], "{}", tested.name);
        }
    }
}

/// A head without room for a token refuses it before anything is merged, and goes on once it has
/// room.
#[test]
fn a_full_cache_refuses_the_next_token_and_stays_as_it_was() {
    for tested in quick_devices("keepkv") {
        let prompt = prompt(26, 30, 1, &tested.device);
        let steps = self::prompt(27, 4, 1, &tested.device);
        // Room for two more, though the limit lets it hold three.
        let keepkv = around(vec![(0..10).collect(); 4], 13, exact(KeyRule::Paper));
        let mut cache = prompt.compress(&keepkv, 2);
        let next = |index| step(&steps.query, &steps.keys, &steps.values, index, 30 + index);
        for index in 0..2 {
            keepkv.step(LAYER, &mut cache, next(index)).unwrap();
        }
        let before = (floats(cache.keys().clone()), read_votes(&cache).unwrap());
        let error = keepkv.step(LAYER, &mut cache, next(2)).unwrap_err().to_string();
        assert!(error.contains("12") && error.contains("13"), "{}: {error}", tested.name);
        let after = (floats(cache.keys().clone()), read_votes(&cache).unwrap());
        assert_eq!(after, before, "{}", tested.name);
        cache.resize(vec![14; 4]).unwrap();
        for index in 2..4 {
            keepkv.step(LAYER, &mut cache, next(index)).unwrap();
        }
        assert_eq!(cache.layout().lengths(), [13; 4], "{}", tested.name);
        assert_eq!(read_votes(&cache).unwrap().iter().sum::<u64>(), 4 * 34, "{}", tested.name);
    }
}

/// Where f32 stops counting, votes go on.
#[test]
fn votes_count_beyond_what_floats_can() {
    for tested in quick_devices("keepkv") {
        let prompt = prompt(9, 4, 1, &tested.device);
        let keepkv = around(vec![vec![0, 1]; 4], 2, exact(KeyRule::Paper));
        let mut cache = prompt.compress(&keepkv, 8);
        let before = read_votes(&cache).unwrap();
        // 2^24 more for every slot.
        let high = cache.track(VOTES_HIGH).unwrap().clone().add_scalar(4096.0);
        cache.set_track(VOTES_HIGH, high, 0.0).unwrap();
        let steps = self::prompt(10, 3, 1, &tested.device);
        for index in 0..3 {
            let step = step(&steps.query, &steps.keys, &steps.values, index, 4 + index);
            keepkv.step(LAYER, &mut cache, step).unwrap();
        }
        let total: u64 = read_votes(&cache).unwrap().iter().sum();
        let expected = before.iter().sum::<u64>() + 4 * (2 * (1 << 24) + 3);
        assert_eq!(total, expected, "{}", tested.name);
    }
}

/// Keys of zeros resemble nothing; tokens that nobody attends to merge as nothing.
#[test]
fn zero_keys_and_tiny_scores() {
    for tested in quick_devices("keepkv") {
        let mut prompt = prompt(11, 20, 1, &tested.device);
        prompt.keys = prompt.keys.clone().mul_scalar(0.0);
        let options = KeepKvOptions { threshold: 0.5, ..exact(KeyRule::Paper) };
        let kept = vec![(0..5).collect(); 4];
        let cache = prompt.compress(&around(kept.clone(), 5, options), 1);
        assert_eq!(read_votes(&cache).unwrap(), [1; 20], "{}", tested.name);
        // Logits of −200 and +200, merged whatever their keys.
        let mut prompt = self::prompt(12, 20, 1, &tested.device);
        let query = prompt.query.clone().narrow(2, 19, 1);
        let norm = query.clone().powi_scalar(2).sum_dim(3);
        let along = query.div(norm).repeat_dim(2, 20);
        let signs: Vec<f32> = (0..20).map(|i| if i % 2 == 0 { 800.0 } else { -800.0 }).collect();
        let signs = Tensor::<1>::from_data(signs.as_slice(), &tested.device);
        prompt.keys = along * signs.reshape([1, 1, 20, 1]);
        let cache = prompt.compress(&around(kept, 5, exact(KeyRule::Paper)), 1);
        let query = prompt.query.clone().narrow(2, 19, 1).squeeze_dim::<3>(2);
        let full = prompt.compress(&*policy(json!({"policy": "full"})), 1);
        let expected = full.attend(query.clone(), Default::default()).unwrap().output;
        let actual = cache.attend(query, Default::default()).unwrap().output;
        let error = relative_error(&floats(actual), &wide(expected));
        assert!(error < 1e-2, "{}: off by {error}", tested.name);
    }
}

/// Groups of similar tokens compete as one: two halves of a heavy token stay as one slot.
#[test]
fn similar_tokens_compete_together() {
    for tested in quick_devices("keepkv") {
        let device = &tested.device;
        // Token 2 alone gets most; 0 and 1 are alike and together get more.
        let rows = [[2.0f32, 0.0], [2.0, 0.02], [0.0, 2.3], [-3.0, -3.0], [0.1, 0.1]];
        let keys = Tensor::<2>::from_data(rows, (device, DType::F32)).unsqueeze::<4>();
        let query = Tensor::<4>::ones([1, 1, 5, 2], (device, DType::F32));
        let prompt = Prompt::new(query, keys.clone(), keys);
        let kept = |order: &str| {
            let config = json!({
                "policy": "keepkv",
                "order": order,
                "evictor": {"policy": "snapkv", "budget": 2, "window": 1, "kernel": 1},
            });
            let cache = prompt.compress(&*policy(config), 1);
            (kept(&cache, 0), read_votes(&cache).unwrap())
        };
        assert_eq!(kept("evict-first"), (vec![2, 4], vec![1, 1]), "{}", tested.name);
        let (stays, votes) = kept("merge-first");
        assert!(stays == [0, 4] || stays == [1, 4], "{}: {stays:?}", tested.name);
        assert_eq!(votes, [2, 1], "{}", tested.name);
    }
}

#[test]
fn options_out_of_range_are_refused() {
    let refused = |config: serde_json::Value| {
        kv_policies::build(&config).map(|policy| policy.name()).unwrap_err().to_string()
    };
    for (option, value) in [
        ("threshold", json!(1.5)),
        ("guard", json!(0.5)),
        ("alpha", json!(1.0)),
        ("window", json!(0)),
        ("evictor", json!("full")),
        ("evictor", json!("pyramidinfer")),
        ("pristine", json!(1.5)),
        ("pristine", json!(-0.1)),
    ] {
        let mut config = json!({"policy": "keepkv", "budget": 0.5});
        config[option] = value;
        let error = refused(config);
        assert!(error.contains(option), "{option}: {error}");
    }
    for (option, evictor) in [("background", "tova"), ("inherit", "snapkv")] {
        let mut config = json!({"policy": "keepkv", "budget": 0.5, "evictor": evictor});
        config[option] = true.into();
        let error = refused(config);
        assert!(error.contains(option) && error.contains(evictor), "{option}: {error}");
    }
    let built = policy(json!({
        "policy": "keepkv", "budget": 0.5, "evictor": "snapkv", "pristine": 0.5, "background": true,
    }));
    assert_eq!(policy(built.config()).config(), built.config());
}

/// What each predictor says of a slot is the average of the scores that it has had, prompt and
/// steps.
#[test]
fn predictors_average_what_slots_have_had() {
    const WINDOW: usize = 3;
    for tested in quick_exact_devices("predictors_average_what_slots_have_had") {
        let (prompt, steps) = (prompt(20, 6, 1, &tested.device), prompt(21, 5, 1, &tested.device));
        let join = |a: &Tensor<4>, b: &Tensor<4>| wide(Tensor::cat(vec![a.clone(), b.clone()], 2));
        let (queries, keys) = (join(&prompt.query, &steps.query), join(&prompt.keys, &steps.keys));
        let score = |range: usize, query: usize, key: usize| -> f64 {
            let row = |of: &[f64], at: usize| of[(range * 11 + at) * 16..][..16].to_vec();
            let (q, k) = (row(&queries, query), row(&keys, key));
            (q.iter().zip(k).map(|(a, b)| a * b).sum::<f64>() / 4.0).exp()
        };
        for (predictor, absolute_step) in [
            (Predictor::Ema, false),
            (Predictor::Ema, true),
            (Predictor::Cumulative, false),
            (Predictor::Window, false),
        ] {
            let options = KeepKvOptions { predictor, window: WINDOW, ..exact(KeyRule::Paper) };
            let options = KeepKvOptions { alpha: 0.7, absolute_step, ..options };
            let keepkv = around(vec![(0..6).collect(); 4], 20, options);
            let mut cache = prompt.compress(&keepkv, 5);
            for index in 0..5 {
                let step = step(&steps.query, &steps.keys, &steps.values, index, 6 + index);
                keepkv.step(LAYER, &mut cache, step).unwrap();
            }
            let track = |name: &str| floats(cache.track(name).unwrap().clone());
            let (scores, samples) = (track("log-scores"), track("log-samples"));
            for range in 0..4 {
                for (key, slot) in cache.layout().live(range).enumerate() {
                    let first = key.max(6 - WINDOW);
                    let seen: Vec<f64> =
                        (first..11).map(|query| score(range, query, key)).collect();
                    let weigh = |age: usize| match predictor {
                        Predictor::Ema => 0.7f64.powi(age as i32),
                        Predictor::Cumulative => 1.0,
                        Predictor::Window => f64::from(u8::from(age < WINDOW)),
                    };
                    let ages = seen.iter().rev().enumerate();
                    let (sum, total) = ages.fold((0.0, 0.0), |(sum, total), (age, score)| {
                        (sum + weigh(age) * score, total + weigh(age))
                    });
                    // Equation 8 divides by what a token of the first step has seen, and new ones
                    // as if they came behind endless steps.
                    let steps = if key < 6 { 0.7f64.powi(11) } else { 0.0 };
                    let total = if absolute_step { (1.0 - steps) / 0.3 } else { total };
                    let actual = f64::from(scores[slot] - samples[slot]);
                    let off = (actual - (sum / total).ln()).abs();
                    assert!(off < 1e-4, "{} {predictor:?} {range} {key}: {off}", tested.name);
                }
            }
        }
    }
}

/// LongFlow's choices behind attention are those that it makes within, one slot earlier.
#[test]
fn longflow_gives_up_what_it_would_overwrite() {
    for tested in quick_exact_devices("longflow_gives_up_what_it_would_overwrite") {
        let (prompt, steps) =
            (prompt(24, 20, 2, &tested.device), prompt(25, 40, 2, &tested.device));
        for scope in ["layer", "head"] {
            let alone = policy(json!({"policy": "longflow", "budget": 33, "scope": scope}));
            // Nothing is alike enough to merge.
            let around = policy(json!({
                "policy": "keepkv", "threshold": 1.0,
                "evictor": {"policy": "longflow", "budget": 32, "scope": scope},
            }));
            let (mut own, mut other) =
                (prompt.compress(&*alone, 40), prompt.compress(&*around, 40));
            for index in 0..40 {
                let next = || step(&steps.query, &steps.keys, &steps.values, index, 20 + index);
                let expected = wide(alone.step(LAYER, &mut own, next()).unwrap());
                let actual = floats(around.step(LAYER, &mut other, next()).unwrap());
                let error = relative_error(&actual, &expected);
                assert!(error < 1e-5, "{} {scope} step {index}: off by {error}", tested.name);
            }
            assert_eq!(other.layout().lengths(), [32; 4], "{} {scope}", tested.name);
            let heads: Vec<Vec<u32>> = (0..4).map(|range| kept(&other, range)).collect();
            let together = heads.chunks(2).all(|heads| heads[0] == heads[1]);
            assert_eq!(together, scope == "layer", "{} {scope}: {heads:?}", tested.name);
        }
    }
}

/// By default around PyramidInfer's tokens as the authors' code has them: budgets fall to 0.84 of
/// the first along a cosine with depth, four sinks stay, and a fifth of the budget is recent.
#[test]
fn defaults_are_those_of_the_authors_code() {
    const LAYERS: usize = 4;
    for tested in quick_exact_devices("defaults_are_those_of_the_authors_code") {
        let prompt = prompt(28, 1000, 2, &tested.device);
        let keepkv = policy(json!({"policy": "keepkv", "budget": 0.2}));
        let shares: Vec<f64> = (0..LAYERS)
            .map(|layer| 0.84 + 0.16 * (1.0 + (PI * layer as f64 / LAYERS as f64).cos()) / 2.0)
            .collect();
        let mut total = 0;
        for layer in 0..LAYERS {
            let options = CacheOptions::new(&tested.device, DType::F32);
            let cache = prompt.observed(|seen| {
                let layer = LayerContext { index: layer, count: LAYERS };
                keepkv.prefill(&Observation { layer, ..seen.clone() }, 0, options).unwrap()
            });
            let budget = cache.layout().lengths()[0];
            let expected = 200.0 * shares[layer] * LAYERS as f64 / shares.iter().sum::<f64>();
            assert!((budget as f64 - expected).abs() <= 1.0, "{layer}: {budget} for {expected}");
            total += budget;
            let recents = budget / 5;
            for range in 0..4 {
                let kept = kept(&cache, range);
                let stays = |token: usize| kept.contains(&(token as u32));
                assert!((0..4).all(stays), "{} layer {layer}", tested.name);
                assert!((1000 - recents..1000).all(stays), "{} layer {layer}", tested.name);
                // Four fifths are heavy hitters: few of them are next to the recents by chance.
                let older = kept.iter().filter(|token| **token < 1000 - 2 * recents as u32).count();
                assert!(older > budget / 2, "{} layer {layer}: {older}", tested.name);
            }
        }
        assert_eq!(total, 200 * LAYERS, "{}", tested.name);
    }
}
