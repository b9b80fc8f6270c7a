//! KVReviver: against its algorithms in plain loops, in batches, across files, and where it
//! refuses.

use burn::tensor::{DType, Device, Int, Tensor};
use kv_core::{CacheOptions, KvCache, LayerCache, Origin, read_f32, read_i32};
use kv_policies::{Policy, Sketch, build};
use kv_testing::{Numbers, devices, quick_devices, relative_error};
use serde_json::{Value, json};

use super::support::{LAYER, Prompt, policy, step};

pub(crate) const DIM: usize = 16;

/// A prompt of `batch` sequences and what is decoded behind it.
pub(crate) struct Run {
    pub(crate) prompt: Prompt,
    pub(crate) query: Tensor<4>,
    pub(crate) keys: Tensor<4>,
    pub(crate) values: Tensor<4>,
    pub(crate) tokens: usize,
}

impl Run {
    pub(crate) fn new(
        batch: usize,
        group: usize,
        tokens: usize,
        steps: usize,
        device: &Device,
    ) -> Self {
        let mut numbers = Numbers::new((tokens + group) as u64);
        let mut draw =
            |heads: usize, tokens: usize| numbers.tensor([batch, heads, tokens, DIM], device);
        let (query, keys, values) = (draw(2 * group, tokens), draw(2, tokens), draw(2, tokens));
        Self {
            prompt: Prompt::new(query, keys, values),
            query: draw(2 * group, steps),
            keys: draw(2, steps),
            values: draw(2, steps),
            tokens,
        }
    }

    /// One sequence of it.
    fn row(&self, row: usize) -> Self {
        let pick = |tensor: &Tensor<4>| tensor.clone().narrow(0, row, 1);
        let Prompt { query, keys, values, .. } = &self.prompt;
        Self {
            prompt: Prompt::new(pick(query), pick(keys), pick(values)),
            query: pick(&self.query),
            keys: pick(&self.keys),
            values: pick(&self.values),
            tokens: self.tokens,
        }
    }

    pub(crate) fn step(
        &self,
        policy: &dyn Policy,
        cache: &mut LayerCache,
        index: usize,
    ) -> Vec<f32> {
        let step = step(&self.query, &self.keys, &self.values, index, self.tokens + index);
        read_f32("output", policy.step(LAYER, cache, step).unwrap()).unwrap()
    }

    pub(crate) fn steps(&self) -> usize {
        self.keys.dims()[2]
    }
}

pub(crate) fn close(context: &str, actual: &[f32], expected: &[f32]) {
    let expected: Vec<f64> = expected.iter().map(|x| f64::from(*x)).collect();
    let error = relative_error(actual, &expected);
    assert!(error < 1e-5, "{context}: off by {error}");
}

/// Positions of live slots of each head, ascending.
pub(crate) fn exact(cache: &LayerCache) -> Vec<Vec<usize>> {
    let positions = cache.read_positions().unwrap();
    let heads = 0..cache.layout().head_ranges();
    let of_head = |range| {
        let mut own: Vec<usize> =
            cache.layout().live(range).map(|slot| positions[slot] as usize).collect();
        own.sort_unstable();
        own
    };
    heads.map(of_head).collect()
}

/// Algorithms 3 and 4 in f64, one head of one sequence: which tokens are where, and the attention.
struct Reference {
    recents: usize,
    limit: usize,
    slack: usize,
    /// By token: accumulated attention, whether it is exact.
    scores: Vec<f64>,
    exact: Vec<bool>,
}

impl Reference {
    /// What a step moves: evictions and swaps, as lists of tokens.
    fn revise(&mut self) {
        let newest = self.scores.len();
        let exact_slots = |own: &Self| own.exact.iter().filter(|exact| **exact).count();
        let weakest = |own: &Self, end: usize| {
            let candidates = (0..end).filter(|&token| own.exact[token]);
            candidates.min_by(|&a, &b| own.scores[a].total_cmp(&own.scores[b]))
        };
        if exact_slots(self) > self.limit + self.slack {
            while exact_slots(self) > self.limit {
                let victim = weakest(self, newest - self.recents).unwrap();
                self.exact[victim] = false;
            }
        }
        let recent = exact_slots(self).saturating_sub(self.limit - self.recents);
        loop {
            let sketched = (0..newest).filter(|&token| !self.exact[token]);
            let best = sketched.max_by(|&a, &b| self.scores[a].total_cmp(&self.scores[b]));
            match (weakest(self, newest - recent), best) {
                (Some(weakest), Some(best)) if self.scores[weakest] * 1.1 < self.scores[best] => {
                    self.exact.swap(weakest, best);
                }
                _ => return,
            }
        }
    }
}

/// Which tokens are exact, step by step, follows the algorithms on the attention that is really
/// given; the output is the attention over the revived cache.
#[test]
fn steps_follow_the_algorithms() {
    for tested in quick_devices("kvreviver") {
        for (group, slack) in [(1, 16), (3, 4), (2, 0)] {
            let run = Run::new(1, group, 150, 60, &tested.device);
            let policy = policy(
                json!({"policy": "kvreviver", "vague": "sketch", "budget": 60, "slack": slack}),
            );
            let mut cache = run.prompt.compress(&*policy, run.steps());
            let (limit, recents) = (54, 27);
            let sums = run.prompt.observed(|seen| seen.column_sums.clone()).unwrap();
            let sums = read_f32("sums", sums.reshape([2, group, run.tokens]).sum_dim(1)).unwrap();
            let mut references: Vec<Reference> = (0..2)
                .map(|head| {
                    let scores: Vec<f64> = sums[head * run.tokens..][..run.tokens]
                        .iter()
                        .map(|x| f64::from(*x))
                        .collect();
                    let mut older: Vec<usize> = (0..run.tokens - recents).collect();
                    older.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
                    let mut exact = vec![false; run.tokens];
                    older[..limit - recents].iter().for_each(|&token| exact[token] = true);
                    exact[run.tokens - recents..].fill(true);
                    Reference { recents, limit, slack, scores, exact }
                })
                .collect();
            for index in 0..run.steps() {
                let context = format!("{} group {group} slack {slack} step {index}", tested.name);
                // What the step will see: all tokens as they would be revived, and the new one.
                let revived = Sketch::of(&cache)
                    .unwrap()
                    .rebuild(&cache)
                    .unwrap()
                    .map(|rows| read_f32("revived", rows).unwrap());
                let pick = |tensor: &Tensor<4>| {
                    read_f32("step", tensor.clone().narrow(2, index, 1)).unwrap()
                };
                let (query, key, value) = (pick(&run.query), pick(&run.keys), pick(&run.values));
                let output = run.step(&*policy, &mut cache, index);
                let capacity = run.tokens + run.steps();
                let mut expected = Vec::new();
                for (head, reference) in references.iter_mut().enumerate() {
                    let seen = run.tokens + index;
                    let rows = |all: &[f32], new: &[f32]| -> Vec<Vec<f64>> {
                        let old = all[head * capacity * DIM..][..seen * DIM].chunks(DIM);
                        old.chain([&new[head * DIM..][..DIM]])
                            .map(|row| row.iter().map(|x| f64::from(*x)).collect())
                            .collect()
                    };
                    let (keys, values) = (rows(&revived[0], &key), rows(&revived[1], &value));
                    reference.scores.push(0.0);
                    reference.exact.push(true);
                    for g in 0..group {
                        let query = &query[(head * group + g) * DIM..][..DIM];
                        let logits: Vec<f64> = keys
                            .iter()
                            .map(|key| {
                                key.iter().zip(query).map(|(k, q)| k * f64::from(*q)).sum::<f64>()
                                    / 4.0
                            })
                            .collect();
                        let max = logits.iter().copied().fold(f64::MIN, f64::max);
                        let sum: f64 = logits.iter().map(|logit| (logit - max).exp()).sum();
                        let mut row = vec![0.0; DIM];
                        for ((logit, value), score) in
                            logits.iter().zip(&values).zip(&mut reference.scores)
                        {
                            let p = (logit - max).exp() / sum;
                            *score += p;
                            row.iter_mut().zip(value).for_each(|(o, v)| *o += p * v);
                        }
                        expected.extend(row);
                    }
                    reference.revise();
                }
                let error = relative_error(&output, &expected);
                assert!(error < 1e-5, "{context}: off by {error}");
                let exact = exact(&cache);
                for (head, reference) in references.iter().enumerate() {
                    let own: Vec<usize> = (0..reference.exact.len())
                        .filter(|&token| reference.exact[token])
                        .collect();
                    assert_eq!(exact[head], own, "{context} head {head}");
                }
            }
            let moved = Sketch::of(&cache).unwrap().read_counters().unwrap();
            assert!(moved.iter().all(|[gone, _]| *gone >= 60 - slack - 1), "{moved:?}");
            assert!(moved.iter().map(|[_, swapped]| swapped).sum::<usize>() > 0, "{moved:?}");
        }
    }
}

/// Rebuilding the cache and attending to the sketch are the same but for rounding; so is a scratch.
#[test]
fn rebuilding_changes_nothing() {
    for tested in quick_devices("kvreviver") {
        for buckets in [1, 2, 3, 5] {
            let run = Run::new(2, 2, 130, 50, &tested.device);
            let config = |rebuild: bool| {
                json!({
                    "policy": "kvreviver", "vague": "sketch", "budget": 50, "buckets": buckets,
                    "rebuild": rebuild,
                    "signed_keys": buckets == 5
                })
            };
            let (fused, rebuilt) = (policy(config(false)), policy(config(true)));
            let mut caches =
                [&fused, &rebuilt].map(|policy| run.prompt.compress(&**policy, run.steps()));
            for index in 0..run.steps() {
                let context = format!("{} {buckets} buckets step {index}", tested.name);
                let [one, other] = [(&fused, 0), (&rebuilt, 1)]
                    .map(|(policy, at)| run.step(&**policy, &mut caches[at], index));
                close(&context, &one, &other);
                assert_eq!(exact(&caches[0]), exact(&caches[1]), "{context}");
            }
            let [one, other] = [0, 1].map(|at| caches[at].memory());
            assert_eq!(one.scratch, 0);
            assert_eq!(other.scratch, 2 * 4 * 180 * DIM * 4);
            assert_eq!(one.policy, other.policy);
        }
    }
}

/// Sequences of a batch get what they get alone, whatever their lengths.
#[test]
fn rows_do_not_disturb_each_other() {
    let forms = [
        json!({}),
        json!({"rebuild": true}),
        json!({"signed_keys": true, "replace_rate": null, "buckets": 2}),
    ];
    for (tested, form) in quick_devices("kvreviver")
        .iter()
        .flat_map(|tested| forms.iter().map(move |form| (tested, form)))
    {
        let mut config =
            json!({"policy": "kvreviver", "vague": "sketch", "budget": 0.3, "slack": 3});
        config.as_object_mut().unwrap().extend(form.as_object().unwrap().clone());
        let policy = policy(config);
        let device = &tested.device;
        // Prompts of different lengths: budgets, sketches and steps differ.
        let runs = [
            Run::new(1, 2, 90, 30, device),
            Run::new(1, 2, 140, 30, device),
            Run::new(1, 2, 60, 30, device),
        ];
        let mut alone: Vec<LayerCache> =
            runs.iter().map(|run| run.prompt.compress(&*policy, 30)).collect();
        let mut joined = LayerCache::concat(alone.clone()).unwrap();
        for index in 0..30 {
            let all = |of: fn(&Run) -> &Tensor<4>| {
                Tensor::cat(runs.iter().map(|run| of(run).clone()).collect(), 0)
            };
            let mut together = step(
                &all(|run| &run.query),
                &all(|run| &run.keys),
                &all(|run| &run.values),
                index,
                0,
            );
            let positions: Vec<i32> = runs.iter().map(|run| (run.tokens + index) as i32).collect();
            together.position =
                Tensor::<1, Int>::from_data(positions.as_slice(), (device, DType::I32));
            let output = policy.step(LAYER, &mut joined, together).unwrap();
            let output = read_f32("output", output).unwrap();
            let each: Vec<f32> = runs
                .iter()
                .zip(&mut alone)
                .flat_map(|(run, cache)| run.step(&*policy, cache, index))
                .collect();
            close(&format!("{} step {index}", tested.name), &output, &each);
        }
        let each: Vec<Vec<usize>> = alone.iter().flat_map(exact).collect();
        assert_eq!(exact(&joined), each, "{}", tested.name);
        // A batch of equal lengths, split.
        let run = Run::new(2, 1, 80, 10, device);
        let mut both = run.prompt.compress(&*policy, 10);
        let single = run.row(0);
        let mut first = single.prompt.compress(&*policy, 10);
        for index in 0..10 {
            let both = run.step(&*policy, &mut both, index);
            let first = single.step(&*policy, &mut first, index);
            close(tested.name, &both[..first.len()], &first);
        }
    }
}

/// A saved cache goes on as it was, its sketch included; so does a copy, and one that was moved.
#[test]
fn files_copies_and_moves_go_on_identically() {
    for tested in quick_devices("kvreviver") {
        let policy =
            policy(json!({"policy": "kvreviver", "vague": "sketch", "budget": 40, "buckets": 2}));
        let run = Run::new(2, 2, 100, 40, &tested.device);
        let mut cache = run.prompt.compress(&*policy, run.steps());
        for index in 0..20 {
            run.step(&*policy, &mut cache, index);
        }
        let folder =
            std::env::temp_dir().join(format!("kvreviver-{}-{}", std::process::id(), tested.name));
        let whole =
            KvCache { layers: vec![cache.clone()], seen: vec![120; 2], origin: Origin::default() };
        whole.save(&folder).unwrap();
        let mut loaded = KvCache::load(&folder, &tested.device).unwrap().layers.remove(0);
        std::fs::remove_file(&folder).unwrap();
        policy.restore(&mut loaded).unwrap();
        let mut hosted = whole
            .clone()
            .into_host()
            .unwrap()
            .into_device(&tested.device)
            .unwrap()
            .layers
            .remove(0);
        let mut moved = cache.clone().to_device(&tested.device);
        assert_eq!(loaded.memory(), cache.memory());
        for index in 20..40 {
            let expected = run.step(&*policy, &mut cache, index);
            for other in [&mut loaded, &mut hosted, &mut moved] {
                assert_eq!(
                    run.step(&*policy, other, index),
                    expected,
                    "{} step {index}",
                    tested.name
                );
            }
        }
        assert_eq!(exact(&loaded), exact(&cache));
        let scores = |cache: &LayerCache| Sketch::of(cache).unwrap().read_scores().unwrap();
        assert_eq!(scores(&loaded), scores(&cache));
    }
}

/// What is dropped is free, and what the sketch takes is reported.
#[test]
fn bytes_are_those_of_the_parts() {
    let device = &devices()[0].device;
    let run = Run::new(1, 1, 400, 20, device);
    let policy = policy(json!({"policy": "kvreviver", "vague": "sketch", "budget": 0.25}));
    let cache = run.prompt.compress(&*policy, 20);
    let memory = cache.memory();
    let row = 2 * DIM * 4;
    // 100 slots a head: 3 entries in each bucket, 91 slots.
    assert_eq!(memory.in_use, 2 * 91 * row);
    assert_eq!(memory.allocated, 2 * (91 + 17) * row);
    let sketch = Sketch::of(&cache).unwrap();
    assert_eq!(sketch.entry_bytes(), 2 * 9 * row);
    // A number a token, tables, and the track of slots.
    let tokens = 2 * 420 * 4;
    assert_eq!(memory.policy, sketch.bytes() + 2 * 108 * 4);
    assert_eq!(sketch.bytes(), 2 * 9 * row + tokens + 2 * (6 + 2 + 3 * 4) * 4);
    // Of a budget that nothing will ever leave, the sketch takes next to nothing.
    let roomy =
        build(&json!({"policy": "kvreviver", "vague": "sketch", "budget": 1_000_000})).unwrap();
    let cache = run.prompt.compress(&*roomy, 20);
    assert_eq!(Sketch::of(&cache).unwrap().entry_bytes(), 2 * 3 * row);
}

/// A short prompt stays exact, and fills the parts as it goes on.
#[test]
fn short_prompts_leave_the_sketch_empty() {
    for tested in quick_devices("kvreviver") {
        let run = Run::new(1, 2, 20, 60, &tested.device);
        let (reviver, full) = (
            policy(json!({"policy": "kvreviver", "vague": "sketch", "budget": 40})),
            policy(json!({"policy": "full"})),
        );
        let mut cache = run.prompt.compress(&*reviver, run.steps());
        let mut whole = run.prompt.compress(&*full, run.steps());
        let mut differs = None;
        for index in 0..run.steps() {
            let (one, other) =
                (run.step(&*reviver, &mut cache, index), run.step(&*full, &mut whole, index));
            let sketched = Sketch::of(&cache)
                .unwrap()
                .read_scores()
                .unwrap()
                .concat()
                .iter()
                .filter(|score| **score >= 0.0)
                .count();
            if sketched == 0 {
                close(tested.name, &one, &other);
            } else if differs.is_none() {
                differs = Some(index);
            }
            let length = cache.layout().lengths()[0];
            // 37 exact slots, and a slack of 16.
            assert!(length <= 37 + 16, "{length}");
            assert_eq!(2 * length + sketched, 2 * (20 + index + 1));
        }
        assert_eq!(differs, Some(33), "{}", tested.name);
    }
}

/// A token that is swapped back and forth comes back as it did first.
#[test]
fn swapping_back_and_forth_leaves_no_trace() {
    for tested in quick_devices("kvreviver") {
        let device = &tested.device;
        let mut numbers = Numbers::new(3);
        let shape = [1, 1, 40, DIM];
        let (keys, values) =
            (numbers.tensor::<4>(shape, device), numbers.tensor::<4>(shape, device));
        let prompt = Prompt::new(numbers.tensor(shape, device), keys, values);
        let policy =
            policy(json!({"policy": "kvreviver", "vague": "sketch", "budget": 12, "slack": 0}));
        let mut cache = prompt.compress(&*policy, 4);
        let mut sketch = Sketch::of(&cache).unwrap().clone();
        let token =
            sketch.read_scores().unwrap()[0].iter().position(|score| *score >= 0.0).unwrap() as i32;
        let listed = Tensor::<2, Int>::from_data([[token]], (device, DType::I32));
        let first = sketch.query(listed.clone(), DType::F32).unwrap();
        let read = |rows: &[Tensor<3>; 2]| {
            rows.clone().map(|rows| read_f32("rows", rows).unwrap()).concat()
        };
        for _ in 0..1_000 {
            let revived = sketch.query(listed.clone(), DType::F32).unwrap();
            let [keys, values] = revived.clone();
            sketch.add(listed.clone(), keys.clone(), values.clone(), -1.0).unwrap();
            sketch.add(listed.clone(), keys, values, 1.0).unwrap();
            close(tested.name, &read(&revived), &read(&first));
        }
        let last = sketch.query(listed, DType::F32).unwrap();
        close(tested.name, &read(&last), &read(&first));
        sketch.put_into(&mut cache).unwrap();
    }
}

/// Others choose what is exact at first.
#[test]
fn candidates_by_other_scorers() {
    for tested in quick_devices("kvreviver") {
        let run = Run::new(2, 2, 120, 30, &tested.device);
        for name in ["snapkv", "knorm", "expected-attention", "streaming-llm"] {
            let mut prompt = Prompt::new(
                run.prompt.query.clone(),
                run.prompt.keys.clone(),
                run.prompt.values.clone(),
            );
            prompt.raw_query = Some(run.prompt.query.clone());
            prompt.frequencies = (0..DIM / 2).map(|pair| 0.5f64.powi(pair as i32)).collect();
            let reviver = policy(
                json!({"policy": "kvreviver", "vague": "sketch", "budget": 50, "candidates": name}),
            );
            let again = build(&reviver.config()).unwrap();
            assert_eq!(again.config(), reviver.config());
            let mut cache = prompt.compress(&*reviver, run.steps());
            let own = exact(&cache);
            // The newest 24 of 47, and the best 23 behind them by the scorer.
            let recents = |head: &Vec<usize>| head[23..].iter().copied().eq(96..120);
            assert!(own.iter().all(|head| head.len() == 47 && recents(head)), "{name}: {own:?}");
            for index in 0..run.steps() {
                let output = run.step(&*reviver, &mut cache, index);
                assert!(output.iter().all(|x| x.is_finite()), "{name} on {}", tested.name);
            }
            // A prompt that is kept whole, and one of a single token.
            for tokens in [30, 1] {
                let part = |tensor: &Tensor<4>| tensor.clone().narrow(2, 0, tokens);
                let short = Prompt {
                    query: part(&prompt.query),
                    keys: part(&prompt.keys),
                    values: part(&prompt.values),
                    raw_query: prompt.raw_query.as_ref().map(part),
                    frequencies: prompt.frequencies.clone(),
                };
                let cache = short.compress(&*reviver, 40);
                let all: Vec<usize> = (0..tokens).collect();
                assert!(exact(&cache).iter().all(|own| *own == all), "{name}: {tokens} tokens");
            }
        }
    }
}

#[test]
fn refuses_what_cannot_be() {
    let refused = |config: Value| build(&config).unwrap_err().to_string();
    for (config, words) in [
        (
            json!({"policy": "kvreviver", "vague": "sketch", "budget": 4}),
            vec!["budget of 4", "at least 5"],
        ),
        (
            json!({"policy": "kvreviver", "vague": "sketch", "budget": 10, "buckets": 9}),
            vec!["at least 11"],
        ),
        (
            json!({"policy": "kvreviver", "vague": "sketch", "budget": 64, "buckets": 0}),
            vec!["`buckets` is 0", "1 to 9"],
        ),
        (
            json!({"policy": "kvreviver", "vague": "sketch", "budget": 64, "sketch_share": 0.5}),
            vec!["add up to 1"],
        ),
        (
            json!({"policy": "kvreviver", "vague": "sketch", "budget": 64, "recent": -0.1}),
            vec!["`recent` is -0.1"],
        ),
        (
            json!({"policy": "kvreviver", "vague": "sketch", "budget": 64, "replace_rate": 0.5}),
            vec!["`replace_rate` is 0.5"],
        ),
        (
            json!({"policy": "kvreviver", "vague": "sketch", "budget": 64, "candidates": "full"}),
            vec!["`candidates` is `full`"],
        ),
        (
            json!({"policy": "kvreviver", "vague": "sketch", "budget": 64, "bukets": 3}),
            vec!["bukets", "`candidates`"],
        ),
        (
            json!({"policy": "kvreviver", "vague": "sketch", "budget": 64, "candidates": "tova"}),
            vec!["`candidates` is `tova`", "do not choose for themselves"],
        ),
        (
            json!({"policy": "kvreviver", "vague": "sketch", "budget": 64, "candidates": "adakv"}),
            vec!["`candidates` is `adakv`", "do not choose for themselves"],
        ),
        (
            json!({"policy": "kvreviver", "vague": "sketch", "budget": 64,
                   "candidates": {"policy": "snapkv", "layers": {"pyramid": {"beta": 20.0}}}}),
            vec!["`layers` in `candidates`"],
        ),
        (
            json!({"policy": "combine",
                   "prefill": {"policy": "kvreviver", "vague": "sketch", "budget": 64},
                   "decode": {"policy": "h2o", "budget": 64}}),
            vec!["`prefill` is `kvreviver`"],
        ),
        (
            json!({"policy": "combine", "prefill": {"policy": "h2o", "budget": 64},
                   "decode": {"policy": "kvreviver", "vague": "sketch", "budget": 64}}),
            vec!["`decode` is `kvreviver`"],
        ),
        (
            json!({"policy": "kvreviver", "vague": "sketch", "budget": 1e30}),
            vec!["at most 2147483647"],
        ),
    ] {
        let error = refused(config);
        words.iter().for_each(|word| assert!(error.contains(word), "{error}"));
    }
    // A share of a prompt that is too short comes to the least that its parts take.
    let device = &devices()[0].device;
    let run = Run::new(1, 1, 30, 2, device);
    let small = policy(json!({"policy": "kvreviver", "vague": "sketch", "budget": 0.1}));
    let options = CacheOptions::new(device, DType::F32);
    let cache = run.prompt.observed(|seen| small.prefill(seen, 2, options)).unwrap();
    assert_eq!(cache.layout().lengths(), [2, 2]);
}

/// Beyond what was asked for there is no room, unless the cache may grow; either way nothing is
/// lost.
#[test]
fn tokens_beyond_the_room_are_refused() {
    for tested in quick_devices("kvreviver") {
        let run = Run::new(1, 1, 60, 12, &tested.device);
        let policy =
            policy(json!({"policy": "kvreviver", "vague": "sketch", "budget": 20, "slack": 2}));
        let mut cache = run.prompt.compress(&*policy, 5);
        for index in 0..5 {
            run.step(&*policy, &mut cache, index);
        }
        let before = exact(&cache);
        let one_more = step(&run.query, &run.keys, &run.values, 5, 65);
        let error = policy.step(LAYER, &mut cache, one_more).unwrap_err().to_string();
        assert!(error.contains("65") && error.contains("66"), "{error}");
        assert_eq!(exact(&cache), before);

        let options =
            CacheOptions { growable: true, ..CacheOptions::new(&tested.device, DType::F32) };
        let mut grown = run.prompt.observed(|seen| policy.prefill(seen, 5, options)).unwrap();
        let mut roomy = run.prompt.compress(&*policy, 12);
        for index in 0..12 {
            let (one, other) =
                (run.step(&*policy, &mut grown, index), run.step(&*policy, &mut roomy, index));
            close(tested.name, &one, &other);
        }
        let positions = read_i32("positions", roomy.positions().clone()).unwrap();
        assert!(positions.contains(&71));
    }
}

/// A sequence that has ended goes on at its last position: its slots do not grow into its
/// neighbours'.
#[test]
fn ended_sequences_stay_within_their_slots() {
    for tested in quick_devices("kvreviver") {
        let run = Run::new(2, 1, 60, 90, &tested.device);
        let policy =
            policy(json!({"policy": "kvreviver", "vague": "sketch", "budget": 30, "slack": 3}));
        let mut cache = run.prompt.compress(&*policy, run.steps());
        for index in 0..run.steps() {
            let mut ended = step(&run.query, &run.keys, &run.values, index, 60 + index);
            let positions = [60 + index as i32, 60];
            ended.position = Tensor::from_data(positions, (&tested.device, DType::I32));
            policy.step(LAYER, &mut cache, ended).unwrap();
            let lengths = read_i32("lengths", cache.ranges().lengths.clone()).unwrap();
            let known = cache.layout().lengths().iter().map(|length| *length as i32);
            assert!(known.eq(lengths.iter().copied()), "{} step {index}: {lengths:?}", tested.name);
        }
        // The other sequence has all its tokens.
        let sketched = Sketch::of(&cache).unwrap().read_scores().unwrap();
        for (head, exact) in exact(&cache).iter().take(2).enumerate() {
            let sketched = sketched[head].iter().filter(|score| **score >= 0.0).count();
            assert_eq!(exact.len() + sketched, 150, "{} head {head}", tested.name);
        }
    }
}
