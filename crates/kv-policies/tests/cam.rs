use std::sync::Arc;

use burn::tensor::{DType, Tensor};
use kv_core::{CacheOptions, LayerCache, Room, Selection, read_f32};
use kv_policies::{Cam, CamAttention, CamOptions, Candidates, Observation, Policy, build};
use kv_testing::{
    Numbers, exact_devices, golden_files, quick_devices, quick_exact_devices, relative_error,
};
use serde_json::json;

use super::support::{Given, LAYER, Prompt, policy, step};

/// What a head's slots hold, in the order of positions: positions, and rows of `pool`.
fn ordered(cache: &LayerCache, pool: &Tensor<2>, range: usize) -> (Vec<i32>, Vec<f32>) {
    let positions = cache.read_positions().unwrap();
    let rows = read_f32("rows", pool.clone()).unwrap();
    let width = pool.dims()[1];
    let mut slots: Vec<usize> = cache.layout().live(range).collect();
    slots.sort_by_key(|&slot| positions[slot]);
    let rows = slots.iter().flat_map(|&slot| rows[slot * width..][..width].to_vec()).collect();
    (slots.iter().map(|&slot| positions[slot]).collect(), rows)
}

/// kvpress's prompts: victims that rank highest, many at once.
#[test]
fn golden_kvpress_prompts() {
    const TEST: &str = "golden_kvpress_prompts";
    for golden in golden_files(TEST, "kvpress_cam") {
        let suffix = &golden.name["kvpress_cam".len()..];
        let inputs = golden_files(TEST, &format!("kvpress_inputs{suffix}")).remove(0);
        let cases = (0..).take_while(|case| golden.find(&format!("case{case}.params")).is_some());
        for (case, tested) in
            cases.flat_map(|case| exact_devices(TEST).into_iter().map(move |tested| (case, tested)))
        {
            let part = |name: &str| golden.tensor(&format!("case{case}.{name}"));
            let on = |name: &str| inputs.tensor(name).on::<4>(&tested.device);
            let prompt = Prompt::new(on("k"), on("k"), on("v"));
            let [batch, heads, tokens, _] = prompt.keys.dims();
            let &[_, candidates, spread] = part("params").indices().as_slice() else { panic!() };
            let kept = part("kept_sorted");
            let width = kept.shape[1];
            let rows = kept.indices();
            let rows = rows.chunks(width).flat_map(|row| vec![row.to_vec(); heads]);
            let rows: Vec<Vec<u32>> = rows.collect();
            let scores = part("mean_score").f32();
            let scores = scores.chunks(tokens).flat_map(|row| row.repeat(heads)).collect();
            let given = Given { scores, ..Given::new(rows.clone(), width) };
            let options = CamOptions {
                spread: spread as usize,
                candidates: Candidates::Most(candidates as usize),
                attention: CamAttention::Accumulated,
                ..Default::default()
            };
            let cam = Cam::new(Arc::new(given), options).unwrap();
            // Their numbers are those of the candidates, in the order of positions.
            let scores = part("mean_score").f32();
            let uniforms = part("uniform").f32();
            let uniform = |range: usize, token: usize| {
                let scores = &scores[range / heads * tokens..][..tokens];
                let gone = (0..tokens).filter(|&at| !rows[range].contains(&(at as u32)));
                let mut gone: Vec<usize> = gone.collect();
                gone.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]).then(b.cmp(&a)));
                gone.truncate(candidates as usize);
                gone.sort_unstable();
                let place = gone.iter().position(|&at| at == token);
                place.map_or(0.0, |place| uniforms[range * candidates as usize + place])
            };
            let sums = part("cum_attn").on::<3>(&tested.device);
            let cache = prompt.observed(|seen| {
                let seen = Observation { column_sums: Some(sums), ..seen.clone() };
                let selection = Selection::new(rows.clone()).unwrap();
                let (keys, values, positions) = (seen.keys, seen.values, seen.positions);
                let options = CacheOptions::new(&tested.device, DType::F32);
                let room = Room::Extra(0);
                let mut cache =
                    LayerCache::from_prefill(keys, values, positions, &selection, room, options)
                        .unwrap();
                cam.init_cache_with(&mut cache, &seen, &selection, uniform).unwrap();
                cache
            });
            // Their file holds the first sequence.
            assert_eq!(cache.layout().batch(), batch);
            let values = (0..heads).flat_map(|head| ordered(&cache, cache.values(), head).1);
            let values: Vec<f32> = values.collect();
            let error = relative_error(&values, &part("values").values);
            assert!(error < 1e-6, "{} case {case} on {}: {error}", golden.name, tested.name);
        }
    }
}

/// The authors' step around H2O, for attention as it is given.
#[test]
fn golden_official_step() {
    const TEST: &str = "golden_official_step";
    for golden in golden_files(TEST, "cam_official_step") {
        for tested in exact_devices(TEST) {
            let device = &tested.device;
            let (attention, values) = (golden.tensor("attn").f32(), golden.tensor("v"));
            let [_, heads, tokens, dim] = values.dims();
            // The victim is the oldest here: what is before it takes no part.
            let first = golden.number("evicted_index") as usize;
            let count = tokens - first;
            // Keys along the first axis, so that the logits are the attention's logarithms.
            let mut keys = Vec::new();
            for head in 0..heads {
                for token in first..tokens {
                    keys.push(attention[head * tokens + token].ln() * (dim as f32).sqrt());
                    keys.resize(keys.len() + dim - 1, 0.0);
                }
            }
            let keys = Tensor::<1>::from_data(keys.as_slice(), (device, DType::F32));
            let keys = keys.reshape([1, heads, count, dim]);
            let values = values.on::<4>(device).narrow(2, first, count);
            let mut query = vec![0.0f32; dim];
            query[0] = 1.0;
            let query = Tensor::<1>::from_data(query.as_slice(), (device, DType::F32));
            let query = query.reshape([1, 1, 1, dim]).repeat_dim(1, heads).repeat_dim(2, count);
            let part = |tensor: &Tensor<4>| tensor.clone().narrow(2, 0, count - 1);
            let prompt = Prompt::new(part(&query), part(&keys), part(&values));
            let all = (0..count as u32 - 1).collect();
            let given = Given::new(vec![all; heads], count - 1);
            let options = CamOptions {
                spread: golden.number("merge_budget") as usize,
                attention: CamAttention::Step,
                official: true,
                ..Default::default()
            };
            let cam = Cam::new(Arc::new(given), options).unwrap();
            let mut cache = prompt.compress(&cam, 1);
            let uniforms = golden.tensor("uniform").on::<1>(device).reshape([1, heads]);
            let step = step(&query, &keys, &values, count - 1, count - 1);
            cam.step_with(LAYER, &mut cache, &step, uniforms).unwrap();
            let expected = golden.tensor("v_out").values;
            for head in 0..heads {
                let (positions, values) = ordered(&cache, cache.values(), head);
                assert_eq!(positions, (1..count as i32).collect::<Vec<_>>(), "{}", tested.name);
                let expected =
                    &expected[(head * tokens + first + 1) * dim..(head + 1) * tokens * dim];
                let error = relative_error(&values, expected);
                assert!(error < 1e-6, "{} head {head}: {error}", tested.name);
            }
        }
    }
}

/// The authors' form around StreamingLLM, token by token from the first one on.
#[test]
fn golden_official_streaming() {
    const TEST: &str = "golden_official_streaming";
    for golden in golden_files(TEST, "cam_official_streaming") {
        for tested in exact_devices(TEST) {
            let [q, k, v] = ["q", "k", "v"].map(|name| golden.tensor(name).on::<4>(&tested.device));
            let number = |name: &str| golden.number(name) as usize;
            let (sinks, recents) = (number("start_size"), number("recent_size"));
            let (steps, budget) = (number("steps_total"), sinks + recents);
            let heads = k.dims()[1];
            let streaming = build(&json!({
                "policy": "streaming-llm", "budget": budget, "sinks": sinks, "recents": recents,
            }));
            let attention = CamAttention::Accumulated;
            let spread = number("merge_num");
            let options = CamOptions { spread, attention, ..Default::default() };
            let cam = Cam::new(streaming.unwrap(), options).unwrap();
            let first = |tensor: &Tensor<4>| tensor.clone().narrow(2, 0, 1);
            let mut cache = Prompt::new(first(&q), first(&k), first(&v)).compress(&cam, steps);
            let (outs, uniforms) = (golden.tensor("step_out"), golden.tensor("uniform"));
            let width = outs.values.len() / steps;
            for index in 1..steps {
                // Evictions begin when the cache is full.
                let uniform = uniforms.on::<4>(&tested.device).reshape([uniforms.shape[0], heads]);
                let uniform = uniform.narrow(0, index.saturating_sub(budget), 1);
                let step = step(&q, &k, &v, index, index);
                let output = cam.step_with(LAYER, &mut cache, &step, uniform).unwrap();
                let output = read_f32("output", output).unwrap();
                let error = relative_error(&output, &outs.values[index * width..][..width]);
                assert!(error < 1e-5, "{} step {index}: off by {error}", tested.name);
            }
            let tracked = cache.track("attention").unwrap().clone().unsqueeze_dim::<2>(1);
            for (name, pool) in [
                ("final_k", cache.keys()),
                ("final_v", cache.values()),
                ("final_accum_attn", &tracked),
            ] {
                let expected = golden.tensor(name).values;
                let rows = (0..heads).flat_map(|head| ordered(&cache, pool, head).1);
                let error = relative_error(&rows.collect::<Vec<f32>>(), &expected);
                assert!(error < 1e-5, "{}: {name} off by {error}", tested.name);
            }
        }
    }
}

#[test]
fn options_out_of_range_are_refused() {
    for (option, value, told) in [
        ("spread", json!(0), "`spread` is 0"),
        ("candidates", json!("some"), "`candidates` is neither"),
        ("attention", json!("none"), "unknown variant `none`, expected `accumulated` or `step`"),
        ("evictor", json!("full"), "`evictor` is `full`"),
    ] {
        let mut config = json!({"policy": "cam", "budget": 0.5});
        config[option] = value;
        let error = build(&config).map(|policy| policy.name()).unwrap_err().to_string();
        assert!(error.contains(told), "{option}: {error}");
    }
    for candidates in [json!(9), json!(0), json!("all")] {
        let config =
            json!({"policy": "cam", "budget": 0.5, "evictor": "snapkv", "candidates": candidates});
        let built = policy(config);
        assert_eq!(built.config()["candidates"], candidates);
        assert_eq!(policy(built.config()).config(), built.config());
    }
}

/// The authors' generation code keeps sinks and recents, and leaves a prompt's values as they are.
#[test]
fn by_default_prompts_are_those_of_streaming_llm() {
    for tested in quick_devices("cam") {
        let mut numbers = Numbers::new(4);
        let mut draw = |heads: usize| numbers.tensor::<4>([2, heads, 60, 16], &tested.device);
        let prompt = Prompt::new(draw(4), draw(2), draw(2));
        let [cam, streaming] = ["cam", "streaming-llm"].map(|name| {
            let cache = prompt.compress(&*policy(json!({"policy": name, "budget": 20})), 4);
            (0..4).map(|range| ordered(&cache, cache.values(), range)).collect::<Vec<_>>()
        });
        assert_eq!(cam, streaming, "{}", tested.name);
        let all = json!({"policy": "cam", "budget": 20, "candidates": "all"});
        let cache = prompt.compress(&*policy(all), 4);
        assert_ne!(ordered(&cache, cache.values(), 0), cam[0], "{}", tested.name);
    }
}

/// One head in f64: tokens in the order of their positions.
struct Head {
    rows: Vec<Row>,
    spread: usize,
    limit: usize,
}

struct Row {
    position: usize,
    key: Vec<f64>,
    value: Vec<f64>,
    attention: f64,
}

impl Head {
    /// Appends, attends with a group of queries and drops the token of least attention but for the
    /// last `recents`, spreading its value.
    fn step(&mut self, queries: &[Vec<f64>], row: Row, recents: usize, uniform: f64) {
        self.rows.push(row);
        for query in queries {
            let scale = (query.len() as f64).sqrt();
            let dot =
                |row: &Row| row.key.iter().zip(query).map(|(k, q)| k * q).sum::<f64>() / scale;
            let weights: Vec<f64> = self.rows.iter().map(|row| dot(row).exp()).collect();
            let sum: f64 = weights.iter().sum();
            for (row, weight) in self.rows.iter_mut().zip(weights) {
                row.attention += weight / sum / queries.len() as f64;
            }
        }
        if self.rows.len() <= self.limit {
            return;
        }
        let old = self.rows.len() - recents;
        let attention = |at: &usize| self.rows[*at].attention;
        let victim = (0..old).min_by(|a, b| attention(a).total_cmp(&attention(b))).unwrap();
        let gone = self.rows.remove(victim);
        let last = self.rows.len().min(victim + self.spread);
        let next = &mut self.rows[victim..last];
        let count = next.len() as f64;
        let mean = next.iter().map(|row| row.attention).sum::<f64>() / count;
        if uniform < (gone.attention / mean).clamp(0.0, 1.0) {
            for row in next {
                row.value
                    .iter_mut()
                    .zip(&gone.value)
                    .for_each(|(own, value)| *own += value / count);
            }
        }
    }
}

/// Steps around H2O beside plain loops in f64, groups of query heads and short prompts included.
#[test]
fn steps_spread_what_h2o_evicts() {
    const TEST: &str = "steps_spread_what_h2o_evicts";
    let (batch, heads, group, dim, tokens, steps, limit, recents) = (2, 2, 3, 8, 9, 30, 12, 4);
    for tested in quick_exact_devices(TEST) {
        for spread in [1, 3, 32] {
            let mut numbers = Numbers::new(spread);
            let mut draw = |heads: usize, count: usize| {
                let values = numbers.normal(batch * heads * count * dim);
                let tensor =
                    Tensor::<1>::from_data(values.as_slice(), (&tested.device, DType::F32));
                (tensor.reshape([batch, heads, count, dim]), values)
            };
            let (q, queries) = draw(heads * group, tokens + steps);
            let (k, keys) = draw(heads, tokens + steps);
            let (v, values) = draw(heads, tokens + steps);
            let row = |of: &[f32], head: usize, token: usize| -> Vec<f64> {
                let at = (head * (tokens + steps) + token) * dim;
                of[at..at + dim].iter().map(|x| f64::from(*x)).collect()
            };
            let h2o = build(&json!({"policy": "h2o", "budget": limit, "recents": recents}));
            let attention = CamAttention::Accumulated;
            let options = CamOptions { spread: spread as usize, attention, ..Default::default() };
            let cam = Cam::new(h2o.unwrap(), options).unwrap();
            let part = |tensor: &Tensor<4>| tensor.clone().narrow(2, 0, tokens);
            let mut cache = Prompt::new(part(&q), part(&k), part(&v)).compress(&cam, steps);
            let mut reference: Vec<Head> = (0..batch * heads)
                .map(|_| Head { rows: Vec::new(), spread: spread as usize, limit })
                .collect();
            let mut advance = |token: usize, uniforms: &[f32]| {
                for (range, head) in reference.iter_mut().enumerate() {
                    let queries: Vec<Vec<f64>> =
                        (0..group).map(|g| row(&queries, range * group + g, token)).collect();
                    let (key, value) = (row(&keys, range, token), row(&values, range, token));
                    let new = Row { position: token, key, value, attention: 0.0 };
                    head.step(&queries, new, recents, f64::from(uniforms[range]));
                }
            };
            (0..tokens).for_each(|token| advance(token, &[0.0; 4]));
            for index in 0..steps {
                let mut numbers = Numbers::new(100 + index as u64);
                let uniforms = (0..batch * heads).map(|_| numbers.below(1 << 20) as f32);
                let uniforms: Vec<f32> = uniforms.map(|x| x / (1 << 20) as f32).collect();
                advance(tokens + index, &uniforms);
                let uniforms =
                    Tensor::<1>::from_data(uniforms.as_slice(), (&tested.device, DType::F32));
                let uniforms = uniforms.reshape([batch, heads]);
                let step = step(&q, &k, &v, tokens + index, tokens + index);
                cam.step_with(LAYER, &mut cache, &step, uniforms).unwrap();
            }
            for (range, head) in reference.iter().enumerate() {
                let (positions, values) = ordered(&cache, cache.values(), range);
                let expected: Vec<i32> = head.rows.iter().map(|row| row.position as i32).collect();
                assert_eq!(positions, expected, "{} head {range}", tested.name);
                let expected: Vec<f64> =
                    head.rows.iter().flat_map(|row| row.value.clone()).collect();
                let error = relative_error(&values, &expected);
                assert!(error < 1e-5, "{} head {range}: values off by {error}", tested.name);
                let (_, keys) = ordered(&cache, cache.keys(), range);
                let expected: Vec<f64> = head.rows.iter().flat_map(|row| row.key.clone()).collect();
                assert!(relative_error(&keys, &expected) < 1e-6, "{}", tested.name);
            }
        }
    }
}

/// Whatever evicts, and however often: only values change, by the request's seed alone, and on
/// every device alike.
#[test]
fn seeds_decide_what_is_spread() {
    let inner = [
        json!({"policy": "h2o", "interval": 1}),
        json!({"policy": "h2o", "interval": 5}),
        json!("streaming-llm"),
        json!("tova"),
        json!("adakv"),
    ];
    for (evictor, attention) in
        inner.into_iter().zip(["accumulated", "step", "step"].iter().cycle())
    {
        let config = json!({
            "policy": "cam", "budget": 16, "evictor": evictor, "attention": attention, "spread": 4,
            "candidates": "all",
        });
        let mut outcomes: Vec<Vec<f32>> = Vec::new();
        for tested in quick_devices("cam") {
            let mut numbers = Numbers::new(5);
            let mut draw = |heads: usize, count: usize| {
                numbers.tensor::<4>([2, heads, count, 8], &tested.device)
            };
            let prompt = Prompt::new(draw(4, 40), draw(2, 40), draw(2, 40));
            let steps = [draw(4, 12), draw(2, 12), draw(2, 12)];
            let run = |policy: &dyn Policy, seeds: [u64; 2]| {
                let options = CacheOptions::new(&tested.device, DType::F32);
                let mut cache = prompt.observed(|seen| {
                    policy.prefill(&Observation { seeds: &seeds, ..seen.clone() }, 12, options)
                });
                let cache = cache.as_mut().unwrap();
                for index in 0..12 {
                    let step = step(&steps[0], &steps[1], &steps[2], index, 40 + index);
                    policy.step(LAYER, cache, step).unwrap();
                }
                let of = |pool: &Tensor<2>| -> Vec<f32> {
                    (0..4).flat_map(|range| ordered(cache, pool, range).1).collect()
                };
                (of(cache.keys()), of(cache.values()))
            };
            let cam = policy(config.clone());
            let context = format!("{config} on {}", tested.name);
            let (_, first) = run(&*cam, [1, 2]);
            assert_eq!(first, run(&*cam, [1, 2]).1, "{context}");
            assert_ne!(first, run(&*cam, [3, 4]).1, "{context}");
            let mut alone = cam.config()["evictor"].clone();
            alone["budget"] = json!(16);
            let (keys, values) = run(&*policy(alone), [1, 2]);
            assert_eq!(keys, run(&*cam, [1, 2]).0, "{context}");
            assert_ne!(first, values, "{context}");
            outcomes.push(first);
        }
        for other in &outcomes[1..] {
            let expected: Vec<f64> = outcomes[0].iter().map(|x| f64::from(*x)).collect();
            let error = relative_error(other, &expected);
            assert!(error < 1e-4, "{config}: devices differ by {error}");
        }
    }
}
