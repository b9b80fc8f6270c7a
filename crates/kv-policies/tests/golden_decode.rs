//! Decode steps of the authors' own code, step by step.

use burn::tensor::{DType, Tensor};
use kv_core::{CacheOptions, LayerCache, SlotLayout, read_f32};
use kv_policies::Step;
use kv_testing::{exact_devices, golden_files, relative_error};
use serde_json::json;

use super::support::{LAYER, Prompt, kept, policy, step};

#[test]
fn golden_h2o_real_drop() {
    for golden in golden_files("golden_h2o_real_drop", "h2o_official_real_drop") {
        for tested in exact_devices("golden_decode") {
            let device = &tested.device;
            let [q, k, v] = ["q", "k", "v"].map(|name| golden.tensor(name).on::<4>(device));
            let tokens = golden.number("T") as usize;
            let prompt = |x: &Tensor<4>| x.clone().narrow(2, 0, tokens);
            let (heavy, recent) =
                (golden.number("hh_size") as usize, golden.number("recent_size") as usize);
            let h2o = policy(json!({
                "policy": "h2o", "budget": heavy + recent, "recents": recent,
            }));
            let steps = golden.number("steps") as usize;
            let mut cache = Prompt::new(prompt(&q), prompt(&k), prompt(&v)).compress(&*h2o, steps);
            let context = |index| format!("{} on {} step {index}", golden.name, tested.name);

            let heads = k.dims()[1];
            let expected = golden.tensor("prefill_kept").indices();
            for head in 0..heads {
                let expected = &expected[head * (heavy + recent)..][..heavy + recent];
                assert_eq!(kept(&cache, head), expected, "{}", context(0));
            }
            let (outs, sets) = (golden.tensor("step_out"), golden.tensor("step_kept"));
            let scores = golden.tensor("step_score_after");
            let width = outs.values.len() / steps;
            for index in 0..steps {
                let now = tokens + index;
                let output = h2o.step(LAYER, &mut cache, step(&q, &k, &v, now, now)).unwrap();
                let output = read_f32("output", output).unwrap();
                let error = relative_error(&output, &outs.values[index * width..][..width]);
                assert!(error < 1e-5, "{}: output off by {error}", context(index));
                let each = heavy + recent;
                for head in 0..heads {
                    let at = (index * heads + head) * each;
                    assert_eq!(
                        kept(&cache, head),
                        sets.indices()[at..][..each],
                        "{}",
                        context(index)
                    );
                    let expected = &scores.values[at..][..each];
                    let track = read_f32("track", cache.track("score").unwrap().clone()).unwrap();
                    let positions = cache.read_positions().unwrap();
                    let mut own: Vec<(i32, f32)> = cache
                        .layout()
                        .live(head)
                        .map(|slot| (positions[slot], track[slot]))
                        .collect();
                    own.sort_by_key(|(position, _)| *position);
                    let own: Vec<f32> = own.into_iter().map(|(_, score)| score).collect();
                    let error = relative_error(&own, expected);
                    assert!(error < 1e-5, "{}: scores off by {error}", context(index));
                }
            }
        }
    }
}

/// The authors' other form, for evaluation: it masks, and accumulates attention that dropped tokens
/// still take part in; tokens are dropped before attention. Driven through the cache's own track
/// and eviction.
#[test]
fn golden_h2o_local_mask() {
    for golden in golden_files("golden_h2o_local_mask", "h2o_official_local_mask") {
        for tested in exact_devices("golden_decode") {
            let device = &tested.device;
            let (logits, mask) = (golden.tensor("logits"), golden.tensor("mask"));
            let [_, heads, tokens, _] = logits.dims();
            let budget = golden.number("heavy_budget") as usize;
            let row = |head: usize, at: usize| -> Vec<f64> {
                let row = &logits.values[(head * tokens + at) * tokens..][..tokens];
                let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let exponentials: Vec<f64> = row.iter().map(|x| (x - max).exp()).collect();
                let sum: f64 = exponentials.iter().sum();
                exponentials.into_iter().map(|x| x / sum).collect()
            };
            let options = CacheOptions::new(device, DType::F32);
            let mut cache =
                LayerCache::new(SlotLayout::new(heads, vec![budget; heads]), 4, options);
            let zeros = Tensor::zeros([heads * budget], (device, DType::F32));
            cache.set_track("score", zeros, 0.0).unwrap();
            let add = |cache: &mut LayerCache, rows: std::ops::Range<usize>| {
                let positions = cache.read_positions().unwrap();
                let mut live = Vec::new();
                let track = read_f32("track", cache.track("score").unwrap().clone()).unwrap();
                for head in 0..heads {
                    let sums: Vec<Vec<f64>> = rows.clone().map(|at| row(head, at)).collect();
                    for slot in cache.layout().live(head) {
                        let added: f64 = sums.iter().map(|row| row[positions[slot] as usize]).sum();
                        live.push(track[slot] + added as f32);
                    }
                }
                cache.set_live_track("score", &live, 0.0).unwrap();
            };
            let append = |cache: &mut LayerCache, at: usize| {
                let rows = || Tensor::<3>::zeros([1, heads, 4], (device, DType::F32));
                let position = Tensor::full([1], at as i32, (device, DType::I32));
                cache.append(rows(), rows(), position).unwrap();
            };
            (0..budget).for_each(|at| append(&mut cache, at));
            add(&mut cache, 0..budget);
            for at in budget..tokens {
                let score = cache.track("score").unwrap().clone();
                let victims = cache.lowest_slots(score).unwrap();
                cache.evict_slots(victims, &vec![budget - 1; heads]).unwrap();
                append(&mut cache, at);
                for head in 0..heads {
                    let expected: Vec<u32> = (0..tokens as u32)
                        .filter(|&t| mask.values[(head * tokens + at) * tokens + t as usize] == 1.0)
                        .collect();
                    assert_eq!(kept(&cache, head), expected, "{} row {at}", golden.name);
                }
                add(&mut cache, at..at + 1);
            }
        }
    }
}

#[test]
fn golden_tova_official() {
    for golden in golden_files("golden_tova_official", "tova_official") {
        for tested in exact_devices("golden_decode") {
            let device = &tested.device;
            let [q, k, v] = ["q", "k", "v"].map(|name| golden.tensor(name).on::<4>(device));
            let (tokens, size) =
                (golden.number("T") as usize, golden.number("cache_size") as usize);
            let steps = golden.number("steps") as usize;
            let prompt = |x: &Tensor<4>| x.clone().narrow(2, 0, tokens);
            let tova = policy(json!({"policy": "tova", "budget": size}));
            // Their queries begin with the prompt's last one.
            let first = q.clone().narrow(2, 0, 1);
            let mut cache = Prompt::new(first, prompt(&k), prompt(&v)).compress(&*tova, steps);
            let sets = golden.tensor("kept");
            let [_, batch, _] = sets.dims();
            let heads = k.dims()[1];
            let check = |cache: &LayerCache, index: usize| {
                for range in 0..batch * heads {
                    let at = (index * batch + range / heads) * size;
                    let expected = &sets.indices()[at..][..size];
                    let context = format!("{} on {} step {index}", golden.name, tested.name);
                    assert_eq!(kept(cache, range), expected, "{context}");
                }
            };
            check(&cache, 0);
            for index in 0..steps {
                let now = tokens + index;
                let pick =
                    |tensor: &Tensor<4>, at| tensor.clone().narrow(2, at, 1).squeeze_dim::<3>(2);
                let position = Tensor::full([batch], now as i32, (&k.device(), DType::I32));
                let step = Step::new(pick(&q, index + 1), pick(&k, now), pick(&v, now), position);
                tova.step(LAYER, &mut cache, step).unwrap();
                check(&cache, index + 1);
            }
        }
    }
}

#[test]
fn golden_vatp_official() {
    for golden in golden_files("golden_vatp_official", "vatp_official") {
        for tested in exact_devices("golden_decode") {
            let device = &tested.device;
            let [q, k, v] = ["q", "k", "v"].map(|name| golden.tensor(name).on::<4>(device));
            let tokens = golden.number("T") as usize;
            let steps = golden.number("steps") as usize;
            let prompt = |x: &Tensor<4>| x.clone().narrow(2, 0, tokens);
            let (heavy, recent) =
                (golden.number("heavy_budget") as usize, golden.number("recent_budget") as usize);
            // Without values their code is H2O with sinks.
            let by_values = golden.parameter("applyval") == Some(json!(true));
            let mut config = json!({
                "policy": if by_values { "vatp" } else { "h2o" },
                "budget": heavy + recent,
                "recents": recent,
                "sinks": golden.number("sink_len") as usize,
            });
            if golden.parameter("h2o") == Some(json!(false)) {
                config["history"] = json!(400);
            }
            let vatp = policy(config);
            let mut cache = Prompt::new(prompt(&q), prompt(&k), prompt(&v)).compress(&*vatp, steps);
            let mask = golden.tensor("attn_mask_next");
            let [_, heads, width] = mask.dims();
            let outs = golden.tensor("step_out");
            let out_width = outs.values.len() / steps;
            for index in 0..=steps {
                // Their mask counts the incoming token too.
                for head in 0..heads {
                    let row = &mask.values[(index * heads + head) * width..][..width];
                    let expected: Vec<u32> =
                        (0..(tokens + index) as u32).filter(|&t| row[t as usize] == 1.0).collect();
                    let context = format!("{} on {} step {index}", golden.name, tested.name);
                    assert_eq!(kept(&cache, head), expected, "{context} head {head}");
                }
                if index < steps {
                    let now = tokens + index;
                    let output = vatp.step(LAYER, &mut cache, step(&q, &k, &v, now, now)).unwrap();
                    let output = read_f32("output", output).unwrap();
                    let expected = &outs.values[index * out_width..][..out_width];
                    let error = relative_error(&output, expected);
                    assert!(error < 1e-5, "{} step {index}: off by {error}", golden.name);
                }
            }
        }
    }
}
