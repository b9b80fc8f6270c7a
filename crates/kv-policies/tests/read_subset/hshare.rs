//! HShare: lists of other heads, layers and steps.

use super::*;

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
    let sources = read_i32("sources", cache.int_state("sources").unwrap().clone()).unwrap();
    sources.into_iter().map(|source| source as usize).collect()
}

#[test]
fn hshare_reads_the_lists_of_an_f64_reference() {
    for tested in quick_devices("read_subset") {
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
    for tested in quick_devices("read_subset") {
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

/// Layers read lists of layers before them, in the same step: of a batch whose rows have maps of
/// their own, with the first layer dense.
#[test]
fn hshare_layers_read_each_others_lists() {
    for tested in quick_devices("read_subset") {
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
        assert!(policy.capabilities().needs_all_layers);
        let of_row = |row: usize| {
            let seen: Vec<OwnedObservation> = layers
                .iter()
                .enumerate()
                .map(|(index, traces)| {
                    let layer = LayerContext { index, count: count as usize };
                    traces[row].prompt().observed(|seen| {
                        let seen = Observation { layer, ..seen.clone() };
                        OwnedObservation::new(&seen, Needs { window: 12, ..Needs::default() })
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
        // Heads of layers that took another's lists count among those that did not look.
        let reads: Reads = caches.iter().filter_map(|cache| Reads::of(cache).unwrap()).sum();
        assert_eq!(reads.steps, 3 * 2 * 4 * STEPS as u64, "{}", tested.name);
        let retrieved: usize = shared[1..].iter().flat_map(|layer| &layer.retrievals).sum();
        assert_eq!(reads.retrieved, retrieved as u64, "{}", tested.name);
        // One layer of three, three heads of four, every other step.
        let expected = 0.25 * STEPS.div_ceil(2) as f64 / STEPS as f64;
        assert!((reads.ratio() - expected).abs() < 1e-9, "{}: {}", tested.name, reads.ratio());
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
            let output = list.attend(&mut cache, q).unwrap().output;
            let output = read_f32("output", output).unwrap();
            let error = relative_error(&output, &golden.tensor("out_f16weights").values);
            assert!(error < 1e-3, "{} on {}: {error}", golden.name, tested.name);
        }
    }
}
