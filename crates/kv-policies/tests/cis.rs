//! CIS over a cache: its options, batches, files; the sets themselves are the kernel's tests'.

use burn::tensor::{DType, Tensor};
use kv_core::{CacheOptions, KvCache, LayerCache, Origin, read_f32};
use kv_kernels::{DecodeAttentionOptions, RowNorm};
use kv_policies::certificates::{SharedStep, binary_entropy, information_loss};
use kv_policies::{CisIndex, LayerContext, LayerInput, Observation, Policy, Reads, Step, build};
use kv_testing::{Numbers, devices, golden_files, quick_devices};
use serde_json::{Value, json};

use super::support::{LAYER, Prompt, policy};

const TOKENS: usize = 120;
const STEPS: usize = 20;
const DIM: usize = 16;

/// Prompts and steps whose queries drift, for some rows of a batch, always the same for each.
struct Run {
    prompt: Prompt,
    steps: Vec<Step>,
}

fn run(rows: std::ops::Range<usize>, group: usize, device: &burn::tensor::Device) -> Run {
    let mut numbers = Numbers::new(11);
    let (kv_heads, all) = (2, 3);
    let mut draw = |heads: usize, tokens: usize| -> Tensor<4> {
        numbers.tensor([all, heads, tokens, DIM], device).narrow(0, rows.start, rows.len())
    };
    let (query, keys, values) =
        (draw(kv_heads * group, TOKENS), draw(kv_heads, TOKENS), draw(kv_heads, TOKENS));
    let mut now = draw(kv_heads * group, 1);
    let steps = (0..STEPS).map(|index| {
        now = now.clone() + draw(kv_heads * group, 1).mul_scalar(0.3);
        let row = |tensor: Tensor<4>| tensor.squeeze_dim::<3>(2);
        let position = Tensor::full([rows.len()], (TOKENS + index) as i32, (device, DType::I32));
        let hidden = row(now.clone()).reshape([rows.len(), kv_heads * group * DIM]);
        let weight = Tensor::ones([kv_heads * group * DIM], (device, DType::F32));
        let norm = RowNorm { weight, epsilon: 1e-6 };
        Step::new(row(now.clone()), row(draw(kv_heads, 1)), row(draw(kv_heads, 1)), position)
            .with_input(LayerInput { hidden, norm })
    });
    let steps = steps.collect();
    Run { prompt: Prompt { raw_query: None, ..Prompt::new(query, keys, values) }, steps }
}

fn decode(policy: &dyn Policy, cache: &mut LayerCache, steps: &[Step]) -> Vec<f32> {
    let outputs = steps.iter().map(|step| policy.step(LAYER, cache, step.clone()).unwrap());
    let outputs = Tensor::cat(outputs.map(|output| output.unsqueeze_dim::<4>(1)).collect(), 1);
    let [batch, steps, heads, dim] = outputs.dims();
    read_f32("outputs", outputs.reshape([batch * steps * heads * dim])).unwrap()
}

#[test]
fn rows_do_not_depend_on_each_other() {
    for tested in quick_devices("cis") {
        for config in [
            json!({"policy": "cis", "budget": 40, "block": 8}),
            json!({"policy": "cis", "budget": 40, "block": 8, "vote": 4, "tail": true}),
            json!({"policy": "cis", "budget": 40, "sets": "query-heads", "vote": 3}),
            json!({"policy": "cis-star", "budget": 0.3, "block": 8, "sets": "query-heads"}),
            json!({"policy": "cis", "budget": 40, "block": 8, "labels": 4, "vote": 2}),
            json!({"policy": "cis", "budget": 40, "block": 8, "labels": 4, "tail": true}),
            json!({"policy": "cis-star", "budget": 40, "sets": "query-heads", "labels": 0.5}),
            json!({"policy": "cis", "budget": 40, "similarity": "key"}),
            json!({"policy": "cis", "budget": 40, "similarity": "hidden", "group_score": "max"}),
            json!({"policy": "top-k-oracle", "budget": 40}),
            json!({"policy": "cpe", "budget": 40, "psaw": {"start": 0, "phi": 0.5}}),
            json!({"policy": "cpe", "budget": 40, "labels": 4, "psaw": {"start": 0, "phi": 0.5}}),
        ] {
            let policy = policy(config.clone());
            let together = run(0..3, 2, &tested.device);
            let mut cache = together.prompt.compress(&*policy, STEPS);
            let joint = decode(&*policy, &mut cache, &together.steps);
            for row in 0..3 {
                let alone = run(row..row + 1, 2, &tested.device);
                let mut cache = alone.prompt.compress(&*policy, STEPS);
                let own = decode(&*policy, &mut cache, &alone.steps);
                let part = &joint[row * own.len()..][..own.len()];
                let apart = own.iter().zip(part).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(apart < 1e-5, "{config} on {}: row {row} off by {apart}", tested.name);
            }
            let reads = Reads::of(&cache).unwrap().unwrap();
            assert!(reads.slots_each() <= 60.0, "{config}: {reads:?}");
            // Keys of their own are not alike.
            let alone = policy.name() == "top-k-oracle" || config["similarity"] == "key";
            assert_eq!(reads.retrieved == reads.steps, alone, "{config}: {reads:?}");
        }
    }
}

#[test]
fn saved_and_joined_caches_go_on_identically() {
    let folder = tempfile::tempdir().unwrap();
    let forms = [
        json!({"vote": 1}),
        json!({"vote": 4, "tail": true}),
        json!({"vote": 2, "labels": 4, "window": 20}),
    ];
    let tested = quick_devices("cis");
    for (tested, form) in tested.iter().flat_map(|tested| forms.iter().map(move |f| (tested, f))) {
        let config = |budget: usize| {
            let mut config = json!({"policy": "cis", "budget": budget, "block": 16});
            config.as_object_mut().unwrap().extend(form.as_object().unwrap().clone());
            config
        };
        let policy = policy(config(40));
        let run = run(0..2, 2, &tested.device);
        let mut cache = run.prompt.compress(&*policy, STEPS);
        decode(&*policy, &mut cache, &run.steps[..5]);
        let seen = vec![TOKENS + 5; 2];
        let whole = KvCache { layers: vec![cache.clone()], seen, origin: Origin::default() };
        let path = folder.path().join("cache.safetensors");
        whole.save(&path).unwrap();
        let mut loaded = KvCache::load(&path, &tested.device).unwrap();
        policy.restore(&mut loaded.layers[0]).unwrap();
        assert_eq!(cache.memory().policy, loaded.layers[0].memory().policy);
        let expected = decode(&*policy, &mut cache, &run.steps[5..]);
        assert_eq!(decode(&*policy, &mut loaded.layers[0], &run.steps[5..]), expected);

        // A cache of another budget beside it: sets have room for the widest.
        let other = build(&config(60)).unwrap();
        let mut longer = run.prompt.compress(&*other, STEPS);
        decode(&*other, &mut longer, &run.steps[..5]);
        let mut shorter = run.prompt.compress(&*policy, STEPS);
        decode(&*policy, &mut shorter, &run.steps[..5]);
        let mut joined = LayerCache::concat(vec![longer, shorter]).unwrap();
        let twice = |step: &Step| {
            let kv_policies::Qkv::Rotated { query, key, value, .. } = &step.heads else {
                panic!("steps are of rotated heads")
            };
            let twice = |x: &Tensor<3>| Tensor::cat(vec![x.clone(); 2], 0);
            let position = Tensor::cat(vec![step.position.clone(); 2], 0);
            Step::new(twice(query), twice(key), twice(value), position)
        };
        let steps: Vec<Step> = run.steps[5..].iter().map(twice).collect();
        let both = decode(&*policy, &mut joined, &steps);
        let own = &both[both.len() / 2..];
        let apart = own.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(apart < 1e-5, "{}: off by {apart}", tested.name);
    }
}

/// Sets are the tokens of the highest attention summed over the last queries, of the prompt's last
/// ones at first. With labels, the attention counts by a group's channels: those of the highest
/// `|q_c k_c|` of the prompt's last tokens, or the calibrated ones, which heads choose in turns.
#[test]
fn sets_are_chosen_by_votes_and_labels() {
    let by_group = json!([[[3, 9, 0, 15, 1], [8, 2, 7, 6]]]);
    let by_head = json!([[[3, 9, 0, 15], [9, 0, 4, 5], [8, 2, 7, 6], [1, 8, 10, 2]]]);
    let forms = [
        (json!({"vote": 4}), None),
        (json!({"vote": 12}), None),
        (json!({"labels": 0.2, "window": 20}), Some([vec![], vec![]])),
        (json!({"labels": 7, "vote": 3}), Some([vec![], vec![]])),
        (json!({"labels": 4, "channels": by_group}), Some([vec![3, 9, 0, 15], vec![8, 2, 7, 6]])),
        (json!({"labels": 4, "channels": by_head}), Some([vec![3, 9, 0, 4], vec![8, 1, 2, 7]])),
    ];
    let tested = quick_devices("cis");
    for (tested, (form, labels)) in
        tested.iter().flat_map(|tested| forms.iter().map(move |form| (tested, form)))
    {
        let mut config = json!({
            "policy": "cis", "budget": 40, "block": 1, "sinks": 4, "recents": 8,
        });
        config.as_object_mut().unwrap().extend(form.as_object().unwrap().clone());
        let vote = form["vote"].as_u64().unwrap_or(1) as usize;
        let policy = policy(config);
        let Run { prompt, steps } = run(0..2, 2, &tested.device);
        let mut cache = prompt.compress(&*policy, STEPS);
        let rows = |tensor: &Tensor<4>| read_f32("rows", tensor.clone()).unwrap();
        let [batch, heads, _, _] = prompt.query.dims();
        let kv_heads = heads / 2;
        // Queries and keys of each head, in order of their positions.
        let split = |all: Vec<f32>, heads: usize| -> Vec<Vec<Vec<f32>>> {
            let head = |own: &[f32]| own.chunks(DIM).map(<[f32]>::to_vec).collect();
            all.chunks(all.len() / heads).map(head).collect()
        };
        let mut queries = split(rows(&prompt.query), batch * heads);
        let mut keys = split(rows(&prompt.keys), batch * kv_heads);
        let channels: Vec<Vec<usize>> = (0..batch * kv_heads)
            .map(|range| match labels {
                None => (0..DIM).collect(),
                Some(labels) if !labels[range % 2].is_empty() => labels[range % 2].clone(),
                Some(_) => {
                    let last = TOKENS - form["window"].as_u64().unwrap_or(64) as usize;
                    let product = |channel: usize| -> f64 {
                        let of = |head: usize, at: usize| {
                            f64::from(queries[head][at][channel] * keys[range][at][channel]).abs()
                        };
                        (last..TOKENS).map(|at| of(2 * range, at) + of(2 * range + 1, at)).sum()
                    };
                    let mut ranked: Vec<usize> = (0..DIM).collect();
                    ranked.sort_by(|a, b| product(*b).total_cmp(&product(*a)));
                    // Of 3.2 and of 7, the next multiples of 4.
                    ranked.truncate(if form["labels"] == 7 { 8 } else { 4 });
                    ranked
                }
            })
            .collect();
        for (index, step) in steps.iter().enumerate() {
            policy.step(LAYER, &mut cache, step.clone()).unwrap();
            let kv_policies::Qkv::Rotated { query, key, .. } = &step.heads else { unreachable!() };
            for (of, all) in [(query, &mut queries), (key, &mut keys)] {
                let new = read_f32("rows", of.clone()).unwrap();
                all.iter_mut().zip(new.chunks(DIM)).for_each(|(all, row)| all.push(row.to_vec()));
            }
            let tokens = TOKENS + index + 1;
            let read = cache.policy_state::<CisIndex>().unwrap().sets().read().unwrap();
            for (range, own) in read.iter().enumerate() {
                let mut score = vec![0.0f64; tokens];
                for query in [2 * range, 2 * range + 1]
                    .into_iter()
                    .flat_map(|head| queries[head][tokens - vote..].iter())
                {
                    let dot = |key: &Vec<f32>| -> f64 {
                        let own = channels[range].iter();
                        own.map(|&at| f64::from(query[at] * key[at])).sum()
                    };
                    let logits: Vec<f64> =
                        keys[range].iter().map(|key| dot(key) / (DIM as f64).sqrt()).collect();
                    let top = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                    let sum: f64 = logits.iter().map(|logit| (logit - top).exp()).sum();
                    let weights = logits.iter().map(|logit| (logit - top).exp() / sum);
                    score.iter_mut().zip(weights).for_each(|(score, weight)| *score += weight);
                }
                let mut ranked: Vec<usize> = (4..tokens - 8).collect();
                ranked.sort_by(|a, b| score[*b].total_cmp(&score[*a]));
                let mut expected: Vec<u32> = ranked[..28].iter().map(|at| *at as u32).collect();
                expected.sort_unstable();
                assert_eq!(own.set, expected, "{} {form}: step {index}, {range}", tested.name);
            }
        }
    }
}

/// Labels of all channels are whole keys.
#[test]
fn all_channels_choose_as_whole_keys() {
    for tested in quick_devices("cis") {
        for form in [json!({"block": 8}), json!({"vote": 3, "sets": "query-heads"})] {
            let outputs = [None, Some(1.0)].map(|labels| {
                let mut config = json!({"policy": "cis", "budget": 40});
                config.as_object_mut().unwrap().extend(form.as_object().unwrap().clone());
                if let Some(labels) = labels {
                    config["labels"] = json!(labels);
                }
                let policy = policy(config);
                let run = run(0..2, 2, &tested.device);
                let mut cache = run.prompt.compress(&*policy, STEPS);
                let outputs = decode(&*policy, &mut cache, &run.steps);
                let read = cache.policy_state::<CisIndex>().unwrap().sets().read().unwrap();
                (outputs, read.into_iter().map(|own| own.set).collect::<Vec<_>>())
            });
            assert_eq!(outputs[0].1, outputs[1].1, "{} {form}", tested.name);
            let each = outputs[0].0.iter().zip(&outputs[1].0);
            let apart = each.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            // A GPU may choose and attend in one launch where keys are whole.
            let limit = if tested.name == "cpu" { 0.0 } else { 1e-6 };
            assert!(apart <= limit, "{} {form}: off by {apart}", tested.name);
        }
    }
}

/// Labels stay beside their keys where prompts of different lengths become a batch, and where the
/// cache is given more room.
#[test]
fn labels_follow_their_slots() {
    for tested in quick_devices("cis") {
        let policy = policy(json!({"policy": "cis", "budget": 40, "block": 4, "labels": 4}));
        let tokens = [TOKENS, TOKENS - 31];
        let part = |row: usize, spare: usize| {
            let Run { prompt, steps } = run(row..row + 1, 2, &tested.device);
            let first = |of: Tensor<4>| of.narrow(2, 0, tokens[row]);
            let Prompt { query, keys, values, .. } = prompt;
            let prompt = Prompt::new(first(query), first(keys), first(values));
            (prompt.compress(&*policy, spare), steps)
        };
        let step = |rows: &[usize], index: usize| {
            let all = run(0..2, 2, &tested.device).steps.swap_remove(index);
            let kv_policies::Qkv::Rotated { query, key, value, .. } = all.heads else {
                unreachable!()
            };
            let own = |of: Tensor<3>| of.narrow(0, rows[0], rows.len());
            let at: Vec<i32> = rows.iter().map(|row| (tokens[*row] + index) as i32).collect();
            let at = Tensor::from_data(at.as_slice(), (&tested.device, DType::I32));
            Step::new(own(query), own(key), own(value), at)
        };
        let alone = [0, 1].map(|row| {
            let (mut cache, _) = part(row, STEPS);
            let steps: Vec<Step> = (0..STEPS).map(|index| step(&[row], index)).collect();
            decode(&*policy, &mut cache, &steps)
        });
        let parts = [0, 1].map(|row| part(row, 5).0);
        let mut cache = LayerCache::concat(parts.into()).unwrap();
        let steps: Vec<Step> = (0..STEPS).map(|index| step(&[0, 1], index)).collect();
        let mut together = vec![decode(&*policy, &mut cache, &steps[..5])];
        cache.resize(vec![TOKENS + STEPS; 4]).unwrap();
        together.push(decode(&*policy, &mut cache, &steps[5..]));
        for (row, alone) in alone.iter().enumerate() {
            let own = together.iter().flat_map(|all| &all[row * all.len() / 2..][..all.len() / 2]);
            let apart = own.zip(alone).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(apart < 1e-5, "{}: row {row} off by {apart}", tested.name);
        }
    }
}

#[test]
fn labels_are_checked() {
    for (config, named) in [
        (json!({"policy": "cis", "budget": 40, "labels": 0}), "`labels` is 0"),
        (json!({"policy": "cis-star", "budget": 40, "labels": -0.5}), "`labels` is -0.5"),
        (json!({"policy": "cis", "budget": 40, "labels": 4, "target": 0.1}), "a `target`"),
        (json!({"policy": "cis", "budget": 40, "labels": 4, "window": 0}), "`window` is 0"),
        (json!({"policy": "cis", "budget": 40, "labels": 4, "channels": []}), "no layers"),
        (json!({"policy": "cis", "budget": 40, "window": 32}), "`window` is there"),
        (json!({"policy": "cpe", "budget": 40, "channels": [[[0]]]}), "`channels` is there"),
    ] {
        let error = build(&config).unwrap_err().to_string();
        assert!(error.contains(named), "{config}: {error}");
    }
    let device = &devices()[0].device;
    let Run { prompt, steps } = run(0..1, 2, device);
    for (config, named) in [
        (json!({"policy": "cis", "budget": 40, "labels": 17}), "`labels` is 20"),
        (
            json!({"policy": "cis", "budget": 40, "labels": 4, "channels": [[[0, 1, 2]]]}),
            "has 1 head, expected 4 or 2",
        ),
        (
            json!({"policy": "cis", "budget": 40, "labels": 4, "channels": [[[1], [2]]]}),
            "head 0: expected 4 different ones below 16",
        ),
    ] {
        let options = CacheOptions::new(device, DType::F32);
        let policy = policy(config.clone());
        let error = prompt.observed(|seen| policy.prefill(seen, 4, options)).unwrap_err();
        assert!(error.to_string().contains(named), "{config}: {error}");
    }
    // A cache goes on with the labels that it was made for.
    let labels = |count: usize| policy(json!({"policy": "cis", "budget": 40, "labels": count}));
    let whole = policy(json!({"policy": "cis", "budget": 40}));
    for (own, other) in [(&labels(4), &labels(8)), (&whole, &labels(4))] {
        let mut cache = prompt.compress(&**own, 4);
        let error = other.step(LAYER, &mut cache, steps[0].clone()).unwrap_err().to_string();
        assert!(error.contains("label channels"), "{error}");
    }
    // A file whose channels are not the model's.
    let mut cache = prompt.compress(&*labels(4), 4);
    let beyond = Tensor::full([1, 2, 4], DIM as i32, (device, DType::I32));
    cache.set_int_state("channels", beyond);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cache.safetensors");
    KvCache { layers: vec![cache], seen: vec![TOKENS], origin: Origin::default() }
        .save(&path)
        .unwrap();
    let mut loaded = KvCache::load(&path, device).unwrap();
    let error = labels(4).restore(&mut loaded.layers[0]).unwrap_err().to_string();
    assert!(error.contains("channel 16, expected 0 to 15"), "{error}");
}

#[test]
fn votes_are_checked() {
    for (config, named) in [
        (json!({"policy": "cis", "budget": 40, "vote": 0}), "1 to 64"),
        (json!({"policy": "cis", "budget": 40, "vote": 65}), "1 to 64"),
        (json!({"policy": "cis", "budget": 40, "vote": 2, "target": 0.1}), "target"),
        (json!({"policy": "cis", "budget": 40, "vote": 2, "group_score": "max"}), "group_score"),
    ] {
        let error = build(&config).unwrap_err().to_string();
        assert!(error.contains(named), "{error}");
    }
    // Two query heads a set make 80 queries of 40.
    let device = &devices()[0].device;
    let many = policy(json!({"policy": "cis", "budget": 40, "vote": 40}));
    let options = CacheOptions::new(device, DType::F32);
    let Run { prompt, steps } = run(0..1, 2, device);
    let error = prompt.observed(|seen| many.prefill(seen, 4, options)).unwrap_err().to_string();
    assert!(error.contains("`vote` is 40") && error.contains("80"), "{error}");
    // A cache goes on with the vote that it was made for.
    let mut cache = prompt.compress(&*policy(json!({"policy": "cis", "budget": 40, "vote": 8})), 4);
    let other = policy(json!({"policy": "cis", "budget": 40, "vote": 4}));
    let error = other.step(LAYER, &mut cache, steps[0].clone()).unwrap_err().to_string();
    assert!(error.contains("queries of a vote"), "{error}");
}

#[test]
fn sizes_follow_what_is_dropped() {
    const LONG: usize = 400;
    let tested = &devices()[0];
    let policy = policy(json!({
        "policy": "cis", "budget": 40, "block": 4, "target": 0.6, "every": 3
    }));
    let mut numbers = Numbers::new(2);
    let mut draw =
        |heads: usize, tokens: usize| numbers.tensor::<4>([1, heads, tokens, DIM], &tested.device);
    let prompt = Prompt::new(draw(2, LONG), draw(2, LONG), draw(2, LONG));
    let mut cache = prompt.compress(&*policy, 600);
    let full = DecodeAttentionOptions { probabilities: true, ..Default::default() };
    let (mut dropped, mut rows) = (0.0, 0.0);
    for index in 0..600 {
        let row = |tensor: Tensor<4>| tensor.squeeze_dim::<3>(2);
        let (query, key, value) = (row(draw(2, 1)), row(draw(2, 1)), row(draw(2, 1)));
        let position = Tensor::full([1], (LONG + index) as i32, (&tested.device, DType::I32));
        policy.step(LAYER, &mut cache, Step::new(query.clone(), key, value, position)).unwrap();
        if index < 200 {
            continue;
        }
        let all = cache.attend(query, full.clone()).unwrap().probabilities.unwrap();
        let all = read_f32("probabilities", all.reshape([-1])).unwrap();
        for (range, slots) in
            policy.last_attended(LAYER, &cache).unwrap().unwrap().iter().enumerate()
        {
            let first = cache.layout().live(range).start;
            let own = 1.0 - slots.iter().map(|slot| f64::from(all[first + slot])).sum::<f64>();
            // Every third token is measured, and the number stays until the next.
            if cache.layout().lengths()[0].is_multiple_of(3) {
                let measured = cache.policy_state::<CisIndex>().unwrap().sets().read().unwrap()
                    [range]
                    .measured;
                assert!((f64::from(measured) - own).abs() < 1e-5, "{measured} for {own}");
            }
            dropped += own;
            rows += 1.0;
        }
    }
    let mean = dropped / rows;
    assert!((mean - 0.6).abs() < 0.06, "{mean} is dropped");
}

/// Sizes that come to read everything come back, however long that lasts.
#[test]
fn sizes_come_back_from_everything() {
    for tested in quick_devices("cis") {
        let policy = policy(json!({
            "policy": "cis", "budget": 90, "block": 2, "target": 0.5, "every": 1
        }));
        let mut numbers = Numbers::new(6);
        let mut draw = |tokens: usize, size: f32| {
            numbers.tensor::<4>([1, 2, tokens, DIM], &tested.device) * size
        };
        let prompt = Prompt::new(draw(70, 1.0), draw(70, 1.0), draw(70, 1.0));
        let mut cache = prompt.compress(&*policy, 40);
        let mut read = Vec::new();
        for index in 0..40 {
            let row = |tensor: Tensor<4>| tensor.squeeze_dim::<3>(2);
            // Attention so flat that each token has as much as any other.
            let (query, key, value) = (row(draw(1, 0.01)), row(draw(1, 1.0)), row(draw(1, 1.0)));
            let position = Tensor::full([1], 70 + index, (&tested.device, DType::I32));
            policy.step(LAYER, &mut cache, Step::new(query, key, value, position)).unwrap();
            let attended = policy.last_attended(LAYER, &cache).unwrap().unwrap();
            let own = attended[0].len() as f32 / (71 + index) as f32;
            let measured =
                cache.policy_state::<CisIndex>().unwrap().sets().read().unwrap()[0].measured;
            let off = (1.0 - own - measured).abs();
            assert!(off < 0.01, "{} step {index}: {measured}, reading {own}", tested.name);
            read.push(own);
        }
        assert_eq!(read[0], 1.0, "the budget is all but everything at first");
        let last = read[30..].iter().sum::<f32>() / 10.0;
        assert!((last - 0.5).abs() < 0.1, "{}: {last} is read, {read:?}", tested.name);
    }
}

/// A cache that is given more room than it had when its sets were made.
#[test]
fn sets_grow_with_their_cache() {
    for tested in quick_devices("cis") {
        for config in [
            json!({"policy": "cis", "budget": 100}),
            json!({"policy": "cis", "budget": 100, "target": 0.3, "every": 1}),
        ] {
            let policy = policy(config.clone());
            let mut numbers = Numbers::new(9);
            let mut draw = |tokens: usize| numbers.tensor::<4>([1, 2, tokens, DIM], &tested.device);
            let prompt = Prompt::new(draw(60), draw(60), draw(60));
            let mut cache = prompt.compress(&*policy, 1);
            let mut read = 0;
            for index in 0..120 {
                if index == 1 {
                    cache.resize(vec![200; 2]).unwrap();
                }
                let row = |tensor: Tensor<4>| tensor.squeeze_dim::<3>(2);
                let (query, key, value) = (row(draw(1)), row(draw(1)), row(draw(1)));
                let position = Tensor::full([1], 60 + index, (&tested.device, DType::I32));
                policy.step(LAYER, &mut cache, Step::new(query, key, value, position)).unwrap();
                read = policy.last_attended(LAYER, &cache).unwrap().unwrap()[0].len();
            }
            // Sinks, locals and all of `k`, of 180, and more than there was room for at first.
            let whole = config.get("target").is_some() || read >= 100;
            assert!(whole, "{config} on {}: {read} are read", tested.name);
        }
    }
}

#[test]
fn a_threshold_of_one_never_shares() {
    for tested in quick_devices("cis") {
        let policy = policy(json!({"policy": "cis", "budget": 40, "threshold": 1.0}));
        let run = run(0..1, 2, &tested.device);
        let mut cache = run.prompt.compress(&*policy, STEPS);
        // The same queries over and over, whose cosine is 1 but for rounding.
        let kv_policies::Qkv::Rotated { query, key, value, .. } = &run.steps[0].heads else {
            panic!("steps are of rotated heads")
        };
        for step in &run.steps {
            let position = step.position.clone();
            let step = Step::new(query.clone(), key.clone(), value.clone(), position);
            policy.step(LAYER, &mut cache, step).unwrap();
        }
        let reads = Reads::of(&cache).unwrap().unwrap();
        assert_eq!(reads.retrieved, reads.steps, "{}", tested.name);
    }
}

#[test]
fn budgets_beyond_a_prompt_are_full_attention() {
    for tested in quick_devices("cis") {
        // No more room is taken than a cache has tokens.
        for budget in [json!(150), json!(400), json!(i32::MAX)] {
            let sparse = policy(json!({"policy": "cis", "budget": budget}));
            let full = policy(json!({"policy": "full"}));
            let run = run(0..2, 1, &tested.device);
            let first = &run.steps[..1];
            let outputs = [sparse, full].map(|policy| {
                let mut cache = run.prompt.compress(&*policy, STEPS);
                let output = decode(&*policy, &mut cache, first);
                assert!(cache.memory().policy < 1 << 20, "{budget}: {:?}", cache.memory());
                output
            });
            let apart = outputs[0].iter().zip(&outputs[1]).map(|(a, b)| (a - b).abs());
            let apart = apart.fold(0.0, f32::max);
            assert!(apart < 1e-5, "{} {budget}: off by {apart}", tested.name);
        }
    }
}

#[test]
fn what_cannot_be_is_refused_by_name() {
    let refused = |config: Value, part: &str| {
        let error = build(&config).unwrap_err().to_string();
        assert!(error.contains(part), "{config}: {error}");
    };
    refused(json!({"policy": "cis", "budget": 64, "block": 0}), "`block` is 0");
    refused(json!({"policy": "cis", "budget": 64, "block": 4096}), "`block` is 4096");
    refused(json!({"policy": "cis", "budget": 64, "recents": 0}), "`recents` is 0");
    // An option of older configurations, which is read and not written.
    let older = build(&json!({"policy": "cis", "budget": 64, "certified": true})).unwrap();
    assert_eq!(older.config().get("certified"), None);
    refused(json!({"policy": "cis", "budget": 64, "dilated": 1.5}), "`dilated` is 1.5");
    refused(json!({"policy": "cis", "budget": 64, "radius": 65}), "`radius` is 65");
    refused(json!({"policy": "cis", "budget": 8, "sinks": 6, "recents": 4}), "exceed the budget");
    refused(json!({"policy": "cis", "budget": 64, "similarity": "value"}), "value");
    refused(json!({"policy": "cis", "budget": 64, "target": 1.0}), "`target` is 1");
    refused(json!({"policy": "cis-star", "budget": 64, "target": 0.1}), "`target` is 0.1");
    refused(json!({"policy": "cis", "budget": 64, "threshold": 1e99}), "`threshold` is inf");
    refused(json!({"policy": "cis", "budget": 64, "every": 0}), "`every` is 0");
    refused(json!({"policy": "cpe", "budget": 64, "psaw": {"free": true}}), "`free` of `psaw`");
    refused(json!({"policy": "cpe", "budget": 64, "etf": {"psi": 0.0}}), "`psi` is 0");
    refused(json!({"policy": "cpe", "budget": 64, "psaw": {"psi": 0.5}}), "psi");
    // A prompt shorter than what its budget protects is kept whole.
    let roomy = policy(json!({"policy": "cis", "budget": 300, "sinks": 100, "recents": 100}));
    run(0..1, 1, &devices()[0].device).prompt.compress(&*roomy, STEPS);
    // Windows count tokens: of prompts that others thinned out, only what they hide may be gone.
    let behind = |prefill: Value| {
        let decode = json!({"policy": "cpe", "budget": 64, "psaw": {"phi": 0.5, "start": 0}});
        let policy = policy(json!({"policy": "combine", "prefill": prefill, "decode": decode}));
        let run = run(0..1, 1, &devices()[0].device);
        let options = CacheOptions::new(&run.prompt.keys.device(), DType::F32);
        let layer = LayerContext { index: 2, count: 4 };
        run.prompt.observed(|seen| {
            let deep = Observation { layer, ..seen.clone() };
            policy.prefill(&deep, STEPS, options).map(drop)
        })
    };
    let error = behind(json!({"policy": "knorm", "budget": 0.5})).unwrap_err().to_string();
    assert!(error.contains("keeps 60 of 120"), "{error}");
    let freed = json!({"policy": "psaw", "phi": 0.5, "start": 0, "free": true});
    behind(freed.clone()).unwrap();
    // Wherever windows end.
    for tokens in 90..TOKENS {
        let decode = json!({"policy": "cpe", "budget": 64, "psaw": {"phi": 0.5, "start": 0}});
        let policy = policy(json!({"policy": "combine", "prefill": freed, "decode": decode}));
        let run = run(0..1, 1, &devices()[0].device);
        let part = |tensor: &Tensor<4>| tensor.clone().narrow(2, 0, tokens);
        let Prompt { query, keys, values, .. } = &run.prompt;
        let short = Prompt::new(part(query), part(keys), part(values));
        let options = CacheOptions::new(&keys.device(), DType::F32);
        let layer = LayerContext { index: 2, count: 4 };
        short.observed(|seen| {
            let deep = Observation { layer, ..seen.clone() };
            policy.prefill(&deep, STEPS, options).map(drop).unwrap();
        });
    }
    // Steps that do not say what they are compared by.
    let tested = &devices()[0];
    let policy = policy(json!({"policy": "cis", "budget": 40, "similarity": "hidden"}));
    let run = run(0..1, 1, &tested.device);
    let mut cache = run.prompt.compress(&*policy, STEPS);
    let step = Step { input: None, ..run.steps[0].clone() };
    let error = policy.step(LAYER, &mut cache, step).unwrap_err().to_string();
    assert!(error.contains("hidden states"), "{error}");
}

#[test]
fn golden_bounds_on_information() {
    for file in golden_files("cis", "prhs_bound") {
        let [dropped, eligible, entropy, loss] =
            ["delta", "L", "h_b", "g"].map(|name| file.tensor(name).values);
        for (at, &dropped) in dropped.iter().enumerate() {
            assert!((binary_entropy(dropped) - entropy[at]).abs() < 1e-14);
            for (row, &eligible) in eligible.iter().enumerate() {
                let expected = loss[row * entropy.len() + at];
                let error = (information_loss(dropped, eligible) - expected).abs();
                assert!(error < 1e-12, "{dropped} of {eligible}: off by {error}");
            }
        }
    }
    let far = SharedStep { dropped: 0.1, distance: 1e6, key_norm: 1e3, scale: 0.1 };
    assert_eq!(far.dropped_by_odds(), 1.0);
    assert!(far.dropped_by_paper() > 1.0 && far.gap() > far.dropped_by_paper());
    assert!((far.attention_change_at_most() - 2.0).abs() < 1e-12);
    for epsilon in [0.01f64, 0.3, 2.0] {
        let step = SharedStep { dropped: 0.1, distance: epsilon, key_norm: 1.0, scale: 1.0 };
        // Two tokens whose logits differ by epsilon one way, and then the other: the bound is met.
        let share = |difference: f64| 1.0 / (1.0 + (-difference).exp());
        let change = 2.0 * (share(epsilon) - share(-epsilon));
        assert!((change - step.attention_change_at_most()).abs() < 1e-12);
        assert!(step.attention_change_at_most() <= epsilon);
        assert!(4.0 * step.attention_change_at_most() <= step.gap() + 1e-12);
        // Softmax of random logits never moves further.
        let mut numbers = Numbers::new(7);
        for _ in 0..200 {
            let logits: Vec<f64> = numbers.normal(9).iter().map(|x| f64::from(*x)).collect();
            let moved: Vec<f64> = logits
                .iter()
                .map(|x| x + epsilon * (numbers.below(201) as f64 / 100.0 - 1.0))
                .collect();
            let [before, after] = [&logits, &moved].map(|logits| {
                let sum: f64 = logits.iter().map(|x| x.exp()).sum();
                logits.iter().map(|x| x.exp() / sum).collect::<Vec<f64>>()
            });
            let change: f64 = before.iter().zip(&after).map(|(a, b)| (a - b).abs()).sum();
            assert!(change <= step.attention_change_at_most() + 1e-12, "{change} for {epsilon}");
        }
    }
    let near = SharedStep { distance: 0.0, ..far };
    assert!((near.dropped_by_odds() - 0.1).abs() < 1e-12 && near.dropped_by_paper() == 0.1);
}
