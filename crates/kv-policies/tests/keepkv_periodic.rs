//! Caches that are rebuilt from all tokens, and how far they stray in between.

use burn::tensor::{Device, Tensor};
use kv_core::{CacheOptions, KvCache, LayerCache, Origin, read_f32};
use kv_kernels::KeyRule;
use kv_kernels::merge_reference::{Member, merge_group};
use kv_policies::{Archive, LayerContext, Policy, perturbation_bound, read_votes};
use kv_testing::{Numbers, devices, quick_devices, quick_exact_devices, relative_error};
use serde_json::{Value, json};

use super::support::{LAYER, Prompt, kept, policy, step};

/// One query head a key-value head.
fn prompt(seed: u64, batch: usize, tokens: usize, device: &Device) -> Prompt {
    let mut numbers = Numbers::new(seed);
    let mut heads = || numbers.tensor([batch, 2, tokens, 16], device);
    Prompt::new(heads(), heads(), heads())
}

/// KeepKV that merges all for the current query alone, around H2O.
fn current(extra: Value) -> Value {
    let mut config = json!({
        "policy": "keepkv", "budget": 16, "evictor": "h2o", "threshold": -1.0, "window": 1,
    });
    if let (Some(config), Some(extra)) = (config.as_object_mut(), extra.as_object()) {
        config.extend(extra.clone());
    }
    config
}

fn floats<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    read_f32("test", tensor).unwrap()
}

/// Two sequences of different lengths under a policy.
fn cache_of(policy: &dyn Policy, prompts: &[Prompt; 2]) -> LayerCache {
    let parts = prompts.iter().map(|prompt| prompt.compress(policy, 160));
    LayerCache::concat(parts.collect()).unwrap()
}

/// Errors of a policy's outputs against the full cache's, step after step.
fn errors(
    policy: &dyn Policy,
    layer: LayerContext,
    steps: usize,
    device: &Device,
) -> (Vec<f64>, LayerCache) {
    let prompts = [prompt(1, 1, 40, device), prompt(2, 1, 60, device)];
    let tokens = prompt(3, 2, steps, device);
    let full = super::support::policy(json!({"policy": "full"}));
    let (mut cache, mut complete) = (cache_of(policy, &prompts), cache_of(&*full, &prompts));
    let errors = (0..steps).map(|index| {
        let next = || step(&tokens.query, &tokens.keys, &tokens.values, index, 60 + index);
        let actual = policy.step(layer, &mut cache, next()).unwrap();
        let expected = full.step(layer, &mut complete, next()).unwrap();
        let expected: Vec<f64> = floats(expected).into_iter().map(f64::from).collect();
        relative_error(&floats(actual), &expected)
    });
    (errors.collect(), cache)
}

/// Rebuilt for every step's own scores, attention is that of all tokens, whatever became of the
/// keys.
#[test]
fn rebuilt_at_every_step_nothing_is_lost() {
    for tested in quick_exact_devices("rebuilt_at_every_step_nothing_is_lost") {
        for key in ["paper", "additive", "votes"] {
            for order in ["merge-first", "evict-first"] {
                let config = current(json!({"period": 1, "key": key, "order": order}));
                let (errors, cache) = errors(&*policy(config), LAYER, 8, &tested.device);
                let worst = errors.iter().copied().fold(0.0, f64::max);
                assert!(worst < 1e-5, "{} {key} {order}: off by {worst}", tested.name);
                assert_eq!(cache.layout().lengths(), [16; 4], "{}", tested.name);
                let votes: u64 = read_votes(&cache).unwrap().iter().sum();
                assert_eq!(votes, 2 * (40 + 8) + 2 * (60 + 8), "{} {key}", tested.name);
                let memory = cache.memory();
                assert_eq!(memory.host, 2 * 2 * (100 + 2 * 8) * 16 * 4 - memory_gathered(8));
            }
        }
    }
}

/// Bytes of the last tokens of two sequences, which are still on the device.
fn memory_gathered(tokens: usize) -> usize {
    2 * 2 * 2 * tokens * 16 * 4
}

/// Between rebuilds the cache strays, and comes back; layers take turns.
#[test]
fn every_period_comes_back_to_all_tokens() {
    for tested in quick_exact_devices("every_period_comes_back_to_all_tokens") {
        for (staggered, index, turn) in [(false, 1, 0), (true, 0, 0), (true, 1, 2)] {
            let policy = policy(current(json!({"period": 4, "staggered": staggered})));
            let layer = LayerContext { index, count: 2 };
            let (errors, _) = errors(&*policy, layer, 9, &tested.device);
            for (at, error) in errors.iter().enumerate() {
                let exact = (at + 1 + turn).is_multiple_of(4);
                let context = format!("{} layer {index} step {at}", tested.name);
                assert_eq!(*error < 1e-5, exact, "{context}: off by {error}");
            }
        }
    }
}

/// Where the estimate passes a bound, the cache is rebuilt at once; without merges there is nothing
/// to estimate.
#[test]
fn caches_that_stray_too_far_are_rebuilt() {
    for tested in quick_devices("keepkv_periodic") {
        let run = |above: f64, budget: usize| {
            let policy = policy(current(json!({"rebuild_above": above, "budget": budget})));
            let (errors, cache) = errors(&*policy, LAYER, 12, &tested.device);
            let archive = cache.policy_state::<Archive>().unwrap();
            assert_eq!(archive.pushed(), 12, "{}", tested.name);
            // One for each of two lengths.
            (errors.iter().sum::<f64>(), archive.transfers().count / 2)
        };
        let (always, rebuilt) = run(1e-9, 16);
        let (never, none) = run(4.1, 16);
        assert_eq!((rebuilt, none), (12, 0), "{}", tested.name);
        // Rebuilt behind every step, for the query that was: better than never, not exact.
        assert!(always < never, "{}: {always} for {never}", tested.name);
        assert_eq!(run(1e-9, 200).1, 0, "{}", tested.name);
    }
}

/// No step strays further than is allowed but one whose estimate is beyond it too, so that the
/// cache is rebuilt: of every head, what is observed is compared with the full cache's output, in
/// units of its largest value's norm.
#[test]
fn steps_that_stray_further_than_allowed_rebuild_the_cache() {
    const DIM: usize = 16;
    let device = &devices()[0].device;
    let full = policy(json!({"policy": "full"}));
    let (mut strayed, mut spared) = (0, 0);
    for (above, turn) in [(0.02, 0.01), (0.1, 0.01), (0.3, 0.05), (0.05, 0.2), (0.1, 1.0)] {
        for seed in 0..12 {
            let keep = policy(current(json!({"rebuild_above": above, "budget": 24})));
            // Queries that turn slowly, as predictions need.
            let mut numbers = Numbers::new(seed);
            let base = numbers.tensor([1, 2, 1, DIM], device);
            let mut alike = |batch: usize, tokens: usize| {
                let shape = [batch, 2, tokens, DIM];
                let queries = base.clone() + numbers.tensor(shape, device) * turn;
                Prompt::new(queries, numbers.tensor(shape, device), numbers.tensor(shape, device))
            };
            let prompts = [alike(1, 40), alike(1, 60)];
            let tokens = alike(2, 16);
            let (mut cache, mut complete) =
                (cache_of(&*keep, &prompts), cache_of(&*full, &prompts));
            for index in 0..16 {
                let next = || step(&tokens.query, &tokens.keys, &tokens.values, index, 60 + index);
                let before = cache.policy_state::<Archive>().unwrap().transfers().count;
                let actual = floats(keep.step(LAYER, &mut cache, next()).unwrap());
                let expected = floats(full.step(LAYER, &mut complete, next()).unwrap());
                let rebuilds = cache.policy_state::<Archive>().unwrap().transfers().count > before;
                let values = floats(complete.values().clone());
                let norm = |row: &[f32]| row.iter().map(|x| x * x).sum::<f32>().sqrt();
                let observed = (0..4).map(|head| {
                    let slots = complete.layout().live(head);
                    let rows = slots.map(|slot| norm(&values[slot * DIM..][..DIM]));
                    let own = head * DIM..(head + 1) * DIM;
                    let apart: Vec<f32> = actual[own.clone()]
                        .iter()
                        .zip(&expected[own])
                        .map(|(a, b)| a - b)
                        .collect();
                    f64::from(norm(&apart) / rows.fold(0.0, f32::max))
                });
                let observed = observed.fold(0.0, f64::max);
                let context = format!("turn {turn}, seed {seed}, step {index}");
                assert!(rebuilds || observed <= above, "{context}: {observed} above {above}");
                strayed += usize::from(observed > above);
                spared += usize::from(!rebuilds);
            }
        }
    }
    assert!(strayed > 100 && spared > 100, "{strayed} strayed, {spared} were spared");
}

/// All tokens go where the cache goes.
#[test]
fn caches_that_move_take_their_tokens_along() {
    type Move = fn(LayerCache) -> LayerCache;
    let moves: [(&str, Move); 4] = [
        ("resized", |mut cache| {
            let capacities = cache.layout().capacities().iter().map(|capacity| capacity + 3);
            cache.resize(capacities.collect()).unwrap();
            cache
        }),
        ("cloned", |cache| cache.clone()),
        ("to its own device", |cache| {
            let device = cache.options().device.clone();
            cache.to_device(&device)
        }),
        ("to the host and back", |cache| {
            let device = cache.options().device.clone();
            let layers = vec![cache];
            let cache = KvCache { layers, seen: vec![43, 63], origin: Origin::default() };
            let error = cache.save(std::path::Path::new("/nowhere")).unwrap_err().to_string();
            assert!(error.contains("host memory"), "{error}");
            let mut back = cache.into_host().unwrap().into_device(&device).unwrap();
            back.layers.remove(0)
        }),
    ];
    for tested in quick_exact_devices("caches_that_move_take_their_tokens_along") {
        let device = &tested.device;
        let policy = policy(current(json!({"period": 2, "staggered": false})));
        let full = super::support::policy(json!({"policy": "full"}));
        for (name, moved) in moves {
            let prompts = [prompt(1, 1, 40, device), prompt(2, 1, 60, device)];
            let tokens = prompt(3, 2, 8, device);
            let (mut cache, mut complete) =
                (cache_of(&*policy, &prompts), cache_of(&*full, &prompts));
            for index in 0..8 {
                let next = || step(&tokens.query, &tokens.keys, &tokens.values, index, 60 + index);
                let actual = floats(policy.step(LAYER, &mut cache, next()).unwrap());
                let expected = floats(full.step(LAYER, &mut complete, next()).unwrap());
                let expected: Vec<f64> = expected.into_iter().map(f64::from).collect();
                if index % 2 == 1 {
                    let error = relative_error(&actual, &expected);
                    assert!(error < 1e-5, "{} {name} step {index}: {error}", tested.name);
                }
                if index == 2 {
                    cache = moved(cache);
                }
            }
        }
    }
}

/// A budget that is a share of the prompt stays one: of a head's slots as many are for the newest
/// tokens, however long the output.
#[test]
fn shares_of_the_prompt_stay_what_they_are() {
    for tested in quick_devices("keepkv_periodic") {
        let policy = policy(json!({
            "policy": "keepkv", "budget": 0.4, "evictor": "h2o", "period": 4, "staggered": false,
        }));
        let (prompt, tokens) =
            (prompt(10, 1, 40, &tested.device), prompt(11, 1, 100, &tested.device));
        let mut cache = prompt.compress(&*policy, 100);
        for index in 0..100 {
            let next = step(&tokens.query, &tokens.keys, &tokens.values, index, 40 + index);
            policy.step(LAYER, &mut cache, next).unwrap();
            let newest = 41 + index as u32;
            for range in 0..2 {
                let kept = kept(&cache, range);
                assert_eq!(kept.len(), 16, "{} step {index}", tested.name);
                let recent = newest - 8..newest;
                let all = recent.clone().all(|token| kept.contains(&token));
                assert!(all, "{} step {index}: {kept:?} lacks some of {recent:?}", tested.name);
                let older = kept.iter().filter(|&&token| token + 9 < newest).count();
                assert!(older > 0, "{} step {index}: {kept:?} has only recents", tested.name);
            }
        }
    }
}

/// What was asked for ahead is what is taken, also where tokens are copied to the host meanwhile.
#[test]
fn long_periods_come_back_too() {
    for tested in quick_exact_devices("long_periods_come_back_too") {
        for period in [32, 64] {
            let config = current(json!({"period": period, "staggered": false}));
            let (errors, cache) = errors(&*policy(config), LAYER, 130, &tested.device);
            for (at, error) in errors.iter().enumerate() {
                let exact = (at + 1).is_multiple_of(period);
                assert_eq!(*error < 1e-5, exact, "{} step {at}: off by {error}", tested.name);
            }
            let count = cache.policy_state::<Archive>().unwrap().transfers().count;
            assert_eq!(count, 2 * (130 / period), "{}", tested.name);
        }
    }
}

/// Prompts that are shorter than the window, and than each other; rows pass their limits one by
/// one.
#[test]
fn short_prompts_share_a_batch() {
    for tested in quick_devices("keepkv_periodic") {
        let policy = policy(json!({
            "policy": "keepkv", "budget": 12, "evictor": "h2o", "period": 3, "staggered": false,
        }));
        let prompts = [prompt(7, 1, 5, &tested.device), prompt(8, 1, 9, &tested.device)];
        let tokens = prompt(9, 2, 20, &tested.device);
        let alone: Vec<Vec<f32>> = (0..2)
            .map(|row| {
                let mut cache = prompts[row].compress(&*policy, 64);
                let own = |tensor: &Tensor<4>| tensor.clone().narrow(0, row, 1);
                let [query, keys, values] = [&tokens.query, &tokens.keys, &tokens.values].map(own);
                let outputs = (0..20).flat_map(|index| {
                    let next = step(&query, &keys, &values, index, 9 + index);
                    floats(policy.step(LAYER, &mut cache, next).unwrap())
                });
                outputs.collect()
            })
            .collect();
        let mut cache = cache_of(&*policy, &prompts);
        for index in 0..20 {
            let next = step(&tokens.query, &tokens.keys, &tokens.values, index, 9 + index);
            let output = floats(policy.step(LAYER, &mut cache, next).unwrap());
            let width = output.len() / 2;
            for (row, alone) in alone.iter().enumerate() {
                let expected: Vec<f64> =
                    alone[index * width..][..width].iter().map(|&x| x.into()).collect();
                let error = relative_error(&output[row * width..][..width], &expected);
                assert!(error < 1e-3, "{} step {index} row {row}: {error}", tested.name);
            }
        }
        assert_eq!(cache.layout().lengths(), [12; 4], "{}", tested.name);
    }
}

/// More tokens than are gathered on the device, asked for ahead and not.
#[test]
fn archives_give_back_what_they_were_given() {
    for tested in quick_devices("keepkv_periodic") {
        let device = &tested.device;
        let (first, more) = (prompt(4, 3, 5, device), prompt(5, 3, 150, device));
        let full = policy(json!({"policy": "full"}));
        let mut cache = first.compress(&*full, 150);
        let positions = cache.positions().clone().narrow(0, 0, 5).unsqueeze::<2>();
        let positions = positions.expand([3, 5]);
        let dtype = CacheOptions::new(device, first.keys.dtype()).dtype;
        let archive = Archive::new(&first.keys, &first.values, &positions, dtype).unwrap();
        cache.insert_policy_state(archive);
        for index in 0..150 {
            let next = step(&more.query, &more.keys, &more.values, index, 5 + index);
            next.append(&mut cache).unwrap();
            let [keys, values] = cache.newest();
            let archive = cache.policy_state_mut::<Archive>().unwrap();
            archive.push(keys, values, next.position).unwrap();
            if index % 40 == 0 {
                archive.prefetch();
            }
        }
        let mut moved = cache.clone().to_device(device);
        for archive in [
            cache.policy_state_mut::<Archive>().unwrap(),
            moved.policy_state_mut::<Archive>().unwrap(),
        ] {
            let [complete] = archive.fetch().unwrap().try_into().unwrap();
            assert_eq!(complete.rows, 3);
            for (actual, expected) in [
                (complete.keys, [first.keys.clone(), more.keys.clone()]),
                (complete.values, [first.values.clone(), more.values.clone()]),
            ] {
                let expected = Tensor::cat(expected.to_vec(), 2);
                assert_eq!(floats(actual), floats(expected), "{}", tested.name);
            }
            let positions = complete.positions.try_into_vec_as::<i32>().unwrap();
            let expected: Vec<i32> = (0..3).flat_map(|_| 0..155).collect();
            assert_eq!(positions, expected, "{}", tested.name);
        }
    }
}

/// Theorem 5: over the steps behind a merge, the output stays within the bound of the predictions'
/// error, that of the merged slot's own among them, and the spread of the values.
#[test]
fn perturbation_stays_below_its_bound() {
    let mut numbers = Numbers::new(6);
    let (dim, slots, merged) = (8, 12, 3);
    let scale = 1.0 / (dim as f64).sqrt();
    let (mut tested, mut tightest) = (0, f64::MAX);
    for case in 0..20_000 {
        let mut rows = |count: usize| -> Vec<Vec<f64>> {
            let all = numbers.normal(count * dim);
            all.chunks(dim).map(|row| row.iter().map(|&x| f64::from(x)).collect()).collect()
        };
        let (mut keys, values, queries) = (rows(slots), rows(slots), rows(5));
        // Alike, as those that merge are; the later query is more or less the one merged for.
        let spread = [0.01, 0.1, 0.5][case % 3];
        for at in 1..merged {
            keys[at] = keys[0].iter().zip(&keys[at]).map(|(a, b)| a + spread * b).collect();
        }
        let query = &queries[0];
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(x, y)| x * y).sum::<f64>();
        let votes: Vec<f64> =
            numbers.normal(slots).iter().map(|x| 1.0 + f64::from(x.abs()).floor()).collect();
        let score = |query: &[f64], key: &[f64]| (scale * dot(query, key)).exp();

        let members: Vec<Member> = (0..merged)
            .map(|at| Member {
                key: &keys[at],
                value: &values[at],
                log_weight: votes[at].ln(),
                log_score: scale * dot(query, &keys[at]),
            })
            .collect();
        let group = merge_group(&members, Some(query), KeyRule::Paper, 4.0, scale);
        let distance = |a: &[f64], b: &[f64]| {
            a.iter().zip(b).map(|(x, y)| (x - y).powi(2)).sum::<f64>().sqrt()
        };
        let pairs = (0..merged).flat_map(|j| (0..slots).map(move |i| (j, i)));
        let gamma = pairs.map(|(j, i)| distance(&values[j], &values[i])).fold(0.0, f64::max);

        let output = |parts: &[(f64, &[f64])]| -> Vec<f64> {
            let total: f64 = parts.iter().map(|(mass, _)| mass).sum();
            (0..dim)
                .map(|d| parts.iter().map(|(mass, value)| mass * value[d]).sum::<f64>() / total)
                .collect()
        };
        // Steps later, queries have drifted further.
        let mut later = query.clone();
        for (drift, turn) in queries[1..].iter().zip([0.02, 0.05, 0.1, 0.2]) {
            later.iter_mut().zip(drift).for_each(|(a, b)| *a += turn * b);
            let predicted =
                (0..merged).map(|at| (score(query, &keys[at]), score(&later, &keys[at])));
            let own = (group.log_score.exp(), score(&later, &group.key));
            let errors =
                predicted.chain([own]).map(|(predicted, actual)| (1.0 - predicted / actual).abs());
            let epsilon = errors.fold(0.0, f64::max);
            let mass = |at: usize| votes[at] * score(&later, &keys[at]);
            let before: Vec<(f64, &[f64])> =
                (0..slots).map(|at| (mass(at), values[at].as_slice())).collect();
            let weight = group.log_weight.exp() * own.1;
            let mut after: Vec<(f64, &[f64])> = before[merged..].to_vec();
            after.push((weight, &group.value));
            let perturbation = distance(&output(&before), &output(&after));
            let bound = perturbation_bound(epsilon, gamma);
            assert!(perturbation <= bound + 1e-12, "case {case}: {perturbation} above {bound}");
            if bound.is_finite() {
                tested += 1;
                tightest = tightest.min(bound / perturbation.max(1e-12));
            }
        }
    }
    assert!(tested > 60_000, "only {tested} cases had a bound");
    assert!(tightest < 100.0, "the bound is never within {tightest} of what is seen");
}

#[test]
fn policies_that_cannot_be_rebuilt_are_refused() {
    for (evictor, option) in [("snapkv", "period"), ("expected-attention", "rebuild_above")] {
        let mut config = json!({"policy": "keepkv", "budget": 16, "evictor": evictor});
        config[option] = json!(4);
        let error = kv_policies::build(&config).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains(option) && error.contains(evictor), "{error}");
    }
    let error = kv_policies::build(&current(json!({"rebuild_above": -1.0}))).map(|_| ());
    assert!(error.unwrap_err().to_string().contains("rebuild_above"));
}
