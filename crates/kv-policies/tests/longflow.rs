//! LongFlow against its reference and its authors' loop, and its borders.

use burn::tensor::{DType, Tensor};
use kv_core::{CacheOptions, LayerCache, SlotLayout, read_f32, read_i32};
use kv_policies::{Certificate, PolicyError, Step, VictimChoice, WriteSlots, build, certify};
use kv_testing::{Numbers, devices, golden_files, quick_devices, relative_error};
use serde_json::{Value, json};

use super::followed::{Rule, Trace, follow};
use super::support::{LAYER, Prompt, kept, policy, step};

impl Trace {
    /// Consecutive queries are alike, as a model's are.
    fn random(batch: usize, tokens: usize, device: &burn::tensor::Device) -> Self {
        let mut numbers = Numbers::new(5);
        let (heads, kv_heads, dim) = (4, 2, 16);
        let fresh: Tensor<4> = numbers.tensor([batch, heads, tokens, dim], device);
        let base: Tensor<4> = numbers.tensor([batch, heads, 1, dim], device);
        Self {
            query: fresh + base.expand([batch, heads, tokens, dim]),
            keys: numbers.tensor([batch, kv_heads, tokens, dim], device),
            values: numbers.tensor([batch, kv_heads, tokens, dim], device),
        }
    }

    fn prompt(&self, tokens: usize) -> Prompt {
        let part = |tensor: &Tensor<4>| tensor.clone().narrow(2, 0, tokens);
        Prompt::new(part(&self.query), part(&self.keys), part(&self.values))
    }
}

#[test]
fn a_thousand_steps_give_up_the_slots_of_an_f64_reference() {
    for tested in quick_devices("longflow") {
        let trace = Trace::random(2, 1_070, &tested.device);
        // Fewer steps for our rules, as steps of software drivers take long.
        let short = Trace::random(2, 320, &tested.device);
        for layer in [true, false] {
            let plain = Rule { layer, ..Rule::default() };
            let remembering = Rule { memory: Some(0.99), ..plain };
            let ties = Rule { ties: Some(4.0), ..plain };
            for (rule, trace) in [(plain, &trace), (remembering, &short), (ties, &short)] {
                let context = format!("{} {rule:?}", tested.name);
                let near = follow(trace, 70, 48, rule, &context);
                assert!(near <= 4, "{context}: {near} near-ties");
            }
        }
    }
}

/// Prompts one under, at and one over the budget, and a budget of one slot.
#[test]
fn budgets_around_the_prompt() {
    for tested in quick_devices("longflow") {
        let trace = Trace::random(1, 60, &tested.device);
        for (prompt, budget) in [(40, 41), (40, 40), (40, 39), (40, 50), (40, 1), (1, 1), (1, 2)] {
            for layer in [true, false] {
                for memory in [None, Some(0.9)] {
                    let rule = Rule { layer, memory, ..Rule::default() };
                    follow(
                        &trace,
                        prompt,
                        budget,
                        rule,
                        &format!("{prompt} under {budget}, {rule:?}"),
                    );
                }
            }
        }
    }
}

/// Sequences that are batched fill up at steps of their own, and do what each does alone.
#[test]
fn rows_fill_at_different_steps() {
    for tested in quick_devices("longflow") {
        let device = &tested.device;
        let policy = policy(json!({"policy": "longflow", "budget": 48}));
        let trace = Trace::random(2, 80, device);
        let row = |tensor: &Tensor<4>, row: usize| tensor.clone().narrow(0, row, 1);
        let alone = |index: usize, prompt: usize| {
            let part = |x: &Tensor<4>| row(x, index).narrow(2, 0, prompt);
            let prompt = Prompt::new(part(&trace.query), part(&trace.keys), part(&trace.values));
            prompt.compress(&*policy, 40)
        };
        let starts = [40, 20];
        let step_of = |sequence: usize, at: usize| {
            let part = |x: &Tensor<4>| row(x, sequence);
            let (q, k, v) = (part(&trace.query), part(&trace.keys), part(&trace.values));
            step(&q, &k, &v, at, at)
        };
        let mut expected = Vec::new();
        for (sequence, start) in starts.into_iter().enumerate() {
            let mut cache = alone(sequence, start);
            for at in start..start + 40 {
                let step = step_of(sequence, at);
                let output = policy.step(LAYER, &mut cache, step).unwrap();
                expected.push(read_f32("output", output).unwrap());
            }
        }
        let mut both = LayerCache::concat(vec![alone(0, 40), alone(1, 20)]).unwrap();
        for index in 0..40 {
            // The two rows' steps as one batch.
            let steps = [step_of(0, 40 + index), step_of(1, 20 + index)];
            let step = joined(steps);
            let output = read_f32("output", policy.step(LAYER, &mut both, step).unwrap()).unwrap();
            let (first, second) = output.split_at(output.len() / 2);
            assert_eq!(first, expected[index], "{} row 0 step {index}", tested.name);
            assert_eq!(second, expected[40 + index], "{} row 1 step {index}", tested.name);
        }
        assert_eq!(both.layout().lengths(), [48; 4]);
    }
}

fn joined([a, b]: [Step; 2]) -> Step {
    use kv_policies::Qkv::Rotated;
    let cat = |a: &Tensor<3>, b: &Tensor<3>| Tensor::cat(vec![a.clone(), b.clone()], 0);
    let (Rotated { query, key, value, .. }, Rotated { query: q, key: k, value: v, .. }) =
        (&a.heads, &b.heads)
    else {
        unreachable!("steps of rotated heads");
    };
    let position = Tensor::cat(vec![a.position.clone(), b.position.clone()], 0);
    Step::new(cat(query, q), cat(key, k), cat(value, v), position)
}

#[test]
fn sinks_and_recents_stay() {
    for tested in quick_devices("longflow") {
        let config = json!({"policy": "longflow", "budget": 32, "sinks": 3, "recents": 10});
        let policy = policy(config);
        let trace = Trace::random(1, 100, &tested.device);
        let mut cache = trace.prompt(40).compress(&*policy, 60);
        for token in 40..100 {
            let step = step(&trace.query, &trace.keys, &trace.values, token, token);
            policy.step(LAYER, &mut cache, step).unwrap();
            for range in 0..2 {
                let kept = kept(&cache, range);
                let protected = (0..3).chain(token as u32 - 9..=token as u32);
                assert!(protected.into_iter().all(|t| kept.contains(&t)), "{}", tested.name);
            }
        }
    }
}

/// The authors' loop: one slot a layer, the newest token among the candidates.
#[test]
fn golden_longflow_decode_loop() {
    for golden in golden_files("golden_longflow_decode_loop", "longflow_decode_loop") {
        for tested in devices() {
            let device = &tested.device;
            let config =
                json!({"policy": "longflow", "budget": 65, "scope": "layer", "evict_newest": true});
            let policy = policy(config);
            let [keys, values] =
                ["init_keys", "init_values"].map(|name| golden.tensor(name).on::<4>(device));
            let [batch, kv_heads, budget, dim] = keys.dims();
            let filled = budget - 1;
            assert_eq!(golden.tensor("init_update_idx").indices(), vec![filled as u32; batch]);
            let layout = SlotLayout::new(kv_heads, vec![budget; batch * kv_heads]);
            let mut cache = LayerCache::new(layout, dim, CacheOptions::new(device, DType::F32));
            let first = |tensor: Tensor<4>| tensor.narrow(2, 0, filled);
            let positions = Tensor::zeros([batch, filled], (device, DType::I32));
            cache.extend(first(keys), first(values), positions).unwrap();
            cache.set_limits(vec![budget; batch * kv_heads]).unwrap();
            WriteSlots::enable(&mut cache).unwrap();
            let [q, k, v] =
                ["step_q", "step_k", "step_v"].map(|name| golden.tensor(name).on::<4>(device));
            let at = |tensor: &Tensor<4>, index| tensor.clone().narrow(0, index, 1).squeeze_dim(0);
            let now = Tensor::zeros([batch], (device, DType::I32));
            let choice = VictimChoice::default();
            WriteSlots::attend_and_choose_victim(&mut cache, at(&q, 0), &now, choice).unwrap();
            let written = golden.tensor("step_write_slot").indices();
            let evicted = golden.tensor("step_evict_idx").indices();
            let outputs = golden.tensor("step_out");
            let width = outputs.values.len() / q.dims()[0];
            let places = |cache: &LayerCache| -> Vec<u32> {
                let places = read_i32("places", WriteSlots::next(cache).unwrap().clone()).unwrap();
                places.chunks(kv_heads).map(|heads| heads[0] as u32).collect()
            };
            for index in 0..q.dims()[0] {
                let context = format!("{} on {} step {index}", golden.name, tested.name);
                assert_eq!(places(&cache), written[index * batch..][..batch], "{context}");
                let position = Tensor::full([batch], 64 + index as i32, (device, DType::I32));
                let step = Step::new(at(&q, index), at(&k, index), at(&v, index), position);
                let output = policy.step(LAYER, &mut cache, step).unwrap();
                let output = read_f32("output", output).unwrap();
                let error = relative_error(&output, &outputs.values[index * width..][..width]);
                assert!(error < 1e-5, "{context}: output off by {error}");
                assert_eq!(places(&cache), evicted[index * batch..][..batch], "{context}");
            }
            let keys = read_f32("keys", cache.keys().clone()).unwrap();
            let error = relative_error(&keys, &golden.tensor("final_keys").values);
            assert!(error < 1e-6, "{}: keys off by {error}", golden.name);
        }
    }
}

/// Every bound of section 3.3 holds, at every step and head.
#[test]
fn certificates_bound_what_they_say() {
    let tested = devices().remove(0);
    let policy = policy(json!({"policy": "longflow", "budget": 24}));
    let trace = Trace::random(2, 80, &tested.device);
    let mut cache = trace.prompt(40).compress(&*policy, 40);
    let query = |token: usize| trace.query.clone().narrow(2, token, 1).squeeze_dim::<3>(2);
    let mut seen = 0;
    for token in 40..80 {
        for certificate in certify(&cache, &query(token - 1), &query(token)).unwrap() {
            let Certificate {
                eviction_residual,
                eviction_residual_bound,
                logit_change,
                logit_change_bound,
                ..
            } = certificate;
            assert!(
                eviction_residual <= eviction_residual_bound && eviction_residual > 0.0,
                "{certificate:?}"
            );
            assert!(logit_change <= logit_change_bound && logit_change > 0.0, "{certificate:?}");
            assert!(certificate.error <= certificate.error_bound, "{certificate:?}");
            seen += 1;
        }
        let expected = certified(&cache, &query(token - 1), &query(token));
        let actual = certify(&cache, &query(token - 1), &query(token)).unwrap();
        assert_eq!(actual.len(), expected.len());
        for (actual, expected) in actual.iter().zip(&expected) {
            let Certificate {
                eviction_residual,
                eviction_residual_bound,
                logit_change,
                logit_change_bound,
                ..
            } = *actual;
            let Certificate { error, error_bound, .. } = *actual;
            let own = [
                eviction_residual,
                eviction_residual_bound,
                logit_change,
                logit_change_bound,
                error,
                error_bound,
            ];
            for (own, expected) in own.iter().zip(expected) {
                let off = (own - expected).abs();
                assert!(off < 1e-9 * (1.0 + expected.abs()), "{actual:?} for {expected:?}");
            }
        }
        // The same query again: nothing drifts.
        for certificate in certify(&cache, &query(token), &query(token)).unwrap() {
            assert_eq!((certificate.logit_change, certificate.logit_change_bound), (0.0, 0.0));
        }
        let step = step(&trace.query, &trace.keys, &trace.values, token, token);
        policy.step(LAYER, &mut cache, step).unwrap();
    }
    assert_eq!(seen, 40 * 2 * 4);
}

/// Section 3.3 in sums over single slots: of every query head the eviction's residual, the change
/// of logits and the error, each with its bound.
fn certified(cache: &LayerCache, before: &Tensor<3>, after: &Tensor<3>) -> Vec<[f64; 6]> {
    let read = |values: Vec<f32>| values.into_iter().map(f64::from).collect::<Vec<f64>>();
    let [keys, values] = [cache.keys(), cache.values()]
        .map(|pool| read(read_f32("pool", pool.clone().reshape([-1])).unwrap()));
    let [before, after] =
        [before, after].map(|query| read(read_f32("query", query.clone().reshape([-1])).unwrap()));
    let places = read_i32("places", WriteSlots::next(cache).unwrap().clone()).unwrap();
    let dim = cache.head_dim();
    let group = before.len() / dim / places.len();
    let norm = |row: &[f64]| row.iter().map(|x| x * x).sum::<f64>().sqrt();
    let mut all = Vec::new();
    for (range, place) in places.iter().enumerate() {
        let live: Vec<usize> = cache.layout().live(range).collect();
        let victim = live[*place as usize];
        for g in 0..group {
            let at = (range * group + g) * dim;
            let (q, next) = (&before[at..at + dim], &after[at..at + dim]);
            let logit = |query: &[f64], slot: usize| {
                let products = query.iter().zip(&keys[slot * dim..][..dim]).map(|(q, k)| q * k);
                products.sum::<f64>() / (dim as f64).sqrt()
            };
            // Small enough to need no maximum.
            let sum = |query: &[f64], of: &dyn Fn(usize) -> bool| -> f64 {
                live.iter().filter(|slot| of(**slot)).map(|slot| logit(query, *slot).exp()).sum()
            };
            let share = |query: &[f64]| logit(query, victim).exp() / sum(query, &|_| true);
            let output = |column: usize, of: &dyn Fn(usize) -> bool| {
                let own = live.iter().filter(|slot| of(**slot));
                let weighted =
                    own.map(|slot| logit(next, *slot).exp() * values[slot * dim + column]);
                weighted.sum::<f64>() / sum(next, of)
            };
            let others = |slot: usize| slot != victim;
            let change: Vec<f64> =
                (0..dim).map(|c| output(c, &|_| true) - output(c, &others)).collect();
            // Equation 12: what is left of the change is alpha / (1 - alpha) (o - alpha v), scaled
            // by what was left.
            let left: Vec<f64> =
                (0..dim).map(|c| change[c] - share(next) * values[victim * dim + c]).collect();
            let rows = |pool: &[f64]| {
                live.iter().map(|slot| norm(&pool[slot * dim..][..dim])).fold(0.0, f64::max)
            };
            let bound = 2.0 * rows(&values) * share(next) / (1.0 - share(next));
            let apart: Vec<f64> = q.iter().zip(next).map(|(a, b)| a - b).collect();
            let moved = live.iter().map(|slot| (logit(q, *slot) - logit(next, *slot)).abs());
            let logit_change_bound = norm(&apart) * rows(&keys) / (dim as f64).sqrt();
            let size = norm(&values[victim * dim..][..dim]);
            let m = logit_change_bound.min(1.0);
            let error_bound =
                bound * (bound + 2.0 * share(next) * size) + m * (2.0 * share(q) + m) * size * size;
            let error = (norm(&change).powi(2) - (share(q) * size).powi(2)).abs();
            all.push([
                norm(&left),
                bound,
                moved.fold(0.0, f64::max),
                logit_change_bound,
                error,
                error_bound,
            ]);
        }
    }
    all
}

/// The eviction's residual is the share times the output of the other slots. Where all other values
/// agree, it is as much as it can be: half of its bound.
#[test]
fn the_bound_of_the_residual_is_near() {
    let device = &devices().remove(0).device;
    let policy = policy(json!({"policy": "longflow", "budget": 24}));
    let mut numbers = Numbers::new(8);
    let (mut keys, query) = (numbers.normal(24 * 8), numbers.normal(24 * 8));
    // The fifth key is the last query's opposite, so that its slot goes.
    for column in 0..8 {
        keys[5 * 8 + column] = -query[23 * 8 + column];
    }
    let values: Vec<f32> = (0..24 * 8).map(|at| if at / 8 == 5 { 1.0 } else { -1.0 }).collect();
    let tensor = |values: &[f32]| {
        Tensor::<1>::from_data(values, (device, DType::F32)).reshape([1, 1, 24, 8])
    };
    let prompt = Prompt::new(tensor(&query), tensor(&keys), tensor(&values));
    let cache = prompt.compress(&*policy, 4);
    assert_eq!(read_i32("places", WriteSlots::next(&cache).unwrap().clone()).unwrap(), [5]);
    let last = tensor(&query).narrow(2, 23, 1).squeeze_dim::<3>(2);
    let certificate = certify(&cache, &last, &last).unwrap()[0];
    let Certificate { eviction_residual, eviction_residual_bound, .. } = certificate;
    let half = eviction_residual / eviction_residual_bound;
    assert!(half > 0.45 && half < 0.5, "{certificate:?}");
}

/// Heads that overwrite together must hold the same tokens.
#[test]
fn heads_that_overwrite_together_hold_the_same() {
    let device = &devices().remove(0).device;
    let trace = Trace::random(2, 80, device);
    let decode = json!({"policy": "longflow", "budget": 24, "scope": "layer"});
    let cache = trace.prompt(40).compress(&*policy(decode.clone()), 40);
    let heads: Vec<Vec<u32>> =
        (0..cache.layout().head_ranges()).map(|range| kept(&cache, range)).collect();
    assert!(heads.chunks(2).all(|heads| heads[0] == heads[1]), "{heads:?}");
    let combined = policy(json!({
        "policy": "combine", "decode": decode,
        "prefill": {"policy": "snapkv", "budget": 24, "window": 4},
    }));
    let options = CacheOptions::new(device, DType::F32);
    let prompt = trace.prompt(40);
    let error = prompt.observed(|seen| combined.prefill(seen, 4, options)).unwrap_err();
    assert!(error.to_string().contains("heads keep different tokens"), "{error}");
}

#[test]
fn protected_slots_must_leave_one() {
    let refused = |config: Value| match build(&config).unwrap_err() {
        PolicyError::InvalidConfig { reason, .. } => reason,
        error => panic!("{config}: {error}"),
    };
    let config = |sinks: usize, recents: usize, budget: usize| json!({"policy": "longflow", "budget": budget, "sinks": sinks, "recents": recents});
    let reason = refused(config(4, 4, 8));
    assert!(reason.contains("4 sinks, 4 recents") && reason.contains("none of 8"), "{reason}");
    refused(config(1, 0, 1));
    refused(config(1, 0, 2));
    build(&config(0, 0, 1)).unwrap();
    build(&config(1, 0, 3)).unwrap();
    let newest = json!({"policy": "longflow", "budget": 2, "sinks": 1, "evict_newest": true});
    build(&newest).unwrap();
    let reason =
        refused(json!({"policy": "longflow", "budget": 64, "sinks": 64, "evict_newest": true}));
    assert!(!reason.contains("newest"), "{reason}");
    // A share of a prompt shows only when the prompt does.
    let shared = json!({"policy": "longflow", "budget": 0.1, "sinks": 3, "recents": 3});
    let policy = policy(shared);
    let tested = devices().remove(0);
    let prompt = Trace::random(1, 60, &tested.device).prompt(60);
    // Both ends take all of its 6 slots: they are cut, and steps overwrite the newest token.
    let mut cache = prompt.compress(&*policy, 4);
    assert_eq!(kept(&cache, 0), [0, 1, 2, 57, 58, 59]);
    let Trace { query, keys, values } = Trace::random(1, 4, &tested.device);
    for index in 0..4 {
        let step = step(&query, &keys, &values, index, 60 + index);
        policy.step(LAYER, &mut cache, step).unwrap();
    }
    assert_eq!(cache.layout().lengths()[0], 6);
    assert!((0..3).all(|token| kept(&cache, 0).contains(&token)));
}

/// Around LongFlow, KeepKV's steps remember importances, too: a memory that forgets at once drops
/// the tokens that no memory drops, and a long one drops others.
#[test]
fn a_policy_around_it_remembers() {
    for tested in quick_devices("longflow") {
        let trace = Trace::random(2, 90, &tested.device);
        let kept_with = |memory: Option<f64>| {
            let longflow = json!({"policy": "longflow", "budget": 24, "memory": memory});
            let around = policy(json!({
                "policy": "keepkv", "evictor": longflow, "threshold": 1.0, "order": "evict-first",
            }));
            let mut cache = trace.prompt(40).compress(&*around, 50);
            for token in 40..90 {
                let step = step(&trace.query, &trace.keys, &trace.values, token, token);
                around.step(LAYER, &mut cache, step).unwrap();
            }
            (0..4).map(|range| kept(&cache, range)).collect::<Vec<_>>()
        };
        let plain = kept_with(None);
        assert_eq!(kept_with(Some(1e-9)), plain, "{}", tested.name);
        assert_ne!(kept_with(Some(0.99)), plain, "{}", tested.name);
    }
}

#[test]
fn memories_and_ties_are_checked() {
    let refused = |config: Value| build(&config).unwrap_err().to_string();
    for memory in [0.0, -0.5, 1.01] {
        let error = refused(json!({"policy": "longflow", "budget": 8, "memory": memory}));
        assert!(error.contains("memory") && error.contains(&memory.to_string()), "{error}");
    }
    for ties in [1.0, 0.0] {
        let error = refused(json!({"policy": "longflow", "budget": 8, "ties": ties}));
        assert!(error.contains("ties") && error.contains("above 1"), "{error}");
    }
    let ties = json!({"policy": "longflow", "budget": 8, "ties": 4.0});
    build(&ties).unwrap();
    let error = refused(json!({"policy": "keepkv", "evictor": ties}));
    assert!(error.contains("without `ties`"), "{error}");
}
