use std::ops::ControlFlow;

use kv_core::MemoryReport;
use kv_models::{Finish, Model, ModelError, Request, Sampling, Session, generate, generate_from};
use kv_policies::build;
use kv_testing::{devices, exact_devices, skip};
use serde_json::json;

use super::support::{
    configure, embedded, embedded_folder, embedded_in_f32, every_policy, prompts, run, run_requests,
};

const NEW: usize = 12;

/// A batch of prompts with different lengths gives exactly the tokens that each gives alone.
#[test]
fn a_batch_gives_what_each_request_gives_alone() {
    for tested in devices() {
        let model = embedded_in_f32(&tested);
        let prompts = prompts(&model);
        for config in every_policy(0.3, &tested) {
            let together = run(&model, &config, &prompts, NEW);
            for (index, prompt) in prompts.iter().enumerate() {
                let mut request = Request::greedy(prompt.clone(), NEW);
                request.sampling.seed = prompt.len() as u64 + 7 * index as u64;
                request.stop_at_end = false;
                let alone = run_requests(&model, &config, &[request]);
                assert_eq!(
                    together[index].tokens, alone[0].tokens,
                    "{config} on {} request {index}",
                    tested.name
                );
            }
        }
    }
}

/// On the CPU, where every row is computed in an order of its own, a batch's rows are bit for bit
/// what they are alone: prompts of other lengths, and two of the same.
#[test]
fn rows_of_a_batch_are_bit_identical_on_the_cpu() {
    let Some(tested) = devices().into_iter().find(|tested| tested.name == "cpu") else {
        return skip(
            "rows_of_a_batch_are_bit_identical_on_the_cpu",
            "the CPU backend is not compiled in",
        );
    };
    let model = embedded(&tested);
    let text = prompts(&model).concat().repeat(2);
    let batch = [&text[..300], &text[7..407], &text[20..320], &text[40..490]].map(<[u32]>::to_vec);
    let decode = |config: &serde_json::Value, prompts: &[Vec<u32>], rows: &[usize]| {
        let seeds: Vec<u64> = rows.iter().map(|row| *row as u64).collect();
        let policy = build(config).unwrap();
        let mut session = Session::start(&model, policy, prompts, &seeds, 40).unwrap();
        for step in 0..40 {
            let tokens: Vec<u32> = rows.iter().map(|row| text[5 * row + step]).collect();
            session.step(&tokens).unwrap();
        }
        session.read_logits().unwrap()
    };
    for config in every_policy(0.3, &tested) {
        let together = decode(&config, &batch, &[0, 1, 2, 3]);
        for (row, prompt) in batch.iter().enumerate() {
            let alone = decode(&config, std::slice::from_ref(prompt), &[row]);
            assert_eq!(together[row], alone[0], "{config} row {row}");
        }
    }
}

/// A finished sequence neither needs positions nor fails the others, and a sequence ends at the
/// model's last position.
#[test]
fn sequences_end_at_the_last_position() {
    let tested = devices().remove(0);
    let model = embedded(&tested);
    let positions = model.config().max_positions;
    let text = prompts(&model).concat().repeat(positions / 100);
    let policy = || build(&json!({"policy": "snapkv", "budget": 64})).unwrap();
    let request = |tokens: usize, new: usize| Request {
        stop_at_end: false,
        ..Request::greedy(text[..tokens].to_vec(), new)
    };
    let requests = [request(positions - 5, 5), request(50, 30), request(positions - 5, 50)];
    let go_on = |_: &_| ControlFlow::Continue(());
    let together = generate(&model, policy(), &requests, go_on).unwrap();
    for (result, expected) in together.iter().zip([5, 30, 6]) {
        assert_eq!((result.tokens.len(), result.finish), (expected, Finish::Length));
    }
    for (request, result) in requests.into_iter().zip(&together) {
        let alone = generate(&model, policy(), &[request], go_on).unwrap();
        assert_eq!(alone[0].tokens, result.tokens);
    }
}

/// More new tokens than the model has positions for need no more room than these.
#[test]
fn room_is_bounded_by_the_positions() {
    let tested = devices().remove(0);
    let model = embedded(&tested);
    let (config, dtype) = (model.config(), model.llama().dtype());
    let shape = (config.num_layers, config.num_kv_heads, config.head_dim);
    let whole = MemoryReport::full(config.max_positions, shape.0, shape.1, shape.2, dtype);
    let prompt = prompts(&model).remove(0);
    let named = |name: &str| json!({"policy": name, "budget": 0.5});
    let names = ["full", "snapkv", "h2o", "longflow", "d2o", "kvreviver", "balancekv-stream"];
    let sketch = json!({"policy": "kvreviver", "vague": "sketch", "budget": 0.5});
    for config in names.map(named).into_iter().chain([sketch]) {
        let policy = build(&config).unwrap();
        let prompts = std::slice::from_ref(&prompt);
        let session = Session::start(&model, policy, prompts, &[0], 1_000_000_000).unwrap();
        let (name, memory) = (session.policy().name(), session.memory());
        assert!(memory.allocated <= whole, "{name}: {memory:?}, at most {whole}");
    }
    let new_tokens = usize::MAX;
    let request = Request { stop: vec!["\n".into()], ..Request::greedy(prompt, new_tokens) };
    let outputs = run_requests(&model, &json!({"policy": "full"}), &[request]);
    assert!(outputs[0].tokens.len() < config.max_positions);
}

/// Renumbered tokens take positions anew, so that sequences go on.
#[test]
fn renumbered_sequences_go_on_beyond_the_positions() {
    let tested = devices().remove(0);
    let model = embedded(&tested);
    let positions = model.config().max_positions;
    let prompt = prompts(&model).concat().repeat(positions / 100)[..positions - 5].to_vec();
    let request = Request { stop_at_end: false, ..Request::greedy(prompt, 40) };
    let policy = json!({"policy": "streaming-llm", "budget": 64, "rerotate": true});
    assert_eq!(run_requests(&model, &policy, &[request])[0].tokens.len(), 40);
}

/// A model with a sliding window serves what fits into it and refuses by name what does not.
#[test]
fn sequences_stay_within_the_sliding_window() {
    let tested = devices().remove(0);
    let folder = embedded_folder();
    configure(folder.path(), "architectures", json!(["MistralForCausalLM"]));
    configure(folder.path(), "sliding_window", json!(300));
    let windowed = Model::from_folder(folder.path(), &tested.device, None).unwrap();
    let whole = embedded(&tested);
    let text = prompts(&whole).concat();
    let full = || build(&json!({"policy": "full"})).unwrap();
    let request = |tokens: usize, new_tokens: usize| Request {
        stop_at_end: false,
        ..Request::greedy(text[..tokens].to_vec(), new_tokens)
    };
    let go_on = |_: &_| ControlFlow::Continue(());
    let fitting = [request(290, 10), request(20, 100)];
    assert_eq!(
        generate(&windowed, full(), &fitting, go_on).unwrap(),
        generate(&whole, full(), &fitting, go_on).unwrap()
    );
    let is_refused = |error: ModelError, expected: usize| match error {
        ModelError::BeyondSlidingWindow { tokens, window } => {
            assert_eq!((tokens, window), (expected, 300));
        }
        error => panic!("{error}"),
    };
    is_refused(generate(&windowed, full(), &[request(290, 11)], go_on).unwrap_err(), 301);
    is_refused(generate(&windowed, full(), &[request(301, 0)], go_on).unwrap_err(), 301);
    let start = |new_tokens: usize| {
        Session::start(&windowed, full(), &[text[..290].to_vec()], &[0], new_tokens)
    };
    is_refused(start(11).unwrap_err(), 301);
    // What was not asked for at first is refused later on.
    let mut session = start(10).unwrap();
    (0..10).for_each(|_| session.step(&[7]).unwrap());
    is_refused(session.step(&[7]).unwrap_err(), 301);
}

/// A compressed cache saved, loaded and continued gives identical tokens.
#[test]
fn a_saved_session_goes_on_identically() {
    for tested in devices() {
        let model = embedded(&tested);
        let prompts = prompts(&model);
        for config in every_policy(0.3, &tested) {
            let expected = run(&model, &config, &prompts, NEW);
            let seeds: Vec<u64> = prompts
                .iter()
                .enumerate()
                .map(|(index, prompt)| prompt.len() as u64 + 7 * index as u64)
                .collect();
            let policy = build(&config).unwrap();
            let mut session =
                Session::start(&model, policy.clone(), &prompts, &seeds, NEW).unwrap();
            let column = |at: usize| -> Vec<u32> {
                expected.iter().map(|generated| generated.tokens[at]).collect()
            };
            (0..5).for_each(|at| session.step(&column(at)).unwrap());
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("session.safetensors");
            session.save(&path).unwrap();
            drop(session);
            let mut session = Session::resume(&model, policy, &path, &column(5)).unwrap();
            for at in 6..NEW {
                let best: Vec<u32> = session
                    .read_logits()
                    .unwrap()
                    .iter()
                    .map(|row| {
                        (0..row.len() as u32)
                            .rev()
                            .max_by(|&a, &b| row[a as usize].total_cmp(&row[b as usize]))
                            .unwrap()
                    })
                    .collect();
                assert_eq!(best, column(at), "{config} on {} token {at}", tested.name);
                session.step(&best).unwrap();
            }
            let other = build(&json!({"policy": "knorm", "budget": 0.123})).unwrap();
            assert!(Session::resume(&model, other, &path, &column(5)).is_err());
        }
    }
}

/// At a budget of 25 % the bytes allocated are at most 26 % of the full cache; what prefill took
/// beside them is one layer's, or all layers' where these are compressed together.
#[test]
fn memory_is_really_smaller() {
    for tested in devices() {
        let model = embedded(&tested);
        let prompt = prompts(&model)[0].repeat(3);
        let config = model.config();
        for name in [
            "snapkv",
            "adakv",
            "pyramidkv",
            "h2o",
            "uniform",
            "pyramidinfer",
            "d2o",
            "cam",
            "kvmerger",
        ] {
            let policy = build(&json!({"policy": name, "budget": 0.25})).unwrap();
            let session =
                Session::start(&model, policy, std::slice::from_ref(&prompt), &[0], 0).unwrap();
            let report = session.memory();
            let full = MemoryReport::full(
                prompt.len(),
                config.num_layers,
                config.num_kv_heads,
                config.head_dim,
                model.llama().dtype(),
            );
            // No new tokens were asked for: at most one slot a head is room for them.
            assert!(report.allocated as f64 <= 0.26 * full as f64, "{name}: {report:?} of {full}");
            assert!(report.metadata > 0, "{name}: {report:?}");
            let whole = if name == "d2o" { full } else { full / config.num_layers };
            assert_eq!(report.scratch, whole, "{name}: {report:?}");
            for layer in &session.cache().layers {
                let rows = layer.keys().dims()[0];
                assert_eq!(rows, layer.layout().total(), "{name}: the pool is what is reported");
            }
        }
    }
}

#[test]
fn sampling_is_seeded_and_streams() {
    for tested in devices() {
        let model = embedded(&tested);
        let prompt = prompts(&model).remove(0);
        let sample = |seed: u64| {
            let sampling = Sampling { temperature: 1.5, seed, ..Sampling::greedy() };
            let request = Request { sampling, ..Request::greedy(prompt.clone(), 20) };
            let mut streamed = String::new();
            let policy = build(&json!({"policy": "full"})).unwrap();
            let outputs = generate(&model, policy, &[request], |event| {
                streamed.push_str(event.text.as_deref().unwrap_or_default());
                ControlFlow::Continue(())
            })
            .unwrap();
            (outputs[0].clone(), streamed)
        };
        let (first, streamed) = sample(1);
        assert_eq!(sample(1).0, first);
        assert_ne!(sample(2).0.tokens, first.tokens);
        assert!(first.text.as_ref().unwrap().starts_with(&streamed));
    }
}

/// A repetition penalty lowers the logits of all tokens of a sequence, prompt included.
#[test]
fn repetition_is_penalised_as_in_transformers() {
    for tested in exact_devices("repetition penalty") {
        let model = embedded_in_f32(&tested);
        let prompts = prompts(&model);
        let full = || build(&json!({"policy": "full"})).unwrap();
        let request = |row: usize, repetition_penalty: f64| {
            let sampling = Sampling { repetition_penalty, ..Sampling::greedy() };
            Request { sampling, stop_at_end: false, ..Request::greedy(prompts[row].clone(), NEW) }
        };
        let requests = [request(0, 1.3), request(1, 1.0), request(2, 0.9)];
        let outputs = run_requests(&model, &json!({"policy": "full"}), &requests);
        for (row, (request, output)) in requests.iter().zip(&outputs).enumerate() {
            let mut tokens = request.tokens.clone();
            let mut session =
                Session::start(&model, full(), std::slice::from_ref(&tokens), &[0], NEW).unwrap();
            for (step, &token) in output.tokens.iter().enumerate() {
                let mut logits = session.read_logits().unwrap().remove(0);
                let penalty = request.sampling.repetition_penalty as f32;
                for (id, logit) in logits.iter_mut().enumerate() {
                    if tokens.contains(&(id as u32)) {
                        *logit = if *logit < 0.0 { *logit * penalty } else { *logit / penalty };
                    }
                }
                let best = (0..logits.len()).rev().max_by(|&a, &b| logits[a].total_cmp(&logits[b]));
                assert_eq!(best, Some(token as usize), "{} row {row} step {step}", tested.name);
                tokens.push(token);
                session.step(&[token]).unwrap();
            }
        }
        let plain = run_requests(&model, &json!({"policy": "full"}), &[request(0, 1.0)]);
        assert_ne!(plain[0].tokens, outputs[0].tokens);
        // Random draws take the penalty too.
        let mut drawn = request(0, 1.3);
        drawn.sampling = Sampling { temperature: 1e-4, ..drawn.sampling };
        assert_eq!(run_requests(&model, &json!({"policy": "full"}), &[drawn])[0], outputs[0]);
    }
}

/// A resumed session knows no tokens but those that it is told.
#[test]
fn a_penalty_needs_the_tokens_of_a_resumed_session() {
    let tested = devices().remove(0);
    let model = embedded(&tested);
    let prompt = prompts(&model).remove(0);
    let policy = || build(&json!({"policy": "snapkv", "budget": 64})).unwrap();
    let samplings = [Sampling { repetition_penalty: 1.2, ..Sampling::greedy() }];
    let start =
        || Session::start(&model, policy(), std::slice::from_ref(&prompt), &[0], 9).unwrap();
    let mut decoder = start().decoder(&samplings).unwrap();
    let expected: Vec<u32> = (0..5).map(|_| decoder.next_tokens().unwrap()[0]).collect();

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("session.safetensors");
    start().save(&path).unwrap();
    let resume = || Session::resume(&model, policy(), &path, &expected[..1]).unwrap();
    let error = resume().decoder(&samplings).unwrap_err();
    assert!(matches!(error, ModelError::UnknownHistory), "{error}");
    assert!(resume().with_history(vec![]).is_err());
    assert!(resume().with_history(vec![vec![5000]]).is_err());
    let history = [&prompt[..], &expected[..1]].concat();
    let resumed = resume().with_history(vec![history]).unwrap();
    let mut decoder = resumed.decoder(&samplings).unwrap();
    for token in &expected[1..] {
        assert_eq!(decoder.next_tokens().unwrap(), [*token]);
    }
}

#[test]
fn stop_strings_and_end_tokens_end() {
    for tested in devices() {
        let model = embedded(&tested);
        let prompt = prompts(&model).remove(0);
        let full = json!({"policy": "full"});
        let plain = run_requests(&model, &full, &[Request::greedy(prompt.clone(), 5)]);
        let text = plain[0].text.clone().unwrap();
        assert_eq!(text, "21963");
        let stop = vec![text[2..4].to_string()];
        let request = Request { stop, ..Request::greedy(prompt, 5) };
        let stopped = run_requests(&model, &full, &[request]);
        assert_eq!(stopped[0].text.as_deref(), Some(&text[..2]));
        assert_eq!(stopped[0].finish, Finish::Stop);
    }
}

/// Streams show what later tokens cannot take back, and in the end all of the text.
#[test]
fn streams_hold_back_the_beginning_of_a_stop_string() {
    let tested = devices().remove(0);
    let model = embedded(&tested);
    let prompt = prompts(&model).remove(0);
    let stream = |stop: &[&str], new_tokens: usize| {
        let stop = stop.iter().map(ToString::to_string).collect();
        let request = Request { stop, ..Request::greedy(prompt.clone(), new_tokens) };
        let policy = build(&json!({"policy": "full"})).unwrap();
        let mut events = Vec::new();
        let outputs = generate(&model, policy, &[request], |event| {
            events.push((event.token.is_some(), event.text.clone().unwrap()));
            ControlFlow::Continue(())
        })
        .unwrap();
        (events, outputs[0].text.clone().unwrap(), outputs[0].finish)
    };
    let texts = |texts: &[&str]| -> Vec<(bool, String)> {
        texts.iter().map(|text| (true, text.to_string())).collect()
    };
    // The answer is 21963.
    let (events, text, finish) = stream(&["196"], 5);
    assert_eq!((events, text.as_str(), finish), (texts(&["2", "", "", ""]), "2", Finish::Stop));
    // No token is left to complete the stop string.
    let (events, text, finish) = stream(&["196"], 3);
    let mut expected = texts(&["2", "", ""]);
    expected.push((false, "19".into()));
    assert_eq!((events, text.as_str(), finish), (expected, "219", Finish::Length));
}

/// A tokenizer with a token for each byte, as Llama 2's and Mistral's: random tokens are invalid
/// bytes and characters that are cut, which fail nothing.
#[test]
fn any_bytes_are_text() {
    let tested = devices().remove(0);
    let folder = embedded_folder();
    let bytes = (0..256).map(|byte| format!("<0x{byte:02X}>"));
    let words = (256..1024).map(|word| format!("▁{word}"));
    let vocabulary: serde_json::Map<String, serde_json::Value> =
        bytes.chain(words).zip(0..).map(|(token, id): (_, u32)| (token, id.into())).collect();
    let tokenizer = json!({
        "version": "1.0",
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ]},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [], "byte_fallback": true},
    });
    std::fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let model = Model::from_folder(folder.path(), &tested.device, None).unwrap();
    let requests: Vec<Request> = (0..16)
        .map(|seed| {
            let sampling = Sampling { temperature: 50.0, seed, ..Sampling::greedy() };
            Request { sampling, stop_at_end: false, ..Request::greedy(vec![7, 8], 25) }
        })
        .collect();
    let mut streamed = vec![String::new(); requests.len()];
    let outputs =
        generate(&model, build(&json!({"policy": "full"})).unwrap(), &requests, |event| {
            streamed[event.request] += event.text.as_deref().unwrap();
            ControlFlow::Continue(())
        })
        .unwrap();
    let mut cut = 0;
    for (output, streamed) in outputs.iter().zip(&streamed) {
        let text = output.text.as_deref().unwrap();
        assert_eq!(text, model.decode(&output.tokens).unwrap());
        // A character that is cut at the end is not shown.
        assert_eq!(streamed, text.trim_end_matches(char::REPLACEMENT_CHARACTER));
        cut += usize::from(streamed != text);
    }
    assert!(cut > 0 && streamed.concat().contains(char::REPLACEMENT_CHARACTER));
}

/// Cancelling ends the call; model and policy serve the next one as if nothing had been.
#[test]
fn a_cancelled_generation_leaves_everything_usable() {
    for tested in devices() {
        let model = embedded(&tested);
        let prompts = prompts(&model);
        let policy = build(&json!({"policy": "h2o", "budget": 0.5})).unwrap();
        let requests: Vec<Request> =
            prompts.iter().map(|prompt| Request::greedy(prompt.clone(), 8)).collect();
        let mut left = 4;
        let cancelled = generate(&model, policy.clone(), &requests, |_| {
            left -= 1;
            if left == 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })
        .unwrap();
        assert_eq!(cancelled.iter().map(|output| output.tokens.len()).sum::<usize>(), 4);
        assert!(cancelled.iter().all(|output| output.finish == Finish::Cancelled));
        let go =
            || generate(&model, policy.clone(), &requests, |_| ControlFlow::Continue(())).unwrap();
        let whole = go();
        assert_eq!(go(), whole);
        assert_eq!(whole[0].tokens[..2], cancelled[0].tokens[..2]);
    }
}

/// A question behind a compressed context: at once, or token by token.
#[test]
fn appending_is_the_same_at_once_and_step_by_step() {
    for tested in devices() {
        let model = embedded(&tested);
        let prompt = prompts(&model).remove(0);
        let (context, question) = prompt.split_at(prompt.len() - 20);
        let policy = build(&json!({"policy": "snapkv", "budget": 0.5})).unwrap();
        let start =
            || Session::start(&model, policy.clone(), &[context.to_vec()], &[0], 20).unwrap();
        let mut at_once = start();
        let before = at_once.append(&[question]).unwrap();
        assert_eq!(before.len(), question.len());
        let mut stepwise = start();
        question.iter().for_each(|&token| stepwise.step(&[token]).unwrap());
        let (a, b) = (at_once.read_logits().unwrap(), stepwise.read_logits().unwrap());
        let worst = a[0].iter().zip(&b[0]).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(worst < 1e-3, "{}: {worst}", tested.name);
    }
}

/// A question is appended once the prompt is compressed, and tokens follow it.
#[test]
fn questions_follow_compressed_prompts() {
    for tested in devices() {
        let model = embedded(&tested);
        let whole = prompts(&model);
        for config in
            [json!({"policy": "snapkv", "budget": 0.4}), json!({"policy": "h2o", "budget": 64})]
        {
            let policy = build(&config).unwrap();
            let requests: Vec<Request> = whole
                .iter()
                .map(|tokens| {
                    let (context, question) = tokens.split_at(tokens.len() - 20);
                    let question = question.to_vec();
                    Request { question, stop_at_end: false, ..Request::greedy(context.to_vec(), 6) }
                })
                .collect();
            let contexts: Vec<Vec<u32>> = requests.iter().map(|own| own.tokens.clone()).collect();
            let rooms = vec![26; contexts.len()];
            let seeds = vec![0; contexts.len()];
            let start = || {
                let policies = std::slice::from_ref(&policy);
                let started = Session::start_rows(&model, policies, &contexts, &seeds, &rooms);
                started.unwrap().remove(0)
            };
            let go_on = |_: &_| ControlFlow::Continue(());
            let batch = generate_from(start(), &requests, go_on).unwrap();
            assert_eq!(
                batch.outputs,
                generate(&model, policy.clone(), &requests, go_on).unwrap(),
                "{config} on {}",
                tested.name
            );
            let mut session = start();
            assert_eq!(batch.compressed, session.memory());
            assert!(batch.ended.in_use >= batch.compressed.in_use);
            let questions: Vec<&[u32]> =
                requests.iter().map(|request| &request.question[..]).collect();
            session.append(&questions).unwrap();
            let mut decoder = session.decoder(&vec![Sampling::greedy(); contexts.len()]).unwrap();
            for step in 0..6 {
                let drawn = decoder.next_tokens().unwrap();
                let own: Vec<u32> =
                    batch.outputs.iter().map(|output| output.tokens[step]).collect();
                assert_eq!(own, drawn, "{config} on {} step {step}", tested.name);
            }
            let mut unequal = requests.clone();
            unequal[1].question.pop();
            let error = generate(&model, policy.clone(), &unequal, go_on).unwrap_err();
            assert!(
                matches!(error, ModelError::UnequalPrompts { expected: 20, actual: 19 }),
                "{error}"
            );
        }
    }
}
