use burn::tensor::{DType, Device, Tensor};
use kv_core::{CacheOptions, LayerCache, NUMERATORS, read_f32};
use kv_kernels::DecodeAttentionOptions;
use kv_policies::{OfficialWalk, PolicyError, build};
use kv_testing::{Numbers, devices, golden_files, quick_devices, relative_error};
use serde_json::{Value, json};

use super::support::{LAYER, Prompt, policy, step};

/// The authors' walk with the authors' random numbers.
#[test]
fn golden_balancekv() {
    for golden in golden_files("golden_balancekv", "balancekv_") {
        for tested in devices() {
            let context = format!("{} on {}", golden.name, tested.name);
            let flat = |name: &str| -> Option<Tensor<3>> {
                golden.find(name)?;
                let tensor = golden.tensor(name).on::<4>(&tested.device);
                let [batch, heads, tokens, dim] = tensor.dims();
                Some(tensor.reshape([batch * heads, tokens, dim]))
            };
            let keys = flat("key").unwrap();
            let [total_kv_heads, ..] = keys.dims();
            let rounds = golden.number("itrs") as usize;
            let block = golden.number("block_size") as usize;
            let walk = OfficialWalk {
                block,
                rounds,
                gamma: golden.number("gamma"),
                temperature: golden.number("temp"),
                beta: golden.number("beta"),
                value_offset: (golden.number("const_denom") + 1e-8) as f32,
            };
            let uniforms: Vec<_> = (0..rounds)
                .map(|round| golden.tensor(&format!("it{round}.uniform")).f32())
                .collect();
            let numbers = |round: usize, range: usize, place: usize| {
                let uniforms = &uniforms[round];
                uniforms[range * (uniforms.len() / total_kv_heads) + place]
            };
            let lists = walk.run(&keys, flat("value").as_ref(), numbers).unwrap();
            for round in 0..rounds {
                let signs = golden.tensor(&format!("it{round}.signs_raw")).values;
                let own = lists.iter().flat_map(|list| &list.signs[round]);
                assert!(own.map(|sign| f64::from(*sign)).eq(signs), "{context} round {round}");
            }
            let kept: Vec<u32> = lists.iter().flat_map(|list| list.kept.clone()).collect();
            assert_eq!(kept, golden.tensor("indices").indices(), "{context}");
            let weights: Vec<f32> = lists.iter().flat_map(|list| list.weights.clone()).collect();
            assert_eq!(weights, golden.tensor("weights").f32(), "{context}");
        }
    }
}

/// A prompt whose keys gather around a few directions, as real ones do: `[B, Hkv, T, D]`.
pub(crate) fn clustered(
    seed: u64,
    [batch, heads, tokens, dim]: [usize; 4],
    device: &Device,
) -> Prompt {
    let mut numbers = Numbers::new(seed);
    let total_kv_heads = batch * heads;
    let mut rows = || {
        let centres = numbers.normal(total_kv_heads * CLUSTERS * dim);
        let mut rows = Vec::with_capacity(total_kv_heads * tokens * dim);
        for range in 0..total_kv_heads {
            for _ in 0..tokens {
                let centre = (range * CLUSTERS + numbers.below(CLUSTERS)) * dim;
                let noise = numbers.normal(dim);
                rows.extend(noise.iter().zip(&centres[centre..]).map(|(n, c)| 1.5 * c + 0.5 * n));
            }
        }
        Tensor::<1>::from_data(rows.as_slice(), (device, DType::F32))
            .reshape([batch, heads, tokens, dim])
    };
    let (keys, values) = (rows(), rows());
    let query = numbers.tensor([batch, 2 * heads, tokens, dim], device);
    Prompt::new(query, keys, values)
}

const CLUSTERS: usize = 8;

/// Live slots of a head: position, denominator's weight, numerator's.
pub(crate) fn weights(cache: &LayerCache, range: usize) -> Vec<(i32, f32, f32)> {
    let positions = cache.read_positions().unwrap();
    let denominators = cache.read_weights().unwrap();
    let numerators = match cache.track(NUMERATORS) {
        Some(track) => read_f32("numerators", track.clone()).unwrap(),
        None => denominators.clone(),
    };
    let live = cache.layout().live(range);
    let mut all: Vec<_> =
        live.map(|slot| (positions[slot], denominators[slot], numerators[slot])).collect();
    all.sort_by_key(|(position, ..)| *position);
    all
}

#[test]
fn balancekv_keeps_its_budget_exactly() {
    for tested in quick_devices("balancekv") {
        let prompt = clustered(1, [2, 2, 300, 32], &tested.device);
        for budget in [1, 2, 3, 40, 75, 100, 150, 200, 299, 300] {
            for (block, span) in [(32, 1), (256, 1), (32, 4), (256, 8)] {
                let config = json!({
                    "policy": "balancekv", "budget": budget, "block": block, "span": span,
                });
                let cache = prompt.compress(&*policy(config), 4);
                for range in 0..4 {
                    let kept = weights(&cache, range);
                    assert_eq!(kept.len(), budget, "{} {budget}", tested.name);
                    let (sinks, recents) = (budget / 4, budget / 4);
                    let ends = (0..sinks).chain(300 - recents..300);
                    if budget < 300 {
                        assert!(
                            ends.clone().all(|at| kept.contains(&(at as i32, 1.0, 1.0))),
                            "{} {budget}: {kept:?}",
                            tested.name
                        );
                    }
                    // A list of odd length loses a token a round.
                    let stands: f32 = kept.iter().map(|(_, weight, _)| weight).sum();
                    let rounds = kept.iter().map(|(_, weight, _)| weight.log2().round());
                    let most = rounds.clone().fold(0.0, f32::max);
                    assert!(
                        rounds
                            .clone()
                            .all(|round| round == most || round == most - 1.0 || round == 0.0)
                    );
                    assert!(stands <= 300.01 && stands > 300.0 - most.exp2(), "{budget}: {stands}");
                }
            }
        }
    }
}

/// Prompts that are shorter than a block, alike or without values; and what cannot be configured.
#[test]
fn balancekv_at_its_edges() {
    for tested in quick_devices("balancekv") {
        let device = &tested.device;
        let config = json!({"policy": "balancekv", "budget": 0.5, "sinks": 0, "recents": 0});
        for tokens in [1, 2, 3, 17] {
            let prompt = clustered(2, [1, 1, tokens, 8], device);
            let kept = weights(&prompt.compress(&*policy(config.clone()), 1), 0);
            assert_eq!(kept.len(), (tokens / 2).max(1), "{} {tokens}", tested.name);
        }
        let shape = [1, 1, 64, 16];
        let query = Numbers::new(3).tensor([1, 2, 64, 16], device);
        for (keys, values) in [(1.0, 0.0), (40.0, 1.0), (0.0, 0.0)] {
            let rows = |value: f32| Tensor::<4>::full(shape, value, (device, DType::F32));
            let prompt = Prompt::new(query.clone(), rows(keys), rows(values));
            let cache = prompt.compress(&*policy(config.clone()), 1);
            let output = cache.attend(
                query.clone().narrow(2, 0, 1).squeeze_dim(2),
                DecodeAttentionOptions::default(),
            );
            let output = read_f32("output", output.unwrap().output).unwrap();
            assert!(output.iter().all(|x| (x - values).abs() < 1e-5), "{} {keys}", tested.name);
        }
        let prompt = clustered(4, [1, 1, 40, 8], device);
        let all = json!({"policy": "balancekv", "budget": 40, "sinks": 30, "recents": 30});
        assert_eq!(weights(&prompt.compress(&*policy(all.clone()), 1), 0).len(), 40);
        let mut over = all;
        over["budget"] = 39.into();
        let options = CacheOptions::new(device, DType::F32);
        let refused = prompt.observed(|seen| policy(over).prefill(seen, 1, options));
        assert!(matches!(refused, Err(PolicyError::ProtectedOverBudget { .. })), "{refused:?}");
    }
    for wrong in [
        json!({"delta": 0.0}),
        json!({"delta": 1.0}),
        json!({"gamma": -1.0}),
        json!({"block": 7}),
        json!({"value_offset": -0.1}),
        json!({"unknown": 1}),
        json!({"anchors": 0.5}),
        json!({"official": true, "delta": 0.1}),
        json!({"official": true, "anchors": 0.5}),
        json!({"official": true, "span": 2}),
        json!({"official": true, "weights": "fitted"}),
        json!({"span": 0}),
        json!({"span": 3}),
        json!({"block": 64, "span": 64}),
        json!({"weights": "other"}),
        json!({"anchor_span": 2}),
        json!({"anchors_by": "leverage"}),
        json!({"policy": "balancekv-augmented", "anchor_span": 0}),
        json!({"policy": "balancekv-augmented", "anchors_by": "block-mean", "anchor_span": 2}),
        json!({"policy": "balancekv-augmented", "anchors": -0.5}),
        json!({"policy": "balancekv-augmented", "anchors": 0.0, "gamma": -1.0}),
    ] {
        let mut config = json!({"policy": "balancekv", "budget": 0.5});
        config.as_object_mut().unwrap().extend(wrong.as_object().unwrap().clone());
        let refused = build(&config);
        let named = matches!(
            &refused,
            Err(PolicyError::InvalidConfig { policy, .. }) if *policy == config["policy"]
        );
        assert!(named, "{wrong}: {refused:?}");
    }
}

/// `‖attention − exact‖ / ‖exact‖` of a cache, over the prompt's last queries.
pub(crate) fn error(prompt: &Prompt, config: &Value) -> f64 {
    let cache = prompt.compress(&*policy(config.clone()), 1);
    let full = prompt.compress(&*policy(json!({"policy": "full"})), 1);
    let tokens = prompt.query.dims()[2];
    let (mut actual, mut expected) = (Vec::new(), Vec::new());
    for back in 1..=8 {
        let query = prompt.query.clone().narrow(2, tokens - back, 1).squeeze_dim::<3>(2);
        let read = |cache: &LayerCache| {
            let options = DecodeAttentionOptions::default();
            read_f32("output", cache.attend(query.clone(), options).unwrap().output).unwrap()
        };
        actual.extend(read(&cache));
        expected.extend(read(&full).into_iter().map(f64::from));
    }
    relative_error(&actual, &expected)
}

/// The whole point: at equal counts the error is below that of uniform sampling.
#[test]
fn balancekv_errs_less_than_uniform_sampling() {
    let device = &devices()[0].device;
    for rate in [0.5, 0.25, 0.125, 0.0625] {
        let mut sums = [0.0; 2];
        for seed in 0..6 {
            let prompt = clustered(10 + seed, [1, 2, 1024, 32], device);
            for (sum, name) in sums.iter_mut().zip(["balancekv", "uniform"]) {
                *sum += error(&prompt, &json!({"policy": name, "budget": rate})) / 6.0;
            }
        }
        assert!(sums[0] < 0.9 * sums[1], "{rate}: {sums:?}");
    }
}

fn cut(prompt: &Prompt, tokens: usize) -> Prompt {
    let part = |tensor: &Tensor<4>| tensor.clone().narrow(2, 0, tokens);
    Prompt::new(part(&prompt.query), part(&prompt.keys), part(&prompt.values))
}

/// A prompt whose values' norms are of five powers of two.
fn of_many_norms(seed: u64, shape: [usize; 4], device: &Device) -> Prompt {
    let mut prompt = clustered(seed, shape, device);
    let [batch, heads, tokens, _] = shape;
    let scales = (0..batch * heads * tokens).map(|at| 0.5f32.powi(at as i32 * 7 % 5));
    let scales =
        Tensor::<1>::from_data(scales.collect::<Vec<_>>().as_slice(), (device, DType::F32));
    prompt.values = prompt.values * scales.reshape([batch, heads, tokens, 1]);
    prompt
}

/// What a stream keeps depends on the tokens alone, not on how many came as a prompt; its memory
/// stays within its bound, and its weights stand for every token.
#[test]
fn streams_do_not_depend_on_chunks() {
    const BATCH: usize = 32;
    for tested in quick_devices("balancekv") {
        let tokens = 400;
        let prompt = of_many_norms(20, [2, 1, tokens, 16], &tested.device);
        for options in [
            json!({"joint": false}),
            json!({"joint": true}),
            json!({"joint": false, "max_tokens": 64}),
            json!({"joint": false, "norm_bound": 1.0, "epsilon": 100.0}),
        ] {
            // What the host decides is the same everywhere.
            if tested.name != "cpu" && options != json!({"joint": false}) {
                continue;
            }
            let mut config = json!({
                "policy": "balancekv-stream", "budget": 200, "batch": BATCH, "sinks": 4, "recents": 9,
            });
            config.as_object_mut().unwrap().extend(options.as_object().unwrap().clone());
            let context = format!("{options} on {}", tested.name);
            let policy = policy(config);
            let mut expected = None;
            for first in [1, 45, 46, tokens] {
                let mut cache = cut(&prompt, first).compress(&*policy, tokens - first);
                for at in first..tokens {
                    let now = step(&prompt.query, &prompt.keys, &prompt.values, at, at);
                    policy.step(LAYER, &mut cache, now).unwrap();
                    let levels = (at / BATCH).max(1).ilog2() as usize + 1;
                    let longest = *cache.layout().lengths().iter().max().unwrap();
                    // The denominator's instance and those of five buckets (a sixth for what is
                    // longer), each with less than a batch that waits and half a batch a level.
                    let bound = 4 + 9 + BATCH + 7 * (BATCH + BATCH / 2 * levels);
                    assert!(longest <= bound.min(at + 1), "{context} {at}: {longest}");
                }
                let all: Vec<_> = (0..2).map(|range| weights(&cache, range)).collect();
                for own in &all {
                    let stands: f32 = own.iter().map(|(_, denominator, _)| denominator).sum();
                    assert_eq!(stands, tokens as f32, "{context} {first}");
                    let numerators: f32 = own.iter().map(|(.., numerator)| numerator).sum();
                    let erases = options.get("norm_bound").is_some();
                    assert_eq!(numerators < tokens as f32, erases, "{context} {first}");
                }
                let expected = expected.get_or_insert_with(|| all.clone());
                assert!(all == *expected, "{context} from {first}");
            }
        }
    }
}

/// One instance for numerator and denominator is the default, and attends otherwise than the
/// paper's many do.
#[test]
fn streams_are_joint_by_default() {
    let device = &devices()[0].device;
    let prompt = of_many_norms(22, [1, 2, 200, 16], device);
    let stream = json!({"policy": "balancekv-stream", "budget": 64, "batch": 16});
    let with = |joint: bool| {
        let mut config = stream.clone();
        config["joint"] = joint.into();
        config
    };
    for (config, joint) in [(stream.clone(), true), (with(true), true), (with(false), false)] {
        assert_eq!(policy(config.clone()).config()["joint"], joint, "{config}");
    }
    let output = |config: Value| {
        let policy = policy(config);
        let mut cache = cut(&prompt, 199).compress(&*policy, 1);
        let now = step(&prompt.query, &prompt.keys, &prompt.values, 199, 199);
        read_f32("output", policy.step(LAYER, &mut cache, now).unwrap()).unwrap()
    };
    let default = output(stream.clone());
    assert_eq!(default, output(with(true)));
    let separate = output(with(false));
    assert!(default.iter().zip(&separate).any(|(a, b)| (a - b).abs() > 1e-3), "{separate:?}");
}

/// Budgets that are shares of the prompt, as benchmarks take them, and values of any norm: heads
/// get the slots that they need.
#[test]
fn streams_find_room_for_their_buckets() {
    for tested in quick_devices("balancekv") {
        let prompt = of_many_norms(21, [1, 2, 200, 16], &tested.device);
        for config in [
            json!({"budget": 0.25}),
            json!({"budget": 64}),
            json!({"budget": 0.1, "joint": true}),
            json!({"budget": 64, "joint": true, "batch": 8, "max_tokens": 16}),
        ] {
            let mut config = config;
            config["policy"] = "balancekv-stream".into();
            let policy = policy(config.clone());
            let mut cache = cut(&prompt, 120).compress(&*policy, 80);
            for at in 120..200 {
                let now = step(&prompt.query, &prompt.keys, &prompt.values, at, at);
                let output = read_f32("output", policy.step(LAYER, &mut cache, now).unwrap());
                assert!(output.unwrap().iter().all(|x| x.is_finite()), "{config}");
            }
            for range in 0..2 {
                let stands: f32 = weights(&cache, range).iter().map(|(_, d, _)| d).sum();
                assert_eq!(stands, 200.0, "{config} on {}", tested.name);
            }
        }
    }
}

/// At equal counts balanced halves err less than halves by coins, which is what a walk of no scale
/// tosses; and the paper's many instances err less with more slots.
#[test]
fn streams_err_less_than_coins() {
    let device = &devices()[0].device;
    let mut sums = [0.0; 5];
    for seed in 0..6 {
        let prompt = clustered(30 + seed, [1, 2, 4096, 16], device);
        let stream = |batch: usize, joint: bool, gamma: f64| {
            json!({
                "policy": "balancekv-stream", "budget": 1024, "batch": batch, "joint": joint,
                "sinks": 16, "recents": 16, "gamma": gamma,
            })
        };
        let contenders = [
            stream(256, true, 4.0),
            stream(256, true, 1e-12),
            stream(256, false, 4.0),
            stream(256, false, 1e-12),
            stream(64, false, 4.0),
        ];
        for (sum, config) in sums.iter_mut().zip(&contenders) {
            *sum += error(&prompt, config) / 6.0;
        }
    }
    println!("joint, joint by coins, separate, separate by coins, small batches: {sums:.3?}");
    assert!(sums[0] < 0.9 * sums[1], "{sums:?}");
    assert!(sums[2] < 0.9 * sums[3], "{sums:?}");
    assert!(sums[2] < 0.7 * sums[4], "{sums:?}");
}

/// The authors' code keeps whole halves, all with the same weight in the denominator and products
/// of ones and twos in the numerator; its attention is of those.
#[test]
fn the_official_walk_weighs_numerators_apart() {
    for tested in quick_devices("balancekv") {
        let prompt = clustered(40, [1, 2, 300, 16], &tested.device);
        let config = json!({
            "policy": "balancekv", "official": true, "budget": 100, "sinks": 10, "recents": 10,
            "block": 64,
        });
        let cache = prompt.compress(&*policy(config), 1);
        let query = prompt.query.clone().narrow(2, 299, 1).squeeze_dim::<3>(2);
        let output = cache.attend(query.clone(), DecodeAttentionOptions::default()).unwrap().output;
        let output = read_f32("output", output).unwrap();
        let rows = |tensor: &Tensor<4>| read_f32("rows", tensor.clone()).unwrap();
        let (keys, values, query) =
            (rows(&prompt.keys), rows(&prompt.values), rows(&query.unsqueeze()));
        for range in 0..2 {
            let kept = weights(&cache, range);
            // 280 tokens, 140, 70.
            assert_eq!(kept.len(), 20 + 140 / 2, "{}", tested.name);
            let (ends, middle): (Vec<_>, Vec<_>) =
                kept.iter().partition(|(at, ..)| *at < 10 || *at >= 290);
            assert!(ends.iter().all(|(_, d, n)| (*d, *n) == (1.0, 1.0)), "{}", tested.name);
            assert!(middle.iter().all(|(_, d, _)| (d - 4.0).abs() < 1e-5), "{}", tested.name);
            assert!(middle.iter().all(|(.., n)| [1.0, 2.0, 4.0].contains(n)), "{}", tested.name);
            for head in 2 * range..2 * range + 2 {
                let query = &query[head * 16..][..16];
                let (mut numerator, mut denominator) = (vec![0.0; 16], 0.0);
                for &(at, below, above) in &kept {
                    let at = (range * 300 + at as usize) * 16;
                    let logit: f32 = query.iter().zip(&keys[at..]).map(|(q, k)| q * k).sum();
                    let weight = f64::from(logit / 4.0).exp();
                    denominator += f64::from(below) * weight;
                    let values = values[at..].iter().map(|v| f64::from(above * v) * weight);
                    numerator.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
                }
                let expected: Vec<f64> = numerator.iter().map(|sum| sum / denominator).collect();
                let error = relative_error(&output[head * 16..][..16], &expected);
                assert!(error < 1e-4, "{} head {head}: {error}", tested.name);
            }
        }
    }
}

/// Steps that overwrite know one weight a slot: a prompt with two is refused, not misread.
#[test]
fn numerators_apart_are_refused_where_steps_overwrite() {
    let device = &devices()[0].device;
    let prompt = clustered(41, [1, 2, 300, 16], device);
    let official = json!({"policy": "balancekv", "official": true, "budget": 100});
    let decode = json!({"policy": "longflow", "scope": "head", "budget": 100});
    let combined = policy(json!({"policy": "combine", "prefill": official, "decode": decode}));
    let options = CacheOptions::new(device, DType::F32);
    let refused = prompt.observed(|seen| combined.prefill(seen, 4, options)).unwrap_err();
    assert!(refused.to_string().contains("one weight a slot"), "{refused}");
}
