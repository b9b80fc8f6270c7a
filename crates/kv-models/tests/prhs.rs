//! Windows that shrink with depth and frozen tokens against plain loops in f64, on the embedded
//! model.

use burn::tensor::{DType, Tensor};
use kv_core::{MemoryReport, read_f32};
use kv_models::{Model, ModelError, PrefillPass, Session};
use kv_policies::{
    Capabilities, FrozenTokens, KeyDrift, LayerContext, Needs, Observation, Policy, Recency, Reuse,
    VisibleWindow, build,
};
use kv_testing::{TestDevice, devices, quick_devices, quick_exact_devices, relative_error, skip};
use serde_json::{Value, json};

use super::plain::{Changes, PlainModel, softmax};
use super::support::{embedded, embedded_in_f32, prompts, warnings_of};

const LAYERS: usize = 4;
const SINKS: usize = 16;

/// PSAW and ETF in one, as a policy of both would have them.
#[derive(Debug)]
struct Both {
    psaw: Option<kv_policies::Psaw>,
    etf: Option<kv_policies::Etf>,
}

impl Policy for Both {
    fn name(&self) -> &'static str {
        "both"
    }

    fn config(&self) -> Value {
        json!({"policy": "both"})
    }

    fn visible_window(&self, layer: LayerContext) -> Option<VisibleWindow> {
        self.psaw.and_then(|psaw| psaw.window(layer))
    }

    fn frozen_tokens(&self, layer: LayerContext, tokens: usize) -> Option<FrozenTokens> {
        self.etf.and_then(|etf| etf.frozen(layer, tokens))
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { changes_prefill: true, ..Capabilities::default() }
    }
}

fn psaw(phi: f64, start: usize) -> Option<kv_policies::Psaw> {
    Some(kv_policies::Psaw { phi, start: Some(start), ..Default::default() })
}

fn etf(psi: f64, start: usize, reuse: Reuse) -> Option<kv_policies::Etf> {
    Some(kv_policies::Etf { psi, start: Some(start), reuse, ..Default::default() })
}

/// `floor((1 - base^((l - start) / (N - start))) count)` with `l = layer + 1`, in floats.
fn end(base: f64, start: Option<usize>, layer: usize, count: usize) -> usize {
    let start = start.unwrap_or(3 * LAYERS / 4);
    if layer < start {
        return 0;
    }
    let depth = (layer + 1 - start) as f64 / (LAYERS - start) as f64;
    // Floats may be just below a whole product.
    ((1.0 - base.powf(depth)) * count as f64 + 1e-9).floor() as usize
}

/// What a policy makes of a prompt of `tokens` tokens, straight from eq. (15) and (16).
fn with_changes<T>(policy: &Both, tokens: usize, run: impl FnOnce(&Changes<'_>) -> T) -> T {
    let sees = |layer: usize, query: usize, key: usize| {
        let first = policy.psaw.map_or(0, |psaw| end(psaw.phi, psaw.start, layer, query + 1));
        key < SINKS || key + 1 >= first
    };
    let copies = policy.etf.is_some_and(|etf| etf.reuse == Reuse::KeysValues);
    let frozen = |layer: usize, token: usize| {
        let last = policy.etf.map_or(0, |etf| end(etf.psi, etf.start, layer, tokens));
        // The first layer has nothing below it to copy.
        (SINKS..last).contains(&token) && (layer > 0 || !copies)
    };
    run(&Changes { sees: &sees, frozen: &frozen, copies })
}

fn cases() -> Vec<Both> {
    let (hidden, copied) = (Reuse::Hidden, Reuse::KeysValues);
    vec![
        Both { psaw: psaw(0.3, 1), etf: None },
        Both { psaw: psaw(1e-9, 0), etf: None },
        Both { psaw: None, etf: etf(0.3, 1, hidden) },
        Both { psaw: None, etf: etf(0.3, 1, copied) },
        Both { psaw: psaw(0.4, 0), etf: etf(0.5, 0, hidden) },
        Both { psaw: psaw(0.4, 2), etf: etf(1e-6, 0, copied) },
    ]
}

fn model(tested: &TestDevice) -> Model {
    Model::load("needle-1m", &tested.device, Some(DType::F32)).unwrap()
}

/// Some hundred tokens, and fewer than there are sinks.
fn texts(model: &Model) -> [Vec<u32>; 2] {
    let text = prompts(model).concat();
    [text[..230].to_vec(), text[..10].to_vec()]
}

/// Hidden states of all tokens, keys and values of all layers, and column sums of computed queries.
#[test]
fn prefill_agrees_with_plain_loops() {
    let plain = PlainModel::new();
    for tested in quick_exact_devices("prefill_agrees_with_plain_loops") {
        let model = model(&tested);
        for tokens in texts(&model) {
            for policy in cases() {
                let context = format!("{policy:?} of {} on {}", tokens.len(), tested.name);
                let (hidden, states) =
                    with_changes(&policy, tokens.len(), |changes| plain.run(&tokens, changes));
                let flat = |rows: &[Vec<f64>]| rows.concat();
                let heads = |tensor: &Tensor<4>| {
                    let [_, heads, tokens, dim] = tensor.dims();
                    let rows = tensor.clone().swap_dims(1, 2).reshape([tokens, heads * dim]);
                    read_f32("heads", rows).unwrap()
                };
                let needs = Needs { column_sums: true, ..Needs::default() };
                let pass = PrefillPass { needs, by: Some(&policy), ..PrefillPass::default() };
                let prefilled = model.llama().prefill(&[&tokens], pass, &mut |seen| {
                    let state = &states[seen.layer.index];
                    for (what, actual, expected) in
                        [("keys", seen.keys, &state.keys), ("values", seen.values, &state.values)]
                    {
                        let error = relative_error(&heads(actual), &flat(expected));
                        let layer = seen.layer.index;
                        assert!(error < 1e-4, "{context}: {what} of layer {layer} off by {error}");
                    }
                    let sums = read_f32("sums", seen.column_sums.clone().unwrap()).unwrap();
                    let frozen = policy.frozen_tokens(seen.layer, tokens.len());
                    let frozen = frozen.map_or(0..0, |frozen| frozen.tokens);
                    let expected = state.attention.iter().flat_map(|rows| {
                        let computed =
                            rows.iter().enumerate().filter(|(at, _)| !frozen.contains(at));
                        let mut sums = vec![0.0; tokens.len()];
                        computed.for_each(|(_, row)| {
                            row.iter().zip(&mut sums).for_each(|(share, sum)| *sum += share);
                        });
                        sums
                    });
                    let error = relative_error(&sums, &expected.collect::<Vec<f64>>());
                    assert!(error < 1e-4, "{context}: column sums off by {error}");
                    Ok(None)
                });
                let actual = read_f32("hidden", prefilled.unwrap().hidden).unwrap();
                let error = relative_error(&actual, &flat(&hidden));
                assert!(error < 1e-4, "{context}: hidden states off by {error}");
            }
        }
    }
}

/// Rows of a batch are what they are alone, in decode too.
#[test]
fn batches_are_what_their_rows_are_alone() {
    for tested in quick_devices("prhs") {
        let model = embedded(&tested);
        let text = prompts(&model).concat();
        let prompts = [&text[..150], &text[30..180], &text[7..100]].map(<[u32]>::to_vec);
        let continued = &text[200..206];
        for config in [
            json!({"policy": "etf", "psi": 0.3, "start": 1}),
            json!({"policy": "etf", "psi": 0.3, "start": 1, "reuse": "keys-values", "sinks": 0}),
            json!({"policy": "psaw", "phi": 0.3, "start": 1}),
            json!({"policy": "psaw", "phi": 0.1, "start": 0, "free": true}),
        ] {
            let run = |prompts: &[Vec<u32>]| {
                let policy = build(&config).unwrap();
                let seeds = vec![0; prompts.len()];
                let mut session = Session::start(&model, policy, prompts, &seeds, 6).unwrap();
                for &token in continued {
                    session.step(&vec![token; prompts.len()]).unwrap();
                }
                session.read_logits().unwrap()
            };
            let together = run(&prompts);
            for (row, prompt) in prompts.iter().enumerate() {
                let alone = run(std::slice::from_ref(prompt)).remove(0);
                let worst = alone.iter().zip(&together[row]).map(|(a, b)| (a - b).abs());
                let worst = worst.fold(0.0, f32::max);
                assert!(worst < 1e-3, "{config} row {row} on {}: {worst}", tested.name);
            }
        }
    }
}

/// Without anything to hide or to freeze, all is as under the full cache, bit for bit.
#[test]
fn schedules_of_nothing_change_nothing() {
    for tested in quick_devices("prhs") {
        let model = embedded(&tested);
        let prompts = prompts(&model);
        let logits = |config: Value| {
            let policy = build(&config).unwrap();
            let mut session = Session::start(&model, policy, &prompts, &[0; 3], 4).unwrap();
            let first = session.read_logits().unwrap();
            (0..3).for_each(|_| session.step(&[5, 6, 7]).unwrap());
            (first, session.read_logits().unwrap())
        };
        let expected = logits(json!({"policy": "full"}));
        for config in [
            // They would begin behind the last of four layers.
            json!({"policy": "psaw", "start": 4}),
            json!({"policy": "etf", "start": 4}),
            json!({"policy": "psaw", "phi": 1.0, "start": 0}),
            json!({"policy": "etf", "psi": 1.0, "start": 0, "reuse": "keys-values"}),
            json!({"policy": "etf", "psi": 0.1, "start": 0, "sinks": 100_000}),
            json!({"policy": "psaw", "phi": 0.1, "start": 40, "free": true}),
        ] {
            assert!(logits(config.clone()) == expected, "{config} on {}", tested.name);
        }
    }
}

/// What changes the prompt's computation has a pass of its own; the others are none the wiser.
#[test]
fn policies_that_change_a_prompt_prefill_alone() {
    let tested = devices().remove(0);
    let model = embedded(&tested);
    let prompts = prompts(&model);
    let configs = [
        json!({"policy": "full"}),
        json!({"policy": "etf", "psi": 0.1, "start": 0}),
        json!({"policy": "psaw", "phi": 0.1, "start": 0}),
        json!({
            "policy": "combine",
            "prefill": {"policy": "psaw", "phi": 0.1, "start": 0},
            "decode": {"policy": "full"},
        }),
    ];
    let policies = configs.each_ref().map(|config| build(config).unwrap());
    let together = Session::start_many(&model, &policies, &prompts, &[0; 3], 2).unwrap();
    let logits: Vec<_> = together.iter().map(|session| session.read_logits().unwrap()).collect();
    for (policy, logits) in policies.iter().zip(&logits) {
        let alone = Session::start(&model, policy.clone(), &prompts, &[0; 3], 2).unwrap();
        assert_eq!(alone.read_logits().unwrap(), *logits, "{policy:?}");
    }
    assert!(logits[0] != logits[1] && logits[0] != logits[2]);
    assert_eq!(logits[2], logits[3]);
}

/// Freeing gives the same tokens in fewer bytes, prompt and decode; copied keys and values hold a
/// second layer while the prompt is computed.
#[test]
fn bytes_follow_the_schedule() {
    for tested in quick_devices("prhs") {
        let model = embedded_in_f32(&tested);
        let config = model.config();
        let prompt = prompts(&model).concat();
        let tokens = prompt.len();
        let start = |config: Value| {
            let policy = build(&config).unwrap();
            Session::start(&model, policy, std::slice::from_ref(&prompt), &[0], 200).unwrap()
        };
        let steps = if tested.name == "cpu" { 200 } else { 20 };
        let decoded = |mut session: Session<'_>| {
            let mut logits = Vec::new();
            for &token in &prompt[..steps] {
                session.step(&[token]).unwrap();
                logits = session.read_logits().unwrap().remove(0);
            }
            (logits, session.memory().in_use)
        };
        let full = |tokens: usize, layers: usize| {
            let dtype = model.llama().dtype();
            MemoryReport::full(tokens, layers, config.num_kv_heads, config.head_dim, dtype)
        };
        let of = |free: bool| json!({"policy": "psaw", "phi": 0.2, "start": 0, "free": free});
        let (whole, freed) = (start(of(false)), start(of(true)));
        assert_eq!(whole.memory().in_use, full(tokens, LAYERS));
        let expected: usize = (0..LAYERS)
            .map(|layer| {
                // All but those between the sinks and what the next query sees.
                let first = end(0.2, Some(0), layer, tokens + 1).saturating_sub(1);
                full(tokens - first.saturating_sub(SINKS), 1)
            })
            .sum();
        assert_eq!(freed.memory().in_use, expected);
        let ((expected, whole), (logits, freed)) = (decoded(whole), decoded(freed));
        let worst = logits.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(worst < 1e-3, "{}: {worst}", tested.name);
        assert!(freed < whole * 3 / 4, "{freed} of {whole} bytes");
        for (reuse, layers) in [("hidden", 1), ("keys-values", 2)] {
            let session = start(json!({"policy": "etf", "psi": 0.3, "start": 1, "reuse": reuse}));
            assert_eq!(session.memory().scratch, full(tokens, layers));
            assert_eq!(session.memory().in_use, full(tokens, LAYERS));
        }
    }
}

/// A policy that needs queries of frozen tokens is refused; what is there is shown.
#[test]
fn needs_are_met_by_what_is_computed() {
    let tested = devices().remove(0);
    let model = embedded(&tested);
    let prompt = prompts(&model).remove(0);
    let tokens = prompt.len();
    let policy = Both { psaw: None, etf: etf(0.3, 1, Reuse::Hidden) };
    let run = |needs: Needs, see: &mut dyn FnMut(&Observation<'_>)| {
        let pass = PrefillPass { needs, by: Some(&policy), ..PrefillPass::default() };
        let mut observe = |seen: &Observation<'_>| {
            see(seen);
            Ok(None)
        };
        model.llama().prefill(&[&prompt], pass, &mut observe).map(|_| ())
    };
    let left = |layer: usize| tokens - end(0.3, Some(1), layer, tokens);
    let needs = Needs { window: left(3), column_sums: false, raw_queries: true };
    run(needs, &mut |seen| {
        assert_eq!(seen.window.as_ref().unwrap().dims()[2], left(3));
        let frozen = end(0.3, Some(1), seen.layer.index, tokens).saturating_sub(SINKS);
        assert_eq!(seen.raw_queries.as_ref().unwrap().dims()[2], tokens - frozen);
        assert_eq!(seen.tokens(), tokens);
    })
    .unwrap();
    let error = run(Needs { window: left(3) + 1, ..needs }, &mut |_| ()).unwrap_err();
    let computed = left(3);
    assert!(
        matches!(error, ModelError::FrozenQueries { layer: 3, computed: c, .. } if c == computed),
        "{error}"
    );

    /// Freezes what cannot be frozen.
    #[derive(Debug)]
    struct Wrong(FrozenTokens);
    impl Policy for Wrong {
        fn name(&self) -> &'static str {
            "wrong"
        }
        fn config(&self) -> Value {
            json!({"policy": "wrong"})
        }
        fn frozen_tokens(&self, _: LayerContext, _: usize) -> Option<FrozenTokens> {
            Some(self.0.clone())
        }
        fn capabilities(&self) -> Capabilities {
            Capabilities { changes_prefill: true, ..Capabilities::default() }
        }
    }
    for (range, reuse, reason) in
        [(0..tokens, Reuse::Hidden, "before the last"), (0..5, Reuse::KeysValues, "no layer below")]
    {
        let wrong = std::sync::Arc::new(Wrong(FrozenTokens { tokens: range, reuse }));
        let prompts = std::slice::from_ref(&prompt);
        let error = Session::start(&model, wrong, prompts, &[0], 1).unwrap_err();
        assert!(matches!(error, ModelError::InvalidFrozen { layer: 0, .. }), "{error}");
        assert!(error.to_string().contains(reason), "{error}");
    }
}

/// Steps of PSAW are recorded, and give what launched ones give.
#[test]
fn steps_are_recorded() {
    let gpus: Vec<_> = devices().into_iter().filter(|tested| tested.name != "cpu").collect();
    if gpus.is_empty() {
        skip("prhs::steps_are_recorded", "no GPU device: nothing else records steps");
    }
    for tested in gpus {
        let model = embedded(&tested);
        let policy = build(&json!({"policy": "psaw", "phi": 0.1, "start": 0})).unwrap();
        let session = Session::start(&model, policy, &prompts(&model), &[3, 4, 5], 40).unwrap();
        let samplings = vec![kv_models::Sampling::greedy(); 3];
        let mut launched = session.fork().decoder(&samplings).unwrap().without_recording();
        let mut recorded = session.fork().decoder(&samplings).unwrap();
        for step in 0..40 {
            let (a, b) = (launched.next_tokens().unwrap(), recorded.next_tokens().unwrap());
            assert_eq!(a, b, "{} step {step}", tested.name);
        }
        assert!(recorded.is_recorded());
        let of = |decoder: &kv_models::Decoder<'_>| decoder.session().read_logits().unwrap();
        assert_eq!(of(&launched), of(&recorded));
    }
}

/// On the model's own attention and keys, with constants fitted to them: theorems 7 and 8, and both
/// together (eq. 48).
#[test]
fn bounds_hold_on_real_attention() {
    let tested = devices().remove(0);
    let tokens = &texts(&model(&tested))[0];
    let (_, states) = PlainModel::new().run(tokens, &Changes::NONE);
    let (count, start, dim) = (tokens.len(), 1, 32);
    let (psaw, etf) = (psaw(0.3, start).unwrap(), etf(0.3, start, Reuse::KeysValues).unwrap());
    let norm = |row: &[f64]| row.iter().map(|x| x * x).sum::<f64>().sqrt();
    for head in 0..4 {
        let at = head / 2 * dim;
        let key = |layer: usize, token: usize| &states[layer].keys[token][at..at + dim];
        let updates: Vec<(usize, f64)> = (start..LAYERS)
            .map(|layer| {
                let context = LayerContext { index: layer, count: LAYERS };
                let largest = (0..etf.share(context).of(count)).map(|token| {
                    let pairs = key(layer, token).iter().zip(key(layer - 1, token));
                    norm(&pairs.map(|(a, b)| a - b).collect::<Vec<f64>>())
                });
                (layer + 1 - start, largest.fold(0.0, f64::max))
            })
            .collect();
        let drift = KeyDrift::fit(&updates).unwrap();
        for (layer, state) in states.iter().enumerate().skip(start) {
            let context = LayerContext { index: layer, count: LAYERS };
            let attention = &state.attention[head];
            let mut most = vec![0.0f64; count];
            for (query, row) in attention.iter().enumerate() {
                for (token, share) in row.iter().enumerate().skip(SINKS) {
                    most[query - token] = most[query - token].max(*share);
                }
            }
            let frozen = etf.share(context).of(count);
            for query in [40, 150, count - 1] {
                let first = psaw.share(context).first_seen(query);
                let distance = query + 1 - first;
                let dropped: f64 = attention[query][SINKS.min(first)..first].iter().sum();
                let tail = Recency::fit(&most, distance).unwrap().dropped_mass(distance);
                assert!(dropped <= tail, "layer {layer}: {dropped} dropped, bound {tail}");
                let own = &state.queries[query][head * dim..][..dim];
                let logits = (0..=query).map(|token| {
                    let below = layer - usize::from(token < frozen);
                    let pairs = own.iter().zip(key(below, token));
                    pairs.map(|(q, k)| q * k).sum::<f64>() / (dim as f64).sqrt()
                });
                let moved = softmax(logits);
                let gap = attention[query].iter().zip(&moved).map(|(a, b)| (a - b).abs());
                let gap = gap.sum::<f64>() / 2.0;
                let bound = drift.gap(norm(own), dim, layer + 1 - start);
                assert!(gap <= bound, "layer {layer}: gap {gap}, bound {bound}");
                // The attention to frozen keys that the window drops: at most the sum (eq. 48).
                let both: f64 = moved[SINKS.min(first)..first].iter().sum();
                assert!(both <= tail + bound, "layer {layer}: {both} dropped");
            }
        }
    }
}

/// Settings that leave every layer as it is are told once, however many sessions there are.
#[test]
fn windows_that_begin_behind_the_last_layer_are_told_once() {
    let tested = &devices()[0];
    let model = embedded(tested);
    let prompt = prompts(&model).remove(0);
    let told = |start: usize| {
        let policy = build(&json!({"policy": "psaw", "start": start})).unwrap();
        let prompts = [prompt.clone()];
        warnings_of(|| drop(Session::start(&model, policy.clone(), &prompts, &[0], 1).unwrap()))
    };
    let warning = told(17);
    let expected = "policy `psaw`: psaw's windows change nothing in this model: they begin behind \
                    layer 17 of 4";
    assert!(warning.contains(expected), "{warning}");
    assert_eq!(told(17), "");
    assert_eq!(told(3), "");
}
