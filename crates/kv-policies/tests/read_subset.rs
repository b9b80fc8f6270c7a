//! Policies that keep the whole cache and read a part of it: against their authors' numbers, and
//! against selections in f64, step by step.

use std::sync::Arc;

use burn::tensor::{DType, Device, Int, Tensor};
use kv_core::{
    CacheOptions, KvCache, LayerCache, Origin, PageHeads, PageOptions, SlotList, SlotRanges,
    read_f32, read_i32,
};
use kv_kernels::{PageSpan, page_bounds, page_rows, page_scores};
use kv_policies::{
    HShare, LayerContext, Needs, Observation, Observed, Policy, Step, build, copies, share_map,
};
use kv_testing::{Numbers, devices, exact_devices, golden_files, relative_error};
use serde_json::{Value, json};

use super::support::{Prompt, policy, step};

const DIM: usize = 16;
const KV_HEADS: usize = 2;
/// Behind the layers that attend to everything.
const DEEP: LayerContext = LayerContext { index: 2, count: 3 };
/// Prompts of the batch's rows.
const TOKENS: [usize; 2] = [90, 61];
const STEPS: usize = 9;

/// Rows of a tensor `[1, H, N, D]` as f64, by head and token.
fn rows(tensor: &Tensor<4>) -> Vec<Vec<Vec<f64>>> {
    let [_, _, tokens, dim] = tensor.dims();
    let all = read_f32("rows", tensor.clone()).unwrap();
    let head = |head: &[f32]| -> Vec<Vec<f64>> {
        head.chunks(dim).map(|row| row.iter().map(|x| f64::from(*x)).collect()).collect()
    };
    all.chunks(tokens * dim).map(head).collect()
}

/// One sequence's heads, `[1, H, N, D]`.
struct Trace {
    tokens: usize,
    tensors: [Tensor<4>; 3],
    heads: [Vec<Vec<Vec<f64>>>; 3],
}

impl Trace {
    fn new(seed: u64, group: usize, tokens: usize, device: &Device) -> Self {
        let mut numbers = Numbers::new(seed);
        let mut draw = |heads: usize| numbers.tensor([1, heads, tokens + STEPS, DIM], device);
        let tensors = [draw(KV_HEADS * group), draw(KV_HEADS), draw(KV_HEADS)];
        let heads = [0, 1, 2].map(|at| rows(&tensors[at]));
        Self { tokens, tensors, heads }
    }

    fn prompt(&self) -> Prompt {
        let [q, k, v] = [0, 1, 2].map(|at| self.tensors[at].clone().narrow(2, 0, self.tokens));
        Prompt::new(q, k, v)
    }

    fn prefill(&self, policy: &dyn Policy, layer: LayerContext) -> LayerCache {
        let options = CacheOptions::new(&self.tensors[0].device(), DType::F32);
        self.prompt().observed(|seen| {
            let seen = Observation { layer, ..seen.clone() };
            policy.prefill(&seen, STEPS, options).unwrap()
        })
    }

    fn step(&self, index: usize) -> Step {
        let at = self.tokens + index;
        step(&self.tensors[0], &self.tensors[1], &self.tensors[2], at, at)
    }

    fn query(&self, head: usize, at: usize) -> &[f64] {
        &self.heads[0][head][at]
    }

    fn keys(&self, head: usize) -> &[Vec<f64>] {
        let group = self.heads[0].len() / KV_HEADS;
        &self.heads[1][head / group]
    }

    /// Attention of a query head at a token over others.
    fn attend(&self, head: usize, at: usize, list: &[usize]) -> Vec<f64> {
        let values = &self.heads[2][head / (self.heads[0].len() / KV_HEADS)];
        let logit = |&t: &usize| dot(self.query(head, at), &self.keys(head)[t]) / 4.0;
        let logits: Vec<f64> = list.iter().map(logit).collect();
        let top = logits.iter().copied().fold(f64::MIN, f64::max);
        let sum: f64 = logits.iter().map(|logit| (logit - top).exp()).sum();
        let mut output = vec![0.0; DIM];
        for (&t, logit) in list.iter().zip(logits) {
            let share = (logit - top).exp() / sum;
            output.iter_mut().zip(&values[t]).for_each(|(o, v)| *o += share * v);
        }
        output
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// The indices of the `count` highest scores, ascending.
fn best(scores: &[f64], count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
    order.truncate(count);
    order.sort_unstable();
    order
}

/// Steps of two sequences as one batch.
fn joined(a: &Step, b: &Step) -> Step {
    use kv_policies::NewHeads::Rotated;
    let cat = |a: &Tensor<3>, b: &Tensor<3>| Tensor::cat(vec![a.clone(), b.clone()], 0);
    let (Rotated { query, key, value, .. }, Rotated { query: q, key: k, value: v, .. }) =
        (&a.heads, &b.heads)
    else {
        unreachable!("steps of rotated heads");
    };
    let position = Tensor::cat(vec![a.position.clone(), b.position.clone()], 0);
    Step::new(cat(query, q), cat(key, k), cat(value, v), position)
}

/// What a query head may read at a token: sequence, head, slots there are.
type Select<'a> = dyn FnMut(&LayerCache, usize, usize, usize) -> Vec<usize> + 'a;

/// Decodes both sequences as one batch, a part of the steps from a saved and loaded cache, and compares
/// with attention over what `select` says.
fn follow(config: &Value, traces: &[Trace; 2], layer: LayerContext, select: &mut Select<'_>) {
    let policy = policy(config.clone());
    let parts = traces.iter().map(|trace| trace.prefill(&*policy, layer)).collect();
    let mut cache = LayerCache::concat(parts).unwrap();
    let heads = traces[0].heads[0].len();
    let device = cache.options().device.clone();
    for index in 0..STEPS {
        if index == STEPS / 2 {
            cache = reloaded(cache, &device);
        }
        let step = joined(&traces[0].step(index), &traces[1].step(index));
        let output = read_f32("output", policy.step(layer, &mut cache, step).unwrap()).unwrap();
        for (row, trace) in traces.iter().enumerate() {
            let at = trace.tokens + index;
            for head in 0..heads {
                let list = select(&cache, row, head, at + 1);
                let exact = trace.attend(head, at, &list);
                let own = &output[(row * heads + head) * DIM..][..DIM];
                let error = relative_error(own, &exact);
                assert!(error < 1e-4, "{config} step {index} row {row} head {head}: {error}");
            }
        }
    }
}

fn reloaded(cache: LayerCache, device: &Device) -> LayerCache {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cache.safetensors");
    let seen = cache.layout().lengths().chunks(KV_HEADS).map(|row| row[0]).collect();
    let whole = KvCache { layers: vec![cache], seen, origin: Origin::default() };
    whole.save(&path).unwrap();
    KvCache::load(&path, device).unwrap().layers.remove(0)
}

fn traces(group: usize, device: &Device) -> [Trace; 2] {
    [0, 1].map(|row| Trace::new(row as u64 + 3, group, TOKENS[row], device))
}

#[test]
fn quest_reads_the_pages_of_an_f64_reference() {
    for tested in devices() {
        for group in [1, 2, 4] {
            let traces = traces(group, &tested.device);
            for heads in ["query", "max", "mean"] {
                for (last, budget) in [("always", json!(32)), ("scored", json!(40))] {
                    let config = json!({"policy": "quest", "budget": budget, "page": 8,
                        "heads": heads, "last_page": last});
                    follow(&config, &traces, DEEP, &mut |_, row, head, length| {
                        let trace = &traces[row];
                        let pages = length.div_ceil(8);
                        let score = |head: usize, page: usize| -> f64 {
                            let query = trace.query(head, length - 1);
                            let span = &trace.keys(head)[page * 8..((page + 1) * 8).min(length)];
                            let bound = |d: usize| {
                                let products = span.iter().map(|key| query[d] * key[d]);
                                products.fold(f64::MIN, f64::max)
                            };
                            (0..DIM).map(bound).sum()
                        };
                        let members = head / group * group..(head / group + 1) * group;
                        let open = if last == "always" { pages - 1 } else { pages };
                        let scores: Vec<f64> = (0..open)
                            .map(|page| match heads {
                                "query" => score(head, page),
                                "max" => {
                                    members.clone().map(|h| score(h, page)).fold(f64::MIN, f64::max)
                                }
                                _ => members.clone().map(|h| score(h, page)).sum(),
                            })
                            .collect();
                        let mut chosen = best(&scores, if last == "always" { 3 } else { 5 });
                        if last == "always" {
                            chosen.push(pages - 1);
                        }
                        chosen
                            .into_iter()
                            .flat_map(|page| page * 8..((page + 1) * 8).min(length))
                            .collect()
                    });
                }
            }
        }
    }
}

#[test]
fn double_sparsity_reads_the_tokens_of_an_f64_reference() {
    for tested in devices() {
        for group in [1, 2, 4] {
            let traces = traces(group, &tested.device);
            // One list a query head, and one a key-value head.
            for lists in [KV_HEADS * group, KV_HEADS] {
                let own: Vec<Vec<usize>> = (0..lists)
                    .map(|head| (0..DIM).map(|at| (at * 5 + 3 * head) % DIM).collect())
                    .collect();
                let config = json!({"policy": "double-sparsity", "budget": 20, "labels": 3,
                    "channels": [own, own, own]});
                follow(&config, &traces, DEEP, &mut |_, row, head, length| {
                    let (trace, each) = (&traces[row], KV_HEADS * group / lists);
                    let query = trace.query(head, length - 1);
                    let score = |key: &Vec<f64>| -> f64 {
                        own[head / each][..3].iter().map(|&c| query[c] * key[c]).sum()
                    };
                    let scores: Vec<f64> = trace.keys(head)[..length].iter().map(score).collect();
                    best(&scores, 20)
                });
            }
        }
    }
}

/// Without calibration: the channels of the prompt's last tokens.
#[test]
fn channels_come_from_the_prompt() {
    for tested in devices() {
        let traces = traces(2, &tested.device);
        let config = json!({"policy": "double-sparsity", "budget": 20, "labels": 4, "window": 10});
        let channels: Vec<Vec<Vec<usize>>> = traces
            .iter()
            .map(|trace| {
                let of_head = |head: usize| {
                    let tokens = trace.tokens - 10..trace.tokens;
                    let mean = |c: usize| -> f64 {
                        let product =
                            |t: usize| (trace.query(head, t)[c] * trace.keys(head)[t][c]).abs();
                        tokens.clone().map(product).sum()
                    };
                    best(&(0..DIM).map(mean).collect::<Vec<_>>(), 4)
                };
                (0..4).map(of_head).collect()
            })
            .collect();
        follow(&config, &traces, DEEP, &mut |_, row, head, length| {
            let trace = &traces[row];
            let query = trace.query(head, length - 1);
            let score = |key: &Vec<f64>| -> f64 {
                channels[row][head].iter().map(|&c| query[c] * key[c]).sum()
            };
            let scores: Vec<f64> = trace.keys(head)[..length].iter().map(score).collect();
            best(&scores, 20)
        });
    }
}

/// HShare's lists in f64.
struct Shared<'a> {
    traces: &'a [Trace; 2],
    channels: Vec<usize>,
    /// Tokens, and the first recent one, for every (sequence, head).
    lists: Vec<Option<(Vec<usize>, usize)>>,
    retrievals: Vec<usize>,
}

/// A budget of 24: 2 sinks, 15 chosen, 7 recents.
const PARTS: [usize; 3] = [15, 2, 7];

impl<'a> Shared<'a> {
    fn new(traces: &'a [Trace; 2], channels: &[usize]) -> Self {
        let rows = 2 * traces[0].heads[0].len();
        let (channels, retrievals) = (channels.to_vec(), vec![0; rows]);
        Self { traces, channels, lists: vec![None; rows], retrievals }
    }

    /// What a head reads that takes the list of `source`, in a step of so many tokens.
    fn read(&mut self, row: usize, source: usize, length: usize, period: usize) -> Vec<usize> {
        let [heavy, sinks, recents] = PARTS;
        let at = row * self.traces[0].heads[0].len() + source;
        let fresh = self.lists[at]
            .as_ref()
            .is_none_or(|(_, first)| length.is_multiple_of(period) && *first != length - recents);
        if fresh {
            let trace = &self.traces[row];
            let query = trace.query(source, length - 1);
            let score =
                |key: &Vec<f64>| -> f64 { self.channels.iter().map(|&c| query[c] * key[c]).sum() };
            let middle = &trace.keys(source)[sinks..length - recents];
            let scores: Vec<f64> = middle.iter().map(score).collect();
            let chosen = best(&scores, heavy).into_iter().map(|at| at + sinks).collect();
            self.lists[at] = Some((chosen, length - recents));
            self.retrievals[at] += 1;
        }
        let (chosen, first) = self.lists[at].clone().unwrap();
        (0..sinks).chain(chosen).chain(first..length).collect()
    }
}

fn sources(cache: &LayerCache) -> Vec<usize> {
    let sources = read_f32("sources", cache.state("sources").unwrap().clone()).unwrap();
    sources.into_iter().map(|source| source as usize).collect()
}

#[test]
fn hshare_reads_the_lists_of_an_f64_reference() {
    for tested in devices() {
        for (group, queries) in [(1, 1.0), (2, 0.5), (4, 0.25)] {
            let traces = traces(group, &tested.device);
            let heads = KV_HEADS * group;
            let used = [1, 4, 6, 11];
            let own = vec![used.to_vec(); heads];
            let config = json!({"policy": "hshare", "budget": 24, "sinks": 2, "recents": 7,
                "labels": 4, "channels": [own, own, own], "layers": 1.0, "heads": 0.5,
                "queries": queries, "window": 20});
            let mut shared = Shared::new(&traces, &used);
            let period = (1.0 / queries) as usize;
            let mut copied = 0;
            let mut chosen = Vec::new();
            follow(&config, &traces, DEEP, &mut |cache, row, head, length| {
                let sources = sources(cache);
                copied += usize::from(sources[row * heads + head] != head);
                chosen = HShare::retrievals(cache).unwrap();
                shared.read(row, sources[row * heads + head], length, period)
            });
            // Half of the heads took another's.
            assert_eq!(copied, heads * STEPS, "{}", tested.name);
            assert_eq!(chosen, shared.retrievals, "{}", tested.name);
        }
    }
}

/// Whose list a head takes follows from the critical tokens of the prompt's last queries.
#[test]
fn hshare_maps_follow_the_prompts_critical_tokens() {
    for tested in devices() {
        let traces = traces(4, &tested.device);
        let (heads, used, window) = (8, [1usize, 4, 6, 11], 20);
        let own = vec![used.to_vec(); heads];
        let config = json!({"policy": "hshare", "budget": 24, "sinks": 2, "recents": 7, "labels": 4,
            "channels": [own, own, own], "layers": 1.0, "heads": 0.5, "window": window});
        let policy = policy(config);
        for trace in &traces {
            let sets: Vec<Vec<Vec<usize>>> = (0..heads)
                .map(|head| {
                    let of = |at: usize| {
                        let query = trace.query(head, at);
                        let score = |key: &Vec<f64>| used.iter().map(|&c| query[c] * key[c]).sum();
                        let scores: Vec<f64> = trace.keys(head)[..=at].iter().map(score).collect();
                        best(&scores, PARTS[0])
                    };
                    (trace.tokens - window..trace.tokens).map(of).collect()
                })
                .collect();
            let overlap = |a: usize, b: usize| {
                let rows = sets[a].iter().zip(&sets[b]);
                rows.map(|(a, b)| a.iter().filter(|t| b.contains(t)).count() as u64).sum()
            };
            let expected = share_map(heads, 4, overlap);
            let cache = trace.prefill(&*policy, DEEP);
            assert_eq!(sources(&cache), expected, "{}", tested.name);
        }
    }
}

/// Layers read lists of layers before them, in the same step: of a batch whose rows have maps of their
/// own, with the first layer dense.
#[test]
fn hshare_layers_read_each_others_lists() {
    for tested in devices() {
        let device = &tested.device;
        let count = 4;
        let layers: Vec<[Trace; 2]> = (0..count)
            .map(|layer| {
                [0, 1].map(|row| Trace::new(50 + 2 * layer + row as u64, 2, TOKENS[row], device))
            })
            .collect();
        let used = [1usize, 4, 6, 11];
        let own = vec![used.to_vec(); 4];
        let config = json!({"policy": "hshare", "budget": 24, "sinks": 2, "recents": 7, "labels": 4,
            "channels": [own, own, own, own], "layers": 0.5, "heads": 0.75, "queries": 0.5,
            "window": 12, "dense_layers": 1});
        let policy = policy(config);
        assert!(policy.defers());
        let of_row = |row: usize| {
            let seen: Vec<Observed> = layers
                .iter()
                .enumerate()
                .map(|(index, traces)| {
                    let layer = LayerContext { index, count: count as usize };
                    traces[row].prompt().observed(|seen| {
                        let seen = Observation { layer, ..seen.clone() };
                        Observed::new(&seen, Needs { window: 12, ..Needs::default() })
                    })
                })
                .collect();
            policy.prefill_layers(&seen, STEPS, CacheOptions::new(device, DType::F32)).unwrap()
        };
        let mut caches: Vec<LayerCache> = of_row(0)
            .into_iter()
            .zip(of_row(1))
            .map(|(a, b)| LayerCache::concat(vec![a, b]).unwrap())
            .collect();
        let mut shared: Vec<Shared<'_>> =
            layers.iter().map(|traces| Shared::new(traces, &used)).collect();
        let mut borrowed = 0;
        for index in 0..STEPS {
            let board = Arc::default();
            for (layer, cache) in caches.iter_mut().enumerate() {
                let traces = &layers[layer];
                let step = joined(&traces[0].step(index), &traces[1].step(index));
                let context = LayerContext { index: layer, count: count as usize };
                let step = step.with_board(Arc::clone(&board));
                let output = policy.step(context, cache, step).unwrap();
                let output = read_f32("output", output).unwrap();
                for (row, trace) in traces.iter().enumerate() {
                    let at = trace.tokens + index;
                    for head in 0..4 {
                        let list = if layer == 0 {
                            (0..=at).collect()
                        } else {
                            let pair = &sources(cache)[(row * 4 + head) * 2..][..2];
                            borrowed += usize::from(pair[1] + 1 != layer);
                            shared[pair[1] + 1].read(row, pair[0], at + 1, 2)
                        };
                        let exact = trace.attend(head, at, &list);
                        let error =
                            relative_error(&output[(row * 4 + head) * DIM..][..DIM], &exact);
                        let context = format!("step {index} layer {layer} row {row} head {head}");
                        assert!(error < 1e-4, "{} {context}: {error}", tested.name);
                    }
                }
            }
        }
        // Two of three layers, by rounding, took another's.
        assert_eq!(borrowed, STEPS * 2 * 4 * copies(3, 0.5), "{}", tested.name);
        for (layer, cache) in caches.iter().enumerate().skip(1) {
            assert_eq!(HShare::retrievals(cache).unwrap(), shared[layer].retrievals);
        }
        assert!(HShare::retrievals(&caches[0]).unwrap().is_empty());
        // A step of a later layer alone finds nothing to read.
        let traces = &layers[2];
        let step = joined(&traces[0].step(0), &traces[1].step(0));
        let context = LayerContext { index: 2, count: count as usize };
        let before = caches[2].layout().lengths().to_vec();
        let error = policy.step(context, &mut caches[2], step).unwrap_err().to_string();
        assert!(error.contains("layer 1 may read lists of all layers before it"), "{error}");
        assert_eq!(caches[2].layout().lengths(), before);
    }
}

#[test]
fn golden_quest() {
    for golden in golden_files("golden_quest", "quest_official") {
        for tested in exact_devices("golden_quest") {
            let device = &tested.device;
            let context = format!("{} on {}", golden.name, tested.name);
            let [k, v] = ["k", "v"].map(|name| golden.tensor(name).on::<4>(device));
            let q: Tensor<3> = golden.tensor("q").on(device);
            let ([_, heads, _], [_, kv_heads, tokens, dim]) = (q.dims(), k.dims());
            let page = golden.number("chunk") as usize;
            let budget = golden.number("token_budget") as usize;
            // Scores of all pages, and without the last one.
            let pages = tokens.div_ceil(page);
            let offsets = (0..kv_heads as i32).map(|head| head * tokens as i32).collect::<Vec<_>>();
            let ints = |values: &[i32]| {
                Tensor::<1, Int>::from_data(values, (device, DType::I32)).reshape([1, kv_heads])
            };
            let ranges = SlotRanges {
                offsets: ints(&offsets),
                lengths: ints(&vec![tokens as i32; kv_heads]),
            };
            let pool = k.clone().reshape([kv_heads * tokens, dim]);
            let rows = page_rows(kv_heads * tokens, kv_heads, page);
            let mut bounds = Tensor::zeros([rows, dim], (device, DType::F32));
            page_bounds(&pool, &ranges, &mut bounds, page, PageSpan::All { longest: tokens })
                .unwrap();
            let budgets = Tensor::full([1, heads, 3], budget as f32, (device, DType::F32));
            for (always_last, name) in
                [(false, "page_score"), (true, "page_score_ref_cpu_estimate_without_last")]
            {
                let options = PageOptions { page, heads: PageHeads::Query, always_last };
                let scored =
                    page_scores(q.clone(), &bounds, &ranges, &budgets, pages, options).unwrap();
                let open = pages - usize::from(always_last);
                let scores = read_f32("scores", scored.scores.narrow(1, 0, open)).unwrap();
                let error = relative_error(&scores, &golden.tensor(name).values);
                assert!(error < 1e-5, "{context}: {name} off by {error}");
            }
            // The evaluation's step: the last token is the step's own.
            let prompt = |x: &Tensor<4>| x.clone().narrow(2, 0, tokens - 1);
            let queries = q.clone().unsqueeze_dim::<4>(2);
            let quest = policy(json!({"policy": "quest", "budget": budget, "page": page,
                "last_page": "scored", "dense_layers": 0}));
            let mut cache =
                Prompt::new(queries.clone(), prompt(&k), prompt(&v)).compress(&*quest, 1);
            let last = |x: &Tensor<4>| x.clone().narrow(2, tokens - 1, 1).squeeze_dim::<3>(2);
            let position = Tensor::full([1], tokens as i32 - 1, (device, DType::I32));
            let step = Step::new(q.clone(), last(&k), last(&v), position);
            let output = quest.step(super::support::LAYER, &mut cache, step).unwrap();
            let output = read_f32("output", output).unwrap();
            let error = relative_error(&output, &golden.tensor("out").values);
            assert!(error < 1e-5, "{context}: output off by {error}");
            let options = PageOptions { page, heads: PageHeads::Query, always_last: false };
            let SlotList { slots, counts } =
                cache.choose_pages(q.clone(), &budgets, budget, options).unwrap();
            let width = slots.dims()[1];
            let (slots, counts) =
                (read_i32("slots", slots).unwrap(), read_i32("counts", counts).unwrap());
            let mask = golden.tensor("mask");
            for head in 0..heads {
                let offset = cache.layout().offsets()[head / (heads / kv_heads)];
                let own = slots[head * width..][..counts[head] as usize].iter();
                let own: Vec<usize> = own.map(|&slot| slot as usize - offset).collect();
                let row = &mask.values[head * tokens..][..tokens];
                let expected: Vec<usize> = (0..tokens).filter(|&at| row[at] != 0.0).collect();
                assert_eq!(own, expected, "{context} head {head}");
            }
        }
    }
}

#[test]
fn golden_hshare_maps() {
    for golden in golden_files("golden_hshare_maps", "hshare_official_share") {
        let mask = golden.tensor("critical_mask");
        let [layers, batch, heads, tokens, _] = mask.shape[..] else { panic!("five dimensions") };
        let heavy = golden.number("heavy_const") as usize;
        let row = |layer: usize, b: usize, head: usize, query: usize| {
            &mask.values[(((layer * batch + b) * heads + head) * tokens + query) * tokens..]
                [..tokens]
        };
        let shared =
            |a: &[f64], b: &[f64]| a.iter().zip(b).filter(|(a, b)| **a * **b > 0.0).count();
        let between = |b: usize, x: (usize, usize), y: (usize, usize), from: usize| -> u64 {
            let rows = from..tokens;
            rows.map(|q| shared(row(x.0, b, x.1, q), row(y.0, b, y.1, q)) as u64).sum()
        };
        let (expected_heads, expected_layers) =
            (golden.tensor("share_head").values, golden.tensor("share_layer").values);
        let counts = golden.tensor("overlap_head_layer0").values;
        for b in 0..batch {
            let overlap = |x: usize, y: usize| between(b, (0, x), (0, y), heavy);
            assert_eq!(overlap(1, 0) as f64, counts[(b * heads + 1) * heads]);
            let map = share_map(heads, golden.number("share_head_const") as usize, overlap);
            let map: Vec<f64> = map.into_iter().map(|head| head as f64).collect();
            assert_eq!(map, expected_heads[b * heads..][..heads], "{} heads", golden.name);
            let overlap = |x: usize, y: usize| {
                (0..heads).map(|head| between(b, (x, head), (y, head), 0)).sum()
            };
            let map = share_map(layers, golden.number("share_layer_const") as usize, overlap);
            let map: Vec<f64> = map.into_iter().map(|layer| layer as f64).collect();
            assert_eq!(map, expected_layers[b * layers..][..layers], "{} layers", golden.name);
        }
    }
}

#[test]
fn golden_hshare_lists() {
    for golden in golden_files("golden_hshare_lists", "hshare_official_fwd_sparse") {
        for tested in exact_devices("golden_hshare_lists") {
            let device = &tested.device;
            let q: Tensor<3> = golden.tensor("q").on(device);
            let [batch, heads, dim] = q.dims();
            let tokens = golden.number("N") as usize;
            let [k, v] = ["k", "v"].map(|name| {
                let flat: Tensor<3> = golden.tensor(name).on(device);
                flat.reshape([batch, tokens, heads, dim]).swap_dims(1, 2)
            });
            let full = policy(json!({"policy": "full"}));
            let mut cache = Prompt::new(q.clone().unsqueeze_dim(2), k, v).compress(&*full, 1);
            let lists = golden.tensor("heavy_list").indices();
            let width = lists.len() / (batch * heads);
            let masked = golden.tensor("mask").values;
            let slots: Vec<i32> = lists
                .iter()
                .enumerate()
                .map(|(at, &token)| (cache.layout().offsets()[at / width] as u32 + token) as i32)
                .collect();
            let counts: Vec<i32> = (0..batch * heads)
                .map(|row| {
                    let mask = &masked[row / heads * width..][..width];
                    mask.iter().filter(|weight| **weight == 0.0).count() as i32
                })
                .collect();
            let ints = |values: &[i32]| Tensor::<1, Int>::from_data(values, (device, DType::I32));
            let list = SlotList {
                slots: ints(&slots).reshape([batch * heads, width]),
                counts: ints(&counts),
            };
            let output = cache.attend_listed(q, list).unwrap().output;
            let output = read_f32("output", output).unwrap();
            let error = relative_error(&output, &golden.tensor("out_f16weights").values);
            assert!(error < 1e-3, "{} on {}: {error}", golden.name, tested.name);
        }
    }
}

/// Budgets that are shares of prompts of unequal length.
#[test]
fn rows_read_as_they_do_alone() {
    for tested in devices() {
        let traces = traces(2, &tested.device);
        let gates = json!([[0.5, 0.9], [0.4, 0.2], [0.2, 0.6]]);
        for config in [
            json!({"policy": "quest", "budget": 0.4}),
            json!({"policy": "double-sparsity", "budget": 0.3}),
            json!({"policy": "hshare", "budget": 0.3}),
            json!({"policy": "duo-attention", "budget": 0.4, "alpha": gates}),
        ] {
            let policy = policy(config.clone());
            let mut alone = [0, 1].map(|row| traces[row].prefill(&*policy, DEEP));
            let mut both = LayerCache::concat(alone.to_vec()).unwrap();
            for index in 0..STEPS {
                let steps = [0, 1].map(|row: usize| traces[row].step(index));
                let step = joined(&steps[0], &steps[1]);
                let output = policy.step(DEEP, &mut both, step).unwrap();
                let output = read_f32("output", output).unwrap();
                let mut expected = Vec::new();
                for (cache, step) in alone.iter_mut().zip(steps) {
                    let output = policy.step(DEEP, cache, step).unwrap();
                    expected.extend(read_f32("output", output).unwrap());
                }
                let worst = output.iter().zip(&expected).map(|(a, b)| (a - b).abs());
                let worst = worst.fold(0.0, f32::max);
                assert!(worst < 1e-5, "{config} on {} step {index}: {worst}", tested.name);
            }
        }
    }
}

/// Caches report the bytes of what is kept beside their slots.
#[test]
fn bounds_of_pages_are_counted() {
    let device = &devices()[0].device;
    let trace = Trace::new(1, 2, 90, device);
    let bytes = |name: &str| {
        let policy = policy(json!({"policy": name, "budget": 32}));
        trace.prefill(&*policy, DEEP).memory().policy
    };
    // Two rows a page: 198 slots in 12 pages, and one more for each range and at the end.
    let bounds = 2 * (198 / 16 + 2 + 1) * DIM * 4;
    assert_eq!(bytes("quest"), bounds + 4 * 3 * 4);
    assert_eq!(bytes("full"), 0);
}

#[test]
fn what_cannot_be_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let (no_json, no_gates) = (file("a.json", "{"), file("b.tsv", "0.5\t0.1\n0.2\tx\n"));
    for (config, expected) in [
        (json!({"policy": "quest", "budget": 15}), "15 tokens is below a page"),
        (json!({"policy": "quest", "budget": 64, "page": 0}), "`page` is 0"),
        (json!({"policy": "quest", "budget": 64, "heads": "min"}), "unknown variant `min`"),
        (json!({"policy": "double-sparsity", "budget": 64, "labels": 0}), "`labels` is 0"),
        (json!({"policy": "double-sparsity", "budget": 64, "window": 0}), "`window` is 0"),
        (json!({"policy": "double-sparsity", "budget": 64, "channels": []}), "no layers"),
        (json!({"policy": "double-sparsity", "budget": 64, "channels": no_json}), "a.json"),
        (json!({"policy": "double-sparsity", "budget": 64, "channels": "no/file"}), "no/file"),
        (json!({"policy": "hshare", "budget": 64, "queries": 0.4}), "`queries` is 0.4"),
        (json!({"policy": "hshare", "budget": 64, "layers": 0.0}), "`layers` is 0"),
        (json!({"policy": "hshare", "budget": 64, "heads": 1.5}), "`heads` is 1.5"),
        (json!({"policy": "hshare", "budget": 8, "sinks": 4, "recents": 4}), "leave none of 8"),
        (json!({"policy": "duo-attention"}), "missing field `alpha`"),
        (json!({"policy": "duo-attention", "alpha": [[0.1], [0.2, 0.3]]}), "no matrix"),
        (json!({"policy": "duo-attention", "alpha": no_gates}), "line 2: `x` is no number"),
        (json!({"policy": "duo-attention", "alpha": [[0.1]], "sparsity": 2.0}), "`sparsity` is 2"),
        (json!({"policy": "duo-attention", "alpha": [[0.1]], "recents": 0}), "`recents` is 0"),
    ] {
        let error = build(&config).unwrap_err().to_string();
        assert!(error.contains(expected), "{config}: {error}");
    }
    let device = &devices()[0].device;
    let trace = Trace::new(1, 2, 90, device);
    for (config, expected) in [
        (json!({"policy": "double-sparsity", "budget": 20, "channels": [[[0]]]}), "has 1 layers"),
        (
            json!({"policy": "double-sparsity", "budget": 20,
                "channels": [[[0]], [[0]], [[0], [1], [2]]]}),
            "has 3 heads, expected 4 or 2",
        ),
        (
            json!({"policy": "double-sparsity", "budget": 20,
                "channels": [[[0]], [[0]], [[0], [16]]]}),
            "expected 1 different ones below 16",
        ),
        (json!({"policy": "double-sparsity", "budget": 20, "labels": 17}), "`labels` is 17"),
        (json!({"policy": "quest", "budget": 0.1}), "9 tokens is below a page"),
        (json!({"policy": "duo-attention", "alpha": [[0.1, 0.2]]}), "`alpha` has 1 layers"),
    ] {
        let policy = policy(config.clone());
        let options = CacheOptions::new(device, DType::F32);
        let error = trace.prompt().observed(|seen| {
            let seen = Observation { layer: DEEP, ..seen.clone() };
            policy.prefill(&seen, STEPS, options).unwrap_err().to_string()
        });
        assert!(error.contains(expected), "{config}: {error}");
    }
}

/// Streaming heads hold their window, the others everything; both decode like attention over what
/// they hold.
#[test]
fn duo_attention_streams_with_the_lowest_gates() {
    for tested in devices() {
        for group in [1, 2, 4] {
            let traces = traces(group, &tested.device);
            let gates = json!([[0.5, 0.9], [0.4, 0.2], [0.2, 0.6]]);
            // A window above the second prompt, so that its heads fill up while decoding.
            for (sinks, recents) in [(4, 20), (8, 56)] {
                let config = json!({"policy": "duo-attention", "alpha": gates, "sparsity": 0.5,
                    "sinks": sinks, "recents": recents});
                let streams = |head: usize| head / group == 0;
                follow(&config, &traces, DEEP, &mut |cache, row, head, length| {
                    let kept = super::support::kept(cache, row * KV_HEADS + head / group);
                    let expected: Vec<usize> = match streams(head) && length > sinks + recents {
                        true => (0..sinks).chain(length - recents..length).collect(),
                        false => (0..length).collect(),
                    };
                    let kept: Vec<usize> = kept.into_iter().map(|at| at as usize).collect();
                    assert_eq!(kept, expected, "{} {config} head {head}", tested.name);
                    let pair = row * KV_HEADS + head / group;
                    let capacity = cache.layout().capacities()[pair];
                    assert!(!streams(head) || capacity <= sinks + recents, "{capacity} slots");
                    expected
                });
            }
        }
    }
}

/// Gates come from the authors' files; equal ones stream from the first on.
#[test]
fn duo_attention_reads_files_and_meets_budgets() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("full_attention_heads.tsv");
    std::fs::write(&path, "0.5\t1.2\n0.5\t0.5\n-0.1\t0.5\n").unwrap();
    let built = policy(json!({"policy": "duo-attention", "alpha": path}));
    assert_eq!(built.config()["alpha"], json!([[0.5, 1.0], [0.5, 0.5], [0.0, 0.5]]));
    let device = &devices()[0].device;
    let trace = Trace::new(1, 2, 90, device);
    let kept = |config: Value| -> Vec<usize> {
        let policy = policy(config);
        let of = |index| trace.prefill(&*policy, LayerContext { index, count: 3 });
        (0..3).flat_map(|index| of(index).layout().lengths().to_vec()).collect()
    };
    let alpha = &built.config()["alpha"];
    let config = json!({"policy": "duo-attention", "alpha": alpha, "sinks": 4, "recents": 6});
    assert_eq!(kept(config.clone()), [10, 90, 10, 90, 10, 90]);
    for (budget, sum) in [(json!(50), 300), (json!(10), 60), (json!(5), 30), (json!(90), 540)] {
        let mut config = config.clone();
        config["budget"] = budget;
        assert_eq!(kept(config.clone()).iter().sum::<usize>(), sum, "{config}");
    }
}
