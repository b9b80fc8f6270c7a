//! Slots of KeepKV that take no merges, or all that no other slot takes, and what merged slots
//! inherit.

use std::sync::Arc;

use burn::tensor::{DType, Device, Int, Tensor};
use kv_core::{LayerCache, read_f32};
use kv_kernels::TAKES_ANY;
use kv_policies::{KeepKv, KeepKvOptions, Order, SCORE, Step, read_votes};
use kv_testing::{Numbers, quick_devices};
use serde_json::{Value, json};

use super::support::{Given, LAYER, Prompt, policy};

const DIM: usize = 16;
const HEADS: usize = 2;

fn prompt(seed: u64, batch: usize, tokens: usize, device: &Device) -> Prompt {
    let mut numbers = Numbers::new(seed);
    Prompt::new(
        numbers.tensor([batch, 2 * HEADS, tokens, DIM], device),
        numbers.tensor([batch, HEADS, tokens, DIM], device),
        numbers.tensor([batch, HEADS, tokens, DIM], device),
    )
}

fn floats<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    read_f32("test", tensor).unwrap()
}

fn cosine(a: &[f32], b: &[f32]) -> f32 {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(x, y)| x * y).sum::<f32>();
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

/// The `index`-th step of sequences whose prompts had `tokens` tokens each.
fn step(of: &Prompt, index: usize, tokens: &[usize]) -> Step {
    let pick = |tensor: &Tensor<4>| tensor.clone().narrow(2, index, 1).squeeze_dim::<3>(2);
    let positions: Vec<i32> = tokens.iter().map(|tokens| (tokens + index) as i32).collect();
    let positions =
        Tensor::<1, Int>::from_data(positions.as_slice(), (&of.keys.device(), DType::I32));
    Step::new(pick(&of.query), pick(&of.keys), pick(&of.values), positions)
}

/// The votes of each head's slots.
fn votes_of_heads(cache: &LayerCache) -> Vec<u64> {
    let mut votes = read_votes(cache).unwrap().into_iter();
    let lengths = cache.layout().lengths();
    lengths.iter().map(|&length| votes.by_ref().take(length).sum()).collect()
}

/// Numbers of all live slots, head after head.
fn live(cache: &LayerCache, track: &str) -> Vec<Vec<f32>> {
    let all = floats(cache.track(track).unwrap().clone());
    let heads = 0..cache.layout().head_ranges();
    heads.map(|range| cache.layout().live(range).map(|slot| all[slot]).collect()).collect()
}

/// Which kept token each victim goes into, and the votes of all kept tokens, by plain loops.
fn expected_votes(
    keys: &[f32],
    kept: &[u32],
    scores: &[f32],
    [pristine, threshold]: [f32; 2],
) -> (Vec<usize>, Vec<u64>) {
    let key = |token: u32| &keys[token as usize * DIM..][..DIM];
    let mut order: Vec<usize> = (0..kept.len()).collect();
    // A stable sort: the earlier token comes first among equals.
    order.sort_by(|&a, &b| scores[kept[b] as usize].total_cmp(&scores[kept[a] as usize]));
    let untouched = order[..(pristine * kept.len() as f32) as usize].to_vec();
    let mut votes = vec![1; kept.len()];
    for victim in (0..scores.len() as u32).filter(|token| !kept.contains(token)) {
        let open = (0..kept.len()).filter(|index| !untouched.contains(index));
        let cosines = open.map(|index| (index, cosine(key(victim), key(kept[index]))));
        let best = cosines.max_by(|a, b| a.1.total_cmp(&b.1));
        if let Some((index, _)) = best.filter(|(_, cosine)| *cosine > threshold) {
            votes[index] += 1;
        }
    }
    (untouched, votes)
}

/// Heads that keep different numbers of tokens: the heaviest are left as they are, and victims go
/// into the nearest of the others.
#[test]
fn pristine_tokens_of_a_prompt_take_no_merges() {
    const TOKENS: usize = 50;
    let kept: Vec<Vec<u32>> = [24, 17, 9, 30].map(|count| (1..=count).collect()).to_vec();
    let mut numbers = Numbers::new(1);
    // Many are equal.
    let scores: Vec<f32> = (0..4 * TOKENS).map(|_| numbers.below(6) as f32).collect();
    for (tested, pristine, threshold) in quick_devices("keepkv_takes").iter().flat_map(|tested| {
        [(0.5, -1.0), (0.5, 0.3), (0.25, 0.1), (1.0, -1.0)].map(|(p, t)| (tested, p, t))
    }) {
        let prompt = prompt(2, 2, TOKENS, &tested.device);
        let given = Given { scores: scores.clone(), ..Given::new(kept.clone(), 30) };
        let options =
            KeepKvOptions { pristine, threshold, order: Order::EvictFirst, ..Default::default() };
        let cache = prompt.compress(&KeepKv::new(Arc::new(given), options).unwrap(), 1);
        let (keys, values) = (floats(prompt.keys.clone()), floats(prompt.values.clone()));
        let pools = [cache.keys(), cache.values()].map(|pool| floats(pool.clone()));
        let mut votes = read_votes(&cache).unwrap().into_iter();
        for (range, kept) in kept.iter().enumerate() {
            let context = format!("{} {pristine} {threshold} head {range}", tested.name);
            let rows = range * TOKENS * DIM..(range + 1) * TOKENS * DIM;
            let (untouched, expected) = expected_votes(
                &keys[rows.clone()],
                kept,
                &scores[range * TOKENS..][..TOKENS],
                [pristine as f32, threshold],
            );
            let actual: Vec<u64> = votes.by_ref().take(kept.len()).collect();
            assert_eq!(actual, expected, "{context}");
            let merged = pristine < 1.0;
            assert_eq!(expected.iter().any(|&votes| votes > 1), merged, "{context}");
            let first = cache.layout().live(range).start;
            for index in untouched {
                let token = kept[index] as usize * DIM;
                for (pool, tokens) in pools.iter().zip([&keys[rows.clone()], &values[rows.clone()]])
                {
                    let slot = &pool[(first + index) * DIM..][..DIM];
                    assert_eq!(slot, &tokens[token..][..DIM], "{context} token {index}");
                }
            }
        }
    }
}

/// A pristine token stays as it is for as long as it is kept, with merges first and last, one
/// victim a step and several.
#[test]
fn pristine_tokens_stay_as_they_are_at_every_step() {
    const TOKENS: usize = 40;
    const STEPS: usize = 24;
    for (tested, order, interval) in quick_devices("keepkv_takes").iter().flat_map(|tested| {
        [("merge-first", 1), ("evict-first", 1), ("merge-first", 4)].map(|(o, i)| (tested, o, i))
    }) {
        let (prompt, steps) =
            (prompt(3, 1, TOKENS, &tested.device), prompt(4, 1, STEPS, &tested.device));
        let keepkv = policy(json!({
            "policy": "keepkv", "pristine": 0.5, "threshold": -1.0, "order": order,
            "evictor": {"policy": "h2o", "budget": 16, "interval": interval},
        }));
        let context = format!("{} {order} {interval}", tested.name);
        let mut cache = prompt.compress(&*keepkv, STEPS);
        let tokens = [&prompt.keys, &prompt.values].map(|tensor| floats(tensor.clone()));
        let (mut seen, mut left) = (0, 0);
        for index in 0..=STEPS {
            let pools = [cache.keys(), cache.values()].map(|pool| floats(pool.clone()));
            let positions = cache.read_positions().unwrap();
            let takes = floats(cache.track("takes").unwrap().clone());
            left = 0;
            for range in 0..HEADS {
                for slot in cache.layout().live(range).filter(|&slot| takes[slot] == 1.0) {
                    let token = (range * TOKENS + positions[slot] as usize) * DIM;
                    for (pool, tokens) in pools.iter().zip(&tokens) {
                        let slot = &pool[slot * DIM..][..DIM];
                        assert_eq!(slot, &tokens[token..][..DIM], "{context} step {index}");
                    }
                    left += 1;
                }
            }
            if index == 0 {
                assert_eq!(left, HEADS * 8, "{context}");
            }
            seen += left;
            // Every victim finds another slot.
            assert_eq!(votes_of_heads(&cache), [(TOKENS + index) as u64; HEADS], "{context}");
            if index < STEPS {
                keepkv.step(LAYER, &mut cache, step(&steps, index, &[TOKENS])).unwrap();
            }
        }
        assert!(left > 0 && seen > STEPS, "{context}: {left} pristine slots are left");
    }
}

/// No vote is lost in prompts, and at every step of sequences of different lengths, whatever
/// evicts. The one slot of each head that takes all is never evicted.
#[test]
fn a_background_slot_keeps_every_vote() {
    // The last has fewer tokens than are protected.
    const TOKENS: [usize; 4] = [30, 47, 9, 2];
    const STEPS: usize = 30;
    let around = |evictor: Value, own: Value| {
        let mut config = json!({"policy": "keepkv", "background": true, "evictor": evictor});
        config.as_object_mut().unwrap().extend(own.as_object().unwrap().clone());
        config
    };
    let h2o =
        |interval: usize| json!({"policy": "h2o", "budget": 16, "sinks": 3, "interval": interval});
    for tested in quick_devices("keepkv_takes") {
        let prompts: Vec<Prompt> = TOKENS
            .iter()
            .enumerate()
            .map(|(seed, &tokens)| prompt(10 + seed as u64, 1, tokens, &tested.device))
            .collect();
        let steps = prompt(20, TOKENS.len(), STEPS, &tested.device);
        for (config, evicts) in [
            (around(h2o(1), json!({})), true),
            (around(h2o(1), json!({"pristine": 0.5, "key": "additive"})), true),
            (around(h2o(1), json!({"pristine": 1.0, "inherit": true})), true),
            (around(h2o(4), json!({"threshold": 0.3, "order": "evict-first"})), true),
            (around(h2o(1), json!({"predictor": "window", "threshold": 0.3})), true),
            (around(h2o(1), json!({"spare_protected": true, "pristine": 0.3})), true),
            (around(json!({"policy": "recent-attention", "budget": 14}), json!({})), true),
            // Protects every slot.
            (around(json!({"policy": "streaming-llm", "budget": 12}), json!({})), true),
            (
                around(
                    json!({"policy": "longflow", "budget": 16, "sinks": 3, "scope": "head"}),
                    json!({"pristine": 0.5}),
                ),
                true,
            ),
            (
                around(
                    json!({"policy": "snapkv", "budget": 16, "sinks": 3, "window": 4}),
                    json!({"pristine": 0.5}),
                ),
                false,
            ),
            (around(json!({"policy": "adakv", "budget": 16, "window": 4}), json!({})), false),
        ] {
            let keepkv = policy(config.clone());
            let context = format!("{config} on {}", tested.name);
            let parts = prompts.iter().map(|prompt| prompt.compress(&*keepkv, STEPS));
            let mut cache = LayerCache::concat(parts.collect()).unwrap();
            let background = |cache: &LayerCache| -> Vec<i32> {
                let (takes, positions) = (
                    floats(cache.track("takes").unwrap().clone()),
                    cache.read_positions().unwrap(),
                );
                let ranges = 0..cache.layout().head_ranges();
                ranges
                    .map(|range| {
                        let live = cache.layout().live(range);
                        let own: Vec<usize> =
                            live.filter(|&slot| takes[slot] == TAKES_ANY).collect();
                        assert_eq!(own.len(), 1, "{context} head {range}");
                        positions[own[0]]
                    })
                    .collect()
            };
            let first = background(&cache);
            for index in 0..=STEPS {
                let expected: Vec<u64> =
                    TOKENS.iter().flat_map(|&tokens| [(tokens + index) as u64; HEADS]).collect();
                assert_eq!(votes_of_heads(&cache), expected, "{context} step {index}");
                assert_eq!(background(&cache), first, "{context} step {index}");
                if index < STEPS {
                    keepkv.step(LAYER, &mut cache, step(&steps, index, &TOKENS)).unwrap();
                }
            }
            let most = cache.layout().lengths().iter().copied().max().unwrap();
            assert_eq!(most < 16 + STEPS, evicts, "{context}: {most} slots");
            let pools = [cache.keys(), cache.values()].map(|pool| floats(pool.clone()));
            let finite = (0..cache.layout().head_ranges()).all(|range| {
                let live = cache.layout().live(range);
                let rows = live.start * DIM..live.end * DIM;
                pools.iter().all(|pool| pool[rows.clone()].iter().all(|x| x.is_finite()))
            });
            assert!(finite, "{context}");
        }
    }
}

/// With a background slot, where heads merge what is similar and no more: each victim goes into the
/// most similar slot above the threshold, or into the background.
#[test]
fn the_background_takes_what_no_other_slot_takes() {
    const TOKENS: usize = 60;
    const THRESHOLD: f32 = 0.4;
    for tested in quick_devices("keepkv_takes") {
        let prompt = prompt(30, 2, TOKENS, &tested.device);
        let kept: Vec<Vec<u32>> =
            [20, 12, 7, 25].map(|count| (0..count).map(|at| 2 * at).collect()).to_vec();
        let options = KeepKvOptions {
            background: true,
            threshold: THRESHOLD,
            order: Order::EvictFirst,
            ..Default::default()
        };
        let keepkv = KeepKv::new(Arc::new(Given::new(kept.clone(), 25)), options).unwrap();
        let cache = prompt.compress(&keepkv, 1);
        let keys = floats(prompt.keys.clone());
        let mut votes = read_votes(&cache).unwrap().into_iter();
        for ((range, kept), takes) in kept.iter().enumerate().zip(live(&cache, "takes")) {
            let background = takes.iter().position(|&takes| takes == TAKES_ANY).unwrap();
            let key = |token: u32| &keys[(range * TOKENS + token as usize) * DIM..][..DIM];
            let mut expected = vec![1; kept.len()];
            for victim in (0..TOKENS as u32).filter(|token| !kept.contains(token)) {
                let others = (0..kept.len()).filter(|&index| index != background);
                let cosines = others.map(|index| (index, cosine(key(victim), key(kept[index]))));
                let best = cosines.max_by(|a, b| a.1.total_cmp(&b.1));
                let similar = best.filter(|(_, cosine)| *cosine > THRESHOLD);
                expected[similar.map_or(background, |(index, _)| index)] += 1;
            }
            let actual: Vec<u64> = votes.by_ref().take(kept.len()).collect();
            assert_eq!(actual, expected, "{} head {range}", tested.name);
        }
    }
}

/// All attention that a head has had stays in the evictor's scores: a query's shares sum to 1.
#[test]
fn inherited_scores_sum_to_all_attention() {
    const TOKENS: [usize; 2] = [40, 25];
    const STEPS: usize = 20;
    for (tested, inherit, interval) in quick_devices("keepkv_takes").iter().flat_map(|tested| {
        [(true, 1), (true, 5), (false, 1)].map(|(inherit, interval)| (tested, inherit, interval))
    }) {
        let keepkv = policy(json!({
            "policy": "keepkv", "threshold": -1.0, "inherit": inherit,
            "evictor": {"policy": "h2o", "budget": 12, "interval": interval},
        }));
        let parts = TOKENS.map(|tokens| {
            let prompt = prompt(tokens as u64, 1, tokens, &tested.device);
            prompt.compress(&*keepkv, STEPS)
        });
        let mut cache = LayerCache::concat(parts.to_vec()).unwrap();
        let steps = prompt(5, TOKENS.len(), STEPS, &tested.device);
        for index in 0..=STEPS {
            let context = format!("{} {inherit} {interval} step {index}", tested.name);
            for (range, scores) in live(&cache, SCORE).into_iter().enumerate() {
                let queries = (TOKENS[range / HEADS] + index) as f32;
                let sum: f32 = scores.iter().sum();
                let same = (sum - queries).abs() < 1e-3 * queries;
                assert_eq!(same, inherit, "{context} head {range}: {sum} of {queries}");
            }
            if index < STEPS {
                keepkv.step(LAYER, &mut cache, step(&steps, index, &TOKENS)).unwrap();
            }
        }
    }
}

/// Steps of a full cache can be recorded with each of the options, as without them.
#[test]
fn steps_can_be_recorded_as_without_the_options() {
    const TOKENS: usize = 40;
    for tested in quick_devices("keepkv_takes") {
        let (prompt, steps) =
            (prompt(6, 1, TOKENS, &tested.device), prompt(7, 1, 2, &tested.device));
        for (option, value) in [
            ("pristine", json!(0.0)),
            ("pristine", json!(0.5)),
            ("background", json!(true)),
            ("inherit", json!(true)),
        ] {
            let mut config = json!({"policy": "keepkv", "budget": 12, "evictor": "h2o"});
            config[option] = value.clone();
            let keepkv = policy(config);
            let mut cache = prompt.compress(&*keepkv, 2);
            for index in 0..2 {
                keepkv.step(LAYER, &mut cache, step(&steps, index, &[TOKENS])).unwrap();
                let recordable = keepkv.plan(LAYER, &cache).unwrap().recordable;
                assert!(recordable, "{} {option} {value} step {index}", tested.name);
            }
        }
    }
}
