use std::sync::Arc;

use burn::tensor::{DType, Device, Tensor};
use kv_core::{LayerCache, read_f32};
use kv_policies::{Observation, Policy, build};
use kv_testing::{Numbers, devices, quick_devices, quick_exact_devices, relative_error};
use serde_json::{Value, json};

use super::support::{LAYER, Prompt, policy, step};

const DIM: usize = 8;

/// One slot, in f64.
#[derive(Clone, Debug)]
struct Slot {
    position: usize,
    key: Vec<f64>,
    value: Vec<f64>,
    attention: f64,
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn distance(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| (a - b) * (a - b)).sum::<f64>().sqrt()
}

/// Merges the slots of one head, in the order of their positions, as the definition has it: a sweep
/// with an `ε`, which is found among the cosines that there are.
fn merged(
    slots: &[Slot],
    budget: usize,
    threshold: f64,
    shares: [f64; 2],
    sized: bool,
) -> Vec<Slot> {
    if slots.len() <= budget {
        return slots.to_vec();
    }
    let [recents, heavy] = shares.map(|share| (share * budget as f64) as usize);
    let old = slots.len() - recents;
    let mut order: Vec<usize> = (0..old).collect();
    order.sort_by(|&a, &b| slots[b].attention.total_cmp(&slots[a].attention).then(a.cmp(&b)));
    let alone = |at: usize| at >= old || order[..heavy].contains(&at);
    let cosine = |at: usize| {
        let (a, b) = (&slots[at].key, &slots[at + 1].key);
        let norms = (dot(a, a) * dot(b, b)).sqrt();
        if norms > 0.0 { dot(a, b) / norms } else { 0.0 }
    };
    let sweep = |least: f64| {
        let mut sets: Vec<Vec<usize>> = Vec::new();
        for at in 0..slots.len() {
            match sets.last_mut() {
                Some(set) if at > 0 && !alone(at) && !alone(at - 1) && cosine(at - 1) > least => {
                    set.push(at);
                }
                _ => sets.push(vec![at]),
            }
        }
        sets
    };
    // The largest ε that meets the budget, or the threshold.
    let mut least: Vec<f64> = (0..slots.len() - 1).map(cosine).filter(|x| *x > threshold).collect();
    least.sort_by(f64::total_cmp);
    let fits = |least: &&f64| sweep(**least - 1e-12).len() <= budget;
    let epsilon = least.iter().rev().find(fits).map_or(threshold, |least| least - 1e-12);
    let mut sets = sweep(epsilon);
    let mass = |set: &[usize]| set.iter().map(|&at| slots[at].attention).sum::<f64>();
    while sets.len() > budget {
        let weakest = (0..sets.len())
            .filter(|&set| !alone(sets[set][0]))
            .min_by(|&a, &b| mass(&sets[a]).total_cmp(&mass(&sets[b])))
            .unwrap();
        sets.remove(weakest);
    }
    let average = |set: &Vec<usize>| {
        let pivot = *set
            .iter()
            .max_by(|&&a, &&b| slots[a].attention.total_cmp(&slots[b].attention))
            .unwrap();
        let far = |at: usize| distance(&slots[at].key, &slots[pivot].key);
        let sigma = set.iter().map(|&at| far(at)).sum::<f64>() / (set.len() - 1).max(1) as f64;
        let gauss = |at: usize| match sigma > 0.0 {
            true => (-far(at).powi(2) / (2.0 * sigma * sigma)).exp(),
            false => 1.0,
        };
        let sum: f64 = set.iter().map(|&at| gauss(at)).sum();
        let mean = |of: fn(&Slot) -> &Vec<f64>| -> Vec<f64> {
            let rows = || set.iter().map(|&at| (gauss(at) / sum, of(&slots[at])));
            (0..DIM).map(|d| rows().map(|(weight, row)| weight * row[d]).sum()).collect()
        };
        let size = if sized { set.len() as f64 } else { 1.0 };
        Slot {
            position: slots[pivot].position,
            key: mean(|slot| &slot.key),
            value: mean(|slot| &slot.value).iter().map(|x| x * size).collect(),
            attention: mass(set),
        }
    };
    sets.iter().map(average).collect()
}

/// Queries, keys and values whose neighbours resemble each other, as numbers and as tensors.
struct Text {
    query: Vec<f32>,
    keys: Vec<f32>,
    values: Vec<f32>,
    heads: usize,
    group: usize,
    tokens: usize,
}

impl Text {
    fn new(seed: u64, heads: usize, group: usize, tokens: usize) -> Self {
        let mut numbers = Numbers::new(seed);
        let mut keys = numbers.normal(heads * tokens * DIM);
        for at in DIM..keys.len() {
            if !at.is_multiple_of(tokens * DIM) {
                keys[at] = 0.85 * keys[at - DIM] + 0.5 * keys[at];
            }
        }
        let query = numbers.normal(heads * group * tokens * DIM);
        Self { query, keys, values: numbers.normal(heads * tokens * DIM), heads, group, tokens }
    }

    fn tensors(&self, device: &Device) -> [Tensor<4>; 3] {
        [(&self.query, self.group), (&self.keys, 1), (&self.values, 1)].map(|(numbers, group)| {
            let tensor = Tensor::<1>::from_data(numbers.as_slice(), (device, DType::F32));
            tensor.reshape([1, self.heads * group, self.tokens, DIM])
        })
    }

    fn row(numbers: &[f32], at: usize) -> Vec<f64> {
        numbers[at * DIM..][..DIM].iter().map(|x| f64::from(*x)).collect()
    }

    /// Appends a token to a head and adds its queries' attention.
    fn append(&self, slots: &mut Vec<Slot>, head: usize, token: usize) {
        let at = head * self.tokens + token;
        let (key, value) = (Self::row(&self.keys, at), Self::row(&self.values, at));
        slots.push(Slot { position: token, key, value, attention: 0.0 });
        for g in 0..self.group {
            let at = (head * self.group + g) * self.tokens + token;
            let query = Self::row(&self.query, at);
            let logit = |slot: &Slot| (dot(&slot.key, &query) / (DIM as f64).sqrt()).exp();
            let weights: Vec<f64> = slots.iter().map(logit).collect();
            let sum: f64 = weights.iter().sum();
            for (slot, weight) in slots.iter_mut().zip(weights) {
                slot.attention += weight / sum / self.group as f64;
            }
        }
    }
}

/// Compares what a head holds, in the order of positions.
fn same(context: &str, cache: &LayerCache, range: usize, expected: &[Slot]) {
    let positions = cache.read_positions().unwrap();
    let mut slots: Vec<usize> = cache.layout().live(range).collect();
    slots.sort_by_key(|&slot| positions[slot]);
    let actual: Vec<usize> = slots.iter().map(|&slot| positions[slot] as usize).collect();
    let wanted: Vec<usize> = expected.iter().map(|slot| slot.position).collect();
    assert_eq!(actual, wanted, "{context} head {range}");
    type Rows = fn(&Slot) -> &Vec<f64>;
    let of: [(&Tensor<2>, Rows); 2] =
        [(cache.keys(), |slot| &slot.key), (cache.values(), |slot| &slot.value)];
    for (pool, of) in of {
        let rows = read_f32("rows", pool.clone()).unwrap();
        let rows: Vec<f32> =
            slots.iter().flat_map(|&at| rows[at * DIM..][..DIM].to_vec()).collect();
        let expected: Vec<f64> = expected.iter().flat_map(|slot| of(slot).clone()).collect();
        let error = relative_error(&rows, &expected);
        assert!(error < 1e-5, "{context} head {range}: off by {error}");
    }
    let track = read_f32("attention", cache.track("attention").unwrap().clone()).unwrap();
    let track: Vec<f32> = slots.iter().map(|&slot| track[slot]).collect();
    let expected: Vec<f64> = expected.iter().map(|slot| slot.attention).collect();
    assert!(relative_error(&track, &expected) < 1e-5, "{context} head {range}: attention");
}

/// Prompts and steps beside a sweep with a searched `ε` in f64: thresholds that suffice and that do
/// not.
#[test]
fn sets_are_those_of_the_definition() {
    let (heads, group, tokens, prompt, budget) = (3, 2, 70, 45, 20);
    for tested in quick_exact_devices("sets_are_those_of_the_definition") {
        for (seed, threshold, interval, sized) in
            [(1, 0.75, 5, false), (2, -1.0, 1, false), (3, 0.9, 7, true), (4, 0.2, 64, true)]
        {
            let text = Text::new(seed, heads, group, tokens);
            let [q, k, v] = text.tensors(&tested.device);
            let kvmerger = policy(json!({
                "policy": "kvmerger", "budget": budget, "threshold": threshold,
                "interval": interval, "set_size": sized,
            }));
            let context = format!("{} threshold {threshold} every {interval}", tested.name);
            let part = |tensor: &Tensor<4>| tensor.clone().narrow(2, 0, prompt);
            let mut cache =
                Prompt::new(part(&q), part(&k), part(&v)).compress(&*kvmerger, tokens - prompt);
            let shrink = |slots: &[Slot]| merged(slots, budget, threshold, [0.25, 0.25], sized);
            let mut reference: Vec<Vec<Slot>> = Vec::new();
            for head in 0..heads {
                let mut slots = Vec::new();
                (0..prompt).for_each(|token| text.append(&mut slots, head, token));
                reference.push(shrink(&slots));
                same(&context, &cache, head, &reference[head]);
            }
            for token in prompt..tokens {
                let step = step(&q, &k, &v, token, token);
                kvmerger.step(LAYER, &mut cache, step).unwrap();
                for (head, slots) in reference.iter_mut().enumerate() {
                    text.append(slots, head, token);
                    if slots.len() >= budget + interval {
                        *slots = shrink(slots);
                    }
                    same(&context, &cache, head, slots);
                }
            }
        }
    }
}

fn compressed(config: Value, prompt: &Prompt) -> LayerCache {
    prompt.compress(&*policy(config), 4)
}

/// Identical tokens merge into the same; keys of zeros resemble nothing, and are dropped.
#[test]
fn identical_tokens_and_zero_keys() {
    for tested in quick_devices("kvmerger") {
        let mut numbers = Numbers::new(9);
        let mut draw = |count| numbers.tensor::<4>([2, 2, count, DIM], &tested.device);
        let (one, query) = (draw(1), draw(20));
        let config = json!({"policy": "kvmerger", "budget": 4});
        let prompt = Prompt::new(
            query.clone(),
            one.clone().repeat_dim(2, 20),
            one.clone().repeat_dim(2, 20),
        );
        let cache = compressed(config.clone(), &prompt);
        assert_eq!(cache.layout().lengths(), [4; 4], "{}", tested.name);
        let row = read_f32("row", one).unwrap();
        for pool in [cache.keys(), cache.values()] {
            let rows = read_f32("rows", pool.clone()).unwrap();
            for (range, row) in row.chunks(DIM).enumerate() {
                for slot in cache.layout().live(range) {
                    let error = relative_error(
                        &rows[slot * DIM..][..DIM],
                        &row.iter().map(|x| f64::from(*x)).collect::<Vec<_>>(),
                    );
                    assert!(error < 1e-6, "{}: {error}", tested.name);
                }
            }
        }
        let values = draw(20);
        let zeros = values.zeros_like();
        let cache = compressed(config, &Prompt::new(query, zeros, values.clone()));
        assert_eq!(cache.layout().lengths(), [4; 4], "{}", tested.name);
        let kept = read_f32("rows", cache.values().clone()).unwrap();
        let all = read_f32("values", values).unwrap();
        let positions = cache.read_positions().unwrap();
        for range in 0..4 {
            for slot in cache.layout().live(range) {
                let own = &all[(range * 20 + positions[slot] as usize) * DIM..][..DIM];
                assert_eq!(&kept[slot * DIM..][..DIM], own, "{}", tested.name);
            }
        }
    }
}

/// One slot takes everything that resembles its neighbours, at once or step by step.
#[test]
fn a_single_slot_is_left() {
    for tested in quick_devices("kvmerger") {
        let text = Text::new(11, 2, 1, 16);
        let [q, k, v] = text.tensors(&tested.device);
        let kvmerger = policy(json!({
            "policy": "kvmerger", "budget": 1, "threshold": -1.0, "interval": 1,
        }));
        let part = |tensor: &Tensor<4>| tensor.clone().narrow(2, 0, 12);
        let mut cache = Prompt::new(part(&q), part(&k), part(&v)).compress(&*kvmerger, 4);
        for token in 12..16 {
            assert_eq!(cache.layout().lengths(), [1; 2], "{}", tested.name);
            let sums = read_f32("sums", cache.track("attention").unwrap().clone()).unwrap();
            for range in 0..2 {
                let sum = sums[cache.layout().live(range).start];
                assert!((sum - token as f32).abs() < 1e-3, "{}: {sum}", tested.name);
            }
            let step = step(&q, &k, &v, token, token);
            let output = kvmerger.step(LAYER, &mut cache, step).unwrap();
            let output = read_f32("output", output).unwrap();
            assert!(output.iter().all(|x| x.is_finite()), "{}", tested.name);
        }
    }
}

/// Prompts of different lengths in one batch, one of them within the budget, go on as they would
/// alone.
#[test]
fn prompts_of_different_lengths_do_not_mix() {
    for tested in quick_devices("kvmerger") {
        let config = json!({"policy": "kvmerger", "budget": 10, "interval": 3});
        let kvmerger = policy(config);
        let texts = [Text::new(21, 2, 2, 30), Text::new(22, 2, 2, 18)];
        let prompts = [18, 6];
        let start = |at: usize| {
            let [q, k, v] = texts[at].tensors(&tested.device);
            let part = |tensor: Tensor<4>| tensor.narrow(2, 0, prompts[at]);
            Prompt::new(part(q), part(k), part(v)).compress(&*kvmerger, 12)
        };
        let mut both = LayerCache::concat(vec![start(0), start(1)]).unwrap();
        let mut alone = [start(0), start(1)];
        assert_eq!(both.layout().lengths(), [10, 10, 6, 6], "{}", tested.name);
        for index in 0..12 {
            let steps = [0, 1].map(|at| {
                let [q, k, v] = texts[at].tensors(&tested.device);
                [q, k, v].map(|tensor| tensor.narrow(2, prompts[at] + index, 1))
            });
            let positions = [0, 1].map(|at| (prompts[at] + index) as i32);
            let outputs = [0, 1].map(|at| {
                let [q, k, v] = &steps[at];
                let step = step(q, k, v, 0, positions[at] as usize);
                let output = kvmerger.step(LAYER, &mut alone[at], step).unwrap();
                read_f32("output", output).unwrap()
            });
            let joined = [0, 1, 2].map(|part: usize| {
                Tensor::cat(vec![steps[0][part].clone(), steps[1][part].clone()], 0)
            });
            let mut joint = step(&joined[0], &joined[1], &joined[2], 0, 0);
            joint.position = Tensor::from_data(positions.as_slice(), (&tested.device, DType::I32));
            let output = kvmerger.step(LAYER, &mut both, joint).unwrap();
            let expected: Vec<f64> = outputs.iter().flatten().map(|x| f64::from(*x)).collect();
            let error = relative_error(&read_f32("output", output).unwrap(), &expected);
            assert!(error < 1e-5, "{} step {index}: {error}", tested.name);
        }
        assert!(both.layout().lengths().iter().all(|&length| length < 13), "{}", tested.name);
    }
}

#[test]
fn options_out_of_range_are_refused() {
    for (option, value, told) in [
        ("budget", json!(0), "at least one token must be kept"),
        ("threshold", json!(1.5), "`threshold` is 1.5"),
        ("recent_share", json!(-0.1), "`recent_share`"),
        ("heavy_share", json!(0.8), "`heavy_share`"),
        ("interval", json!(0), "`interval` is 0"),
    ] {
        let mut config = json!({"policy": "kvmerger", "budget": 0.5});
        config[option] = value;
        let error = build(&config).map(|policy| policy.name()).unwrap_err().to_string();
        assert!(error.contains(told), "{option}: {error}");
    }
    let built: Arc<dyn Policy> = policy(json!({"policy": "kvmerger", "budget": 0.5}));
    assert_eq!(policy(built.config()).config(), built.config());
    let device = &devices()[0].device;
    let mut numbers = Numbers::new(1);
    let mut draw = || numbers.tensor([1, 1, 40, DIM], device);
    let prompt = Prompt::new(draw(), draw(), draw());
    let error = prompt.observed(|seen| {
        built.select(&Observation { column_sums: None, ..seen.clone() }).unwrap_err()
    });
    assert!(error.to_string().contains("column sums"), "{error}");
}
