//! Recorded steps against steps whose kernels are launched one by one.

use kv_kernels::device_work;
use kv_models::{Decoder, Model, ModelError, Sampling, Session};
use kv_policies::build;
use kv_testing::{TestDevice, alone, devices, quick_devices, skip};
use serde_json::{Value, json};

use super::support::{GATES, embedded, prompts};

/// Steps of the longest runs, fewer where a driver in software may take half a second for each.
fn long(tested: &TestDevice) -> usize {
    if tested.runs_everything() { 500 } else { 160 }
}

fn gpus(test: &str) -> Vec<TestDevice> {
    let gpus: Vec<_> = devices().into_iter().filter(|tested| tested.name != "cpu").collect();
    if gpus.is_empty() {
        skip(test, "no GPU device: nothing else records steps");
    }
    gpus
}

fn start<'a>(model: &'a Model, config: &Value, steps: usize) -> Session<'a> {
    let policy = build(config).unwrap();
    Session::start(model, policy, &prompts(model), &[3, 4, 5], steps).unwrap()
}

/// Goes on from a copy of the session: the same bits.
fn decoder<'a>(session: &Session<'a>) -> Decoder<'a> {
    let samplings: Vec<Sampling> = (0..session.cache().batch() as u64)
        .map(|seed| Sampling { temperature: 0.8 * seed as f64, seed, ..Sampling::default() })
        .collect();
    session.fork().decoder(&samplings).unwrap()
}

/// The same tokens over up to 500 steps of growing context, greedy and drawn rows together, with
/// rows that end on the way.
#[test]
fn recorded_steps_give_the_tokens_of_launched_ones() {
    for tested in gpus("recorded_steps_give_the_tokens_of_launched_ones") {
        let model = embedded(&tested);
        let long = long(&tested);
        // Without evictions; and with one a step, once every head has reached its limit.
        let configs = [
            (json!({"policy": "full"}), long),
            (json!({"policy": "adakv", "budget": 0.3}), 60),
            (json!({"policy": "uniform", "budget": 0.3}), 60),
            (json!({"policy": "h2o", "budget": 64}), long),
            (json!({"policy": "tova", "budget": 64}), 60),
            (json!({"policy": "vatp", "budget": 64}), 60),
            // Many at once, which the host carries out between recorded steps.
            (json!({"policy": "h2o", "budget": 64, "interval": 16}), long),
            (json!({"policy": "vatp", "budget": 64, "interval": 9}), 60),
            (json!({"policy": "r-kv", "budget": 64, "interval": 20}), 100),
            (
                json!({"policy": "keepkv", "evictor": {"policy": "h2o", "interval": 8}, "budget": 64}),
                60,
            ),
            (json!({"policy": "streaming-llm", "budget": 64}), 60),
            // Bulks, and rows that have ended until nothing of them is older than its recents.
            (json!({"policy": "kvreviver", "vague": "sketch", "budget": 64}), long),
            // Blocks of quantised slots move in recorded steps of another kind.
            (json!({"policy": "kvreviver", "vague": "quantized", "budget": 150}), 240),
            // Of shares of their prompts, rows move blocks at different steps.
            (json!({"policy": "kvreviver", "vague": "quantized", "budget": 0.6}), 100),
            // Archived tokens that come back from host memory.
            (json!({"policy": "kvreviver", "vague": "archive", "budget": 150}), 240),
            // What goes is merged.
            (json!({"policy": "keepkv", "evictor": "h2o", "budget": 64}), long),
            (json!({"policy": "keepkv", "budget": 64}), 60),
            (json!({"policy": "d2o", "budget": 64}), 60),
            (json!({"policy": "d2o", "budget": 64, "official": true, "dynamic_layers": false}), 60),
            (json!({"policy": "cam", "budget": 64}), 60),
            // The host merges and halves between recorded steps.
            (json!({"policy": "kvmerger", "budget": 64, "interval": 16}), 60),
            (json!({"policy": "balancekv-stream", "budget": 96, "batch": 16}), 60),
            // What is read is chosen on the device; HShare's lists go from layer to layer.
            (json!({"policy": "quest", "budget": 64}), long),
            (json!({"policy": "top-k-oracle", "budget": 64}), 60),
            (json!({"policy": "double-sparsity", "budget": 64}), 60),
            (json!({"policy": "hshare", "budget": 64, "layers": 0.5}), 60),
            (json!({"policy": "duo-attention", "budget": 0.4, "alpha": GATES}), 60),
            // Blocks of steps share sets, and rows end in the midst of one; windows that move on
            // with the context.
            (json!({"policy": "cis", "budget": 64}), long),
            (json!({"policy": "cis-star", "budget": 64}), 60),
            (json!({"policy": "cis", "budget": 64, "labels": 0.125}), 60),
            (json!({"policy": "psaw", "phi": 0.2, "start": 0}), long),
            (json!({"policy": "cpe", "budget": 64, "psaw": {"phi": 0.2, "start": 0}}), long),
            // Rows fill up at different steps.
            (json!({"policy": "longflow", "budget": 300}), long),
            (json!({"policy": "longflow", "budget": 64, "scope": "head", "recents": 8}), 60),
            (
                json!({"policy": "combine", "prefill": {"policy": "snapkv", "budget": 64},
                    "decode": {"policy": "h2o", "budget": 70}}),
                60,
            ),
        ];
        for (config, steps) in tested.some(configs, 4) {
            let session = start(&model, &config, steps);
            let mut launched = decoder(&session).without_recording();
            let mut recorded = decoder(&session);
            for step in 0..steps {
                let (a, b) = (launched.next_tokens().unwrap(), recorded.next_tokens().unwrap());
                let rows = if step > steps / 2 { 1..3 } else { 0..3 };
                assert_eq!(a[rows.clone()], b[rows], "{config} on {} step {step}", tested.name);
                if step == steps / 2 {
                    launched.end(0).unwrap();
                    recorded.end(0).unwrap();
                }
            }
            assert!(!launched.is_recorded());
            // Steps of a fixed budget that move a block are of a second kind.
            let least = if config["budget"] == 150 { 2 } else { 1 };
            let kinds = recorded.recorded_kinds();
            assert!(kinds >= least, "{config} on {}: {kinds} kinds are recorded", tested.name);
            let of = |decoder: &Decoder<'_>| {
                let cache = decoder.session().cache();
                let lengths: Vec<_> =
                    cache.layers.iter().map(|layer| layer.layout().lengths().to_vec()).collect();
                (cache.seen.clone(), lengths, decoder.session().read_logits().unwrap()[1].clone())
            };
            let ((seen, lengths, a), (other_seen, other_lengths, b)) =
                (of(&launched), of(&recorded));
            assert_eq!((seen, lengths), (other_seen, other_lengths));
            assert_eq!(a, b, "{config} on {}: logits", tested.name);
        }
    }
}

/// From one replay to the next, the device's pools hold as many allocations of as many bytes.
#[test]
fn replayed_steps_allocate_nothing() {
    // Tests share the pools.
    if !alone(module_path!(), "replayed_steps_allocate_nothing") {
        return;
    }
    for tested in gpus("replayed_steps_allocate_nothing") {
        let model = embedded(&tested);
        let configs = [
            json!({"policy": "full"}),
            json!({"policy": "h2o", "budget": 64}),
            json!({"policy": "longflow", "budget": 64}),
            json!({"policy": "keepkv", "evictor": "h2o", "budget": 64}),
            json!({"policy": "kvreviver", "vague": "sketch", "budget": 64}),
            json!({"policy": "kvreviver", "vague": "quantized", "budget": 300}),
            json!({"policy": "kvreviver", "vague": "archive", "budget": 300}),
            json!({"policy": "cis", "budget": 64}),
            json!({"policy": "cis", "budget": 64, "labels": 4}),
            json!({"policy": "r-kv", "budget": 64, "interval": 100}),
        ];
        for config in tested.some(configs, 3) {
            let mut decoder = decoder(&start(&model, &config, 60));
            let mut usages = Vec::new();
            for _ in 0..60 {
                decoder.next_tokens().unwrap();
                tested.device.sync().unwrap();
                if decoder.is_recorded() {
                    let usage = tested.device.memory_pool_usage().unwrap();
                    usages.push([usage.number_allocs, usage.bytes_in_use, usage.bytes_reserved]);
                }
            }
            assert!(usages.len() > 40, "{config} on {}: {} replays", tested.name, usages.len());
            // The first step behind the recording lets go of what was there before.
            let settled = &usages[2..];
            assert!(settled.iter().all(|own| *own == settled[0]), "{config}: {settled:?}");
        }
    }
}

/// Steps that begin before the host has read what they decode draw the same tokens, which are in
/// the caches then.
#[test]
fn steps_ahead_of_the_host_draw_the_same() {
    for tested in gpus("steps_ahead_of_the_host_draw_the_same") {
        let model = embedded(&tested);
        for config in [
            json!({"policy": "full"}),
            json!({"policy": "h2o", "budget": 64}),
            json!({"policy": "longflow", "budget": 64}),
            json!({"policy": "cis", "budget": 64}),
        ] {
            let steps = 40;
            let session = start(&model, &config, steps + 1);
            let mut launched = decoder(&session).without_recording();
            let mut ahead = decoder(&session).overlapped();
            for step in 0..steps {
                let (a, b) = (launched.next_tokens().unwrap(), ahead.next_tokens().unwrap());
                let rows = if step > steps / 2 { 1..3 } else { 0..3 };
                assert_eq!(a[rows.clone()], b[rows], "{config} on {} step {step}", tested.name);
                if step == steps / 2 {
                    launched.end(0).unwrap();
                    ahead.end(0).unwrap();
                }
            }
            assert!(ahead.has_step_in_flight() && !launched.has_step_in_flight());
            launched.next_tokens().unwrap();
            let of = |decoder: Decoder<'_>| {
                let session = decoder.into_session().unwrap();
                let logits = session.read_logits().unwrap();
                let lengths = session.cache().layers[0].layout().lengths().to_vec();
                let kv_heads = lengths.len() / 3;
                (
                    session.cache().seen[1..].to_vec(),
                    lengths[kv_heads..].to_vec(),
                    logits[1].clone(),
                )
            };
            assert_eq!(of(launched), of(ahead), "{config} on {}", tested.name);
        }
        // The last step that there is room for is taken, and the next one says why not.
        let limited = start(&model, &json!({"policy": "full"}), 6);
        let mut full = decoder(&limited).overlapped();
        (0..7).for_each(|_| drop(full.next_tokens().unwrap()));
        assert!(!full.has_step_in_flight());
        full.into_session().unwrap();
        let mut full = decoder(&limited).overlapped();
        (0..7).for_each(|_| drop(full.next_tokens().unwrap()));
        let error = full.next_tokens().unwrap_err();
        assert!(error.to_string().contains("capacity"), "{error}");
        assert!(matches!(full.next_tokens().unwrap_err(), ModelError::DecoderFailed));
    }
}

/// Questions go in as other tokens do, before drawn tokens and behind them, drawn with a repetition
/// penalty too. An empty question changes nothing.
#[test]
fn questions_are_appended_as_other_tokens_are() {
    for tested in quick_devices("recorded") {
        let model = embedded(&tested);
        for config in [
            json!({"policy": "snapkv", "budget": 0.5}),
            json!({"policy": "h2o", "budget": 64}),
            json!({"policy": "cam", "budget": 64}),
        ] {
            let name = format!("{config} on {}", tested.name);
            let session = start(&model, &config, 60);
            for repetition_penalty in [1.0, 1.3] {
                let sampling =
                    Sampling { temperature: 0.8, repetition_penalty, ..Sampling::default() };
                let decoder = || session.fork().decoder(&[sampling; 3]).unwrap();
                let (mut tokens, mut questions) = (decoder(), decoder());
                let row: Vec<u32> = (0..9).map(|at| 20 + at * 17).collect();
                for drawn in [3, 2] {
                    tokens.append(&[&row[..]; 3]).unwrap();
                    questions.append_question(&[&row[..]; 3]).unwrap();
                    questions.append_question(&[&row[..0]; 3]).unwrap();
                    for _ in 0..drawn {
                        let own = tokens.next_tokens().unwrap();
                        assert_eq!(own, questions.next_tokens().unwrap(), "{name}");
                    }
                }
                let error = questions.append_question(&[&row[..]; 2]).unwrap_err();
                let expected = ModelError::UnequalPrompts { expected: 3, actual: 2 };
                assert_eq!(error.to_string(), expected.to_string(), "{name}");
            }
        }
    }
}

/// Copies of sequences go on as the sequences do, and ended ones stay ended.
#[test]
fn repeated_sequences_go_on_by_themselves() {
    for tested in quick_devices("recorded") {
        let model = embedded(&tested);
        for config in [
            json!({"policy": "full"}),
            json!({"policy": "adakv", "budget": 0.3}),
            json!({"policy": "kvreviver", "budget": 150}),
            json!({"policy": "hshare", "budget": 64}),
            json!({"policy": "balancekv-stream", "budget": 96}),
        ] {
            let name = format!("{config} on {}", tested.name);
            let mut session = start(&model, &config, 20);
            session.end(2);
            let repeated = session.repeated(2).unwrap();
            assert_eq!(repeated.live_bytes().len(), 6, "{name}");
            let mut both = repeated.decoder(&[Sampling::greedy(); 6]).unwrap();
            let mut one = session.decoder(&[Sampling::greedy(); 3]).unwrap();
            for step in 0..8 {
                let (own, twice) = (one.next_tokens().unwrap(), both.next_tokens().unwrap());
                assert_eq!(own[..2], twice[..2], "{name} step {step}");
                assert_eq!(own[..2], twice[3..5], "{name} step {step}");
            }
            assert_eq!(both.session().cache().seen[2], both.session().cache().seen[5], "{name}");
            assert_eq!(both.session().cache().seen[..3], one.session().cache().seen, "{name}");
        }
    }
    let tested = devices().remove(0);
    let model = embedded(&tested);
    let session = start(&model, &json!({"policy": "full"}), 1);
    assert!(matches!(session.repeated(0).unwrap_err(), ModelError::EmptyPrompt));
}

/// A text's own tokens in place of drawn ones: the logits of launched steps, before drawn tokens
/// and behind them.
#[test]
fn appended_tokens_have_the_logits_of_launched_ones() {
    for tested in quick_devices("recorded") {
        let model = embedded(&tested);
        for config in [
            json!({"policy": "full"}),
            json!({"policy": "snapkv", "budget": 0.5}),
            json!({"policy": "h2o", "budget": 64}),
            json!({"policy": "longflow", "budget": 64}),
            json!({"policy": "keepkv", "evictor": "h2o", "budget": 64}),
            json!({"policy": "kvreviver", "budget": 150}),
            json!({"policy": "cis", "budget": 64}),
        ] {
            let name = format!("{config} on {}", tested.name);
            let mut launched = start(&model, &config, 120);
            let mut appending = launched.fork().decoder(&vec![Sampling::greedy(); 3]).unwrap();
            let token = |row: usize, at: usize| ((row * 131 + at * 17) % 900 + 20) as u32;
            for part in [0..30, 30..31, 31..70] {
                let rows: Vec<Vec<u32>> =
                    (0..3).map(|row| part.clone().map(|at| token(row, at)).collect()).collect();
                let rows: Vec<&[u32]> = rows.iter().map(Vec::as_slice).collect();
                let (expected, found) =
                    (launched.append(&rows).unwrap(), appending.append(&rows).unwrap());
                assert_eq!(found.len(), part.len(), "{name}");
                for (index, (a, b)) in expected.into_iter().zip(found).enumerate() {
                    // Another test's thread may be recording.
                    let _work = device_work();
                    assert_eq!(a.into_data(), b.into_data(), "{name}: token {index}");
                }
                // The token that is drawn behind them is the likeliest, and so is the next one. The
                // last one drawn is not in the cache, and the next part replaces it.
                let likeliest = |session: &Session<'_>| -> Vec<u32> {
                    let logits = session.read_logits().unwrap();
                    let top = |row: &Vec<f32>| row.iter().copied().fold(f32::MIN, f32::max);
                    let best = |row: &Vec<f32>| row.iter().position(|logit| *logit == top(row));
                    logits.iter().map(|row| best(row).unwrap() as u32).collect()
                };
                let drawn = appending.next_tokens().unwrap();
                assert_eq!(drawn, likeliest(&launched), "{name}");
                launched.step(&drawn).unwrap();
                assert_eq!(appending.next_tokens().unwrap(), likeliest(&launched), "{name}");
                assert_eq!(appending.session().cache().seen, launched.cache().seen, "{name}");
            }
            let recorded = appending.is_recorded();
            assert_eq!(recorded, tested.name != "cpu", "{name}");
            let one: &[u32] = &[5];
            let unequal = appending.append(&[one, one, &[5, 6]]).unwrap_err();
            assert!(matches!(unequal, ModelError::UnequalPrompts { .. }), "{unequal}");
            let beyond = appending.append(&[one, one, &[5_000]]).unwrap_err();
            assert!(matches!(beyond, ModelError::TokenOutOfRange { token: 5_000, .. }), "{beyond}");
            appending.append(&[one, one, one]).unwrap();
        }
    }
}

/// Two sequences in generation at once record one after the other, and each by itself.
#[test]
fn decoders_side_by_side_do_not_disturb_each_other() {
    for tested in gpus("decoders_side_by_side_do_not_disturb_each_other") {
        let model = embedded(&tested);
        let session = start(&model, &json!({"policy": "full"}), 30);
        let mut alone = decoder(&session).without_recording();
        let expected: Vec<_> = (0..30).map(|_| alone.next_tokens().unwrap()).collect();
        let mut first = decoder(&session);
        let mut second = decoder(&session);
        for expected in &expected {
            assert_eq!(first.next_tokens().unwrap(), *expected, "{}", tested.name);
            assert_eq!(second.next_tokens().unwrap(), *expected, "{}", tested.name);
        }
        assert!(first.is_recorded() && second.is_recorded());
        // One that goes in the midst of recording leaves the way free.
        let mut third = decoder(&session);
        (0..4).for_each(|_| drop(third.next_tokens().unwrap()));
        drop(third);
        let mut fourth = decoder(&session);
        for expected in &expected {
            assert_eq!(fourth.next_tokens().unwrap(), *expected, "{}", tested.name);
        }
        assert!(fourth.is_recorded());
    }
}

/// Away from the model's thread, decoders launch every kernel, wherever their sessions began.
#[test]
fn decoders_move_between_threads() {
    for tested in gpus("decoders_move_between_threads") {
        let model = embedded(&tested);
        let session = start(&model, &json!({"policy": "full"}), 24);
        let mut alone = decoder(&session).without_recording();
        let expected: Vec<_> = (0..24).map(|_| alone.next_tokens().unwrap()).collect();
        // Before it is recorded, and behind.
        let (session, expected) = (&session, &expected);
        for moved in [2, 3, 9] {
            let mut here = decoder(session);
            let first: Vec<_> = (0..moved).map(|_| here.next_tokens().unwrap()).collect();
            let rest = std::thread::scope(|scope| {
                let there = scope.spawn(move || {
                    let rest: Vec<_> = (moved..24).map(|_| here.next_tokens().unwrap()).collect();
                    assert!(!here.is_recorded());
                    let mut own = decoder(session);
                    let all: Vec<_> = (0..24).map(|_| own.next_tokens().unwrap()).collect();
                    assert!(!own.is_recorded());
                    assert_eq!(all, *expected);
                    rest
                });
                there.join().unwrap()
            });
            assert_eq!([first, rest].concat(), *expected, "{} moved at {moved}", tested.name);
        }
    }
}

/// Rows that ended before they had a decoder stay where they are.
#[test]
fn rows_may_have_ended_before() {
    for tested in quick_devices("recorded") {
        let model = embedded(&tested);
        let mut session = start(&model, &json!({"policy": "full"}), 20);
        let expected = session.cache().seen[0] - 1;
        session.end(0);
        let mut decoder = decoder(&session);
        (0..20).for_each(|_| drop(decoder.next_tokens().unwrap()));
        let cache = decoder.session().cache();
        assert_eq!(cache.seen[0], expected, "{}", tested.name);
        // All that the row decoded stands at one position, on the device too.
        let positions = cache.layers[0].read_positions().unwrap();
        let live = cache.layers[0].layout().live(0);
        assert!(positions[live].iter().all(|&position| position <= expected as i32));
    }
}

/// Policies that ask the host are launched; a full cache is an error before anything runs.
#[test]
fn what_cannot_be_recorded_is_launched_and_limits_hold() {
    for tested in gpus("what_cannot_be_recorded_is_launched_and_limits_hold") {
        let model = embedded(&tested);
        let mut launched =
            decoder(&start(&model, &json!({"policy": "r-kv", "budget": 0.5, "interval": 1}), 8));
        (0..8).for_each(|_| drop(launched.next_tokens().unwrap()));
        assert!(!launched.is_recorded());
        let mut recorded = decoder(&start(&model, &json!({"policy": "full"}), 6));
        (0..7).for_each(|_| drop(recorded.next_tokens().unwrap()));
        assert!(recorded.is_recorded());
        let error = recorded.next_tokens().unwrap_err();
        assert!(matches!(error, ModelError::Cache(_)), "{error}");
        assert!(error.to_string().contains("capacity"), "{error}");
        assert!(matches!(recorded.next_tokens().unwrap_err(), ModelError::DecoderFailed));
        // Full with the very step that is recorded.
        let mut full = decoder(&start(&model, &json!({"policy": "full"}), 3));
        (0..4).for_each(|_| drop(full.next_tokens().unwrap()));
        assert!(full.is_recorded());
        let error = full.next_tokens().unwrap_err();
        assert!(error.to_string().contains("capacity"), "{error}");
    }
}
