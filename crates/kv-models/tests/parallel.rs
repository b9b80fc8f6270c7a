//! Tensor parallelism: ranks with parts of a model compute what one rank with all of it computes.

use std::collections::BTreeSet;
use std::net::TcpListener;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use burn::tensor::{DType, Device};
use kv_models::{
    Engine, EngineOptions, Job, LogitsShaper, Model, ModelError, Request, Sampling, Session, Update,
};
use kv_parallel::{Collective, Meeting, ParallelError, Shard, Solo, Threads};
use kv_policies::{Policy, build};
use kv_testing::{TestDevice, devices};
use safetensors::{SafeTensors, tensor::TensorView};
use serde_json::{Value, json};

use super::support::{configure, embedded_folder, every_policy, prompts, run};

const PATIENCE: Duration = Duration::from_secs(60);
/// New tokens of a request.
const COUNT: usize = 12;

fn cpu() -> TestDevice {
    devices().remove(0)
}

/// Each rank's result of `work` on its part of a model.
fn on_ranks<T: Send>(world: usize, name: &str, work: impl Fn(&Model) -> T + Sync) -> Vec<T> {
    let work = &work;
    let ranks: Vec<Arc<dyn Collective>> = match world {
        1 => vec![Arc::new(Solo)],
        _ => {
            let ranks = Threads::group(world, PATIENCE).unwrap();
            ranks.into_iter().map(|rank| Arc::new(rank) as Arc<dyn Collective>).collect()
        }
    };
    thread::scope(|scope| {
        let all: Vec<_> = ranks
            .into_iter()
            .map(|rank| {
                scope.spawn(move || {
                    let device = Device::flex();
                    work(&Model::load_part(name, &device, Some(DType::F32), rank).unwrap())
                })
            })
            .collect();
        all.into_iter().map(|one| one.join().unwrap()).collect()
    })
}

/// The embedded model with each key-value head twice: the numbers of the original, in four heads
/// that can be divided among four ranks.
fn with_four_heads() -> tempfile::TempDir {
    let folder = embedded_folder();
    let path = folder.path().join("model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let doubled = tensors.tensors().into_iter().map(|(name, view)| {
        let (mut shape, mut data) = (view.shape().to_vec(), view.data().to_vec());
        if name.contains("k_proj") || name.contains("v_proj") {
            data = data.chunks(data.len() / 2).flat_map(|head| [head, head].concat()).collect();
            shape[0] *= 2;
        }
        (name, view.dtype(), shape, data)
    });
    let doubled: Vec<_> = doubled.collect();
    let views = doubled.iter().map(|(name, dtype, shape, data)| {
        (name, TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    safetensors::serialize_to_file(views, None, &path).unwrap();
    configure(folder.path(), "num_key_value_heads", json!(4));
    folder
}

fn name_of(folder: &Path) -> &str {
    folder.to_str().unwrap()
}

/// Logits behind the prompts, and behind each of some appended tokens.
fn logits(model: &Model) -> Vec<f32> {
    let prompts = prompts(model);
    let policy = build(&json!({"policy": "full"})).unwrap();
    let mut session = Session::start(model, policy, &prompts, &[0; 3], 4).unwrap();
    let read = |session: &Session<'_>| session.read_logits().unwrap().concat();
    let mut all = read(&session);
    for token in [5, 77] {
        session.step(&[token; 3]).unwrap();
        all.extend(read(&session));
    }
    all
}

#[test]
fn logits_of_all_ranks_are_those_of_one() {
    let folder = with_four_heads();
    let folder = name_of(folder.path());
    let whole = on_ranks(1, "needle-1m", logits).remove(0);
    let scale = whole.iter().copied().map(f32::abs).fold(0.0, f32::max);
    assert!(scale > 1.0, "{scale}");
    for (world, name) in [(2, "needle-1m"), (1, folder), (2, folder), (4, folder)] {
        let ranks = on_ranks(world, name, logits);
        assert_eq!(ranks.len(), world);
        for rank in &ranks {
            assert_eq!(rank, &ranks[0], "ranks differ");
            let worst = rank.iter().zip(&whole).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(worst < 1e-4, "{world} ranks of {name}: {worst}");
        }
    }
}

/// The likeliest next token of every sequence.
fn likeliest(session: &Session<'_>) -> Vec<u32> {
    let best = |logits: Vec<f32>| {
        let all = logits.into_iter().enumerate();
        all.max_by(|a, b| a.1.total_cmp(&b.1)).map(|(token, _)| token as u32).unwrap()
    };
    session.read_logits().unwrap().into_iter().map(best).collect()
}

/// The configurations of all policies, with gates for four heads.
fn all_policies() -> Vec<Value> {
    let mut all = every_policy(0.25, &cpu());
    for config in &mut all {
        if config["policy"] == "duo-attention" {
            config["alpha"] = json!([
                [0.1, 0.7, 0.3, 0.2],
                [0.9, 0.2, 0.5, 0.6],
                [0.4, 0.5, 0.8, 0.1],
                [0.3, 0.8, 0.6, 0.9]
            ]);
        }
    }
    all.push(json!({"policy": "longflow", "budget": 0.25, "scope": "head"}));
    all
}

fn compares_heads(config: &Value) -> bool {
    build(config).unwrap().capabilities().compares_heads
}

#[test]
fn every_policy_writes_the_tokens_of_one_rank() {
    let folder = with_four_heads();
    let folder = name_of(folder.path());
    let configs: Vec<Value> =
        all_policies().into_iter().filter(|config| !compares_heads(config)).collect();
    assert!(configs.len() > 25, "{}", configs.len());
    let written = |model: &Model| {
        let prompts = prompts(model);
        let of = |config: &Value| {
            let all = run(model, config, &prompts, COUNT);
            all.into_iter().map(|generated| generated.tokens).collect::<Vec<_>>()
        };
        configs.iter().map(of).collect::<Vec<_>>()
    };
    let whole = on_ranks(1, folder, written).remove(0);
    for world in [2, 4] {
        for (rank, part) in on_ranks(world, folder, written).into_iter().enumerate() {
            for ((config, part), whole) in configs.iter().zip(part).zip(&whole) {
                assert_eq!(&part, whole, "rank {rank} of {world}: {config}");
            }
        }
    }
}

#[test]
fn policies_that_compare_heads_are_refused_by_name() {
    let names: BTreeSet<String> = all_policies()
        .iter()
        .filter(|config| compares_heads(config))
        .map(|config| config["policy"].as_str().unwrap().to_string())
        .collect();
    let expected = ["adakv", "d2o", "hshare", "longflow", "pyramidinfer", "tova"];
    assert!(names.iter().eq(&expected), "{names:?}");
    on_ranks(2, "needle-1m", |model| {
        for name in &names {
            let policy = build(&json!({"policy": name, "budget": 0.25})).unwrap();
            let prompts = prompts(model);
            let error = Session::start(model, policy, &prompts[..1], &[0], 1).unwrap_err();
            assert!(
                matches!(&error, ModelError::ComparesHeads { policy, .. } if policy == name),
                "{name}: {error}"
            );
        }
    });
}

#[test]
fn a_session_saved_by_ranks_goes_on_by_the_same_ranks_alone() {
    let folder = tempfile::tempdir().unwrap();
    let path = |rank: usize| folder.path().join(format!("{rank}.cache"));
    let policy = || -> Arc<dyn Policy> { build(&json!({"policy": "h2o", "budget": 0.5})).unwrap() };
    let went_on = |model: &Model, session: &mut Session<'_>| {
        let mut tokens = Vec::new();
        for _ in 0..6 {
            let next = likeliest(session);
            session.step(&next).unwrap();
            tokens.push(next);
        }
        assert!(tokens.iter().flatten().all(|&token| (token as usize) < model.config().vocab_size));
        tokens
    };
    let uninterrupted = on_ranks(2, "needle-1m", |model| {
        let prompts = prompts(model);
        let mut session = Session::start(model, policy(), &prompts, &[0; 3], 16).unwrap();
        session.save(&path(model.llama().ranks().shard().rank())).unwrap();
        let next = likeliest(&session);
        session.step(&next).unwrap();
        (next, went_on(model, &mut session))
    });
    let last = &uninterrupted[0].0;
    let resumed = on_ranks(2, "needle-1m", |model| {
        let own = path(model.llama().ranks().shard().rank());
        let mut session = Session::resume(model, policy(), &own, last).unwrap();
        went_on(model, &mut session)
    });
    for (before, after) in uninterrupted.iter().zip(&resumed) {
        assert_eq!(&before.1, after);
    }
    let refused = on_ranks(2, "needle-1m", |model| {
        let other = path(1 - model.llama().ranks().shard().rank());
        Session::resume(model, policy(), &other, last).unwrap_err().to_string()
    });
    assert!(
        refused[0].contains("rank 1 of 2") && refused[0].contains("rank 0 of 2"),
        "{refused:?}"
    );
}

#[test]
fn a_model_that_cannot_be_divided_is_refused() {
    let ranks = Threads::group(4, PATIENCE).unwrap();
    let rank: Arc<dyn Collective> = Arc::new(ranks.into_iter().next().unwrap());
    let error = Model::load_part("needle-1m", &Device::flex(), None, rank).unwrap_err();
    let expected = ParallelError::Indivisible { what: "key-value heads", whole: 2, world: 4 };
    assert!(matches!(error, ModelError::Parallel(found) if found == expected));
}

#[test]
fn a_rank_that_fails_ends_the_others() {
    let begun = Instant::now();
    let results = on_ranks(2, "needle-1m", |model| {
        let prompts = prompts(model);
        let policy = build(&json!({"policy": "full"})).unwrap();
        let mut session = Session::start(model, policy, &prompts[..1], &[0], 8).unwrap();
        for step in 0..8 {
            if model.llama().ranks().shard().rank() == 1 && step == 3 {
                return Ok(step);
            }
            session.step(&[5])?;
        }
        Ok(8)
    });
    assert!(matches!(results[1], Ok(3)));
    let left = ParallelError::RankLeft { rank: 1, world: 2 };
    assert!(matches!(&results[0], Err(ModelError::Parallel(error)) if *error == left));
    assert!(begun.elapsed() < PATIENCE);
}

/// Forbids a token, and ends behind a few tokens.
struct Forbids {
    token: u32,
    left: usize,
}

impl LogitsShaper for Forbids {
    fn shape(&mut self, logits: &mut [f32]) -> Result<(), String> {
        logits[self.token as usize] = f32::NEG_INFINITY;
        Ok(())
    }

    fn accept(&mut self, _token: u32) -> Result<bool, String> {
        self.left -= 1;
        Ok(self.left == 0)
    }
}

/// Jobs of several policies, lengths and samplings; one that the host shapes, one on a context, and
/// one whose listener goes away.
fn jobs(prompts: &[Vec<u32>]) -> Vec<Job> {
    let policies = [
        json!({"policy": "full"}),
        json!({"policy": "snapkv", "budget": 0.25}),
        json!({"policy": "longflow", "budget": 40, "scope": "head"}),
        json!({"policy": "h2o", "budget": 0.5}),
        json!({"policy": "random", "budget": 0.3}),
    ];
    let mut jobs = Vec::new();
    for (at, config) in policies.iter().cycle().take(12).enumerate() {
        let prompt = &prompts[at % prompts.len()];
        let mut request = Request::greedy(prompt[..prompt.len() - 3 * at].to_vec(), 8 + 3 * at);
        request.stop_at_end = false;
        if at % 3 == 1 {
            let (temperature, seed) = (0.8, at as u64);
            request.sampling = Sampling { temperature, seed, ..Sampling::greedy() };
        }
        let mut job = Job::new(request, build(config).unwrap());
        match at {
            2 | 6 => job.shaper = Some(Box::new(Forbids { token: 5, left: 6 })),
            4 => job.logprobs = Some(2),
            5 => job.context = Some("document".into()),
            _ => {}
        }
        jobs.push(job);
    }
    jobs
}

/// Compresses a context, submits all jobs, and returns their tokens.
fn serve(engine: &Engine, document: &[u32], prompts: &[Vec<u32>]) -> Vec<Vec<u32>> {
    let policy = build(&json!({"policy": "snapkv", "budget": 0.5})).unwrap();
    engine.compress("document", document.to_vec(), policy).unwrap();
    let submit = |(at, job): (usize, Job)| -> Receiver<Update> {
        let (sender, receiver) = channel();
        let mut told = 0;
        let listener = move |update| {
            told += 1;
            // The last one's listener goes away.
            sender.send(update).is_ok() && !(at == 11 && told > 4)
        };
        engine.submit(job, listener).unwrap();
        receiver
    };
    let receivers: Vec<_> = jobs(prompts).into_iter().enumerate().map(submit).collect();
    let tokens = |receiver: Receiver<Update>| {
        let mut tokens = Vec::new();
        for update in receiver.iter() {
            match update {
                Update::Token { token: Some(token), .. } => tokens.push(token),
                Update::Failed(error) => panic!("{error}"),
                _ => {}
            }
        }
        tokens
    };
    receivers.into_iter().map(tokens).collect()
}

#[test]
fn engines_of_two_ranks_serve_what_one_serves() {
    let options = || EngineOptions { bytes: 32 << 20, ..EngineOptions::default() };
    let load = |ranks: Arc<dyn Collective>| {
        move || Model::load_part("needle-1m", &Device::flex(), Some(DType::F32), ranks)
    };
    let whole = Model::load("needle-1m", &Device::flex(), Some(DType::F32)).unwrap();
    let prompts = prompts(&whole);
    let document = whole.encode(&"The old boat lay upon the sand. ".repeat(12)).unwrap();
    let alone = Engine::start(load(Arc::new(Solo)), options()).unwrap();
    let expected = serve(&alone, &document, &prompts);
    assert!(expected.iter().all(|tokens| tokens.len() > 2), "{expected:?}");

    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let folders = tempfile::tempdir().unwrap();
    let contexts = Some(folders.path().to_path_buf());
    let join = |rank| Arc::new(Meeting::join(Shard::new(rank, 2).unwrap(), address).unwrap());
    // Twice, so that the second engines load the contexts of the first.
    for round in 0..2 {
        thread::scope(|scope| {
            let follower = scope.spawn(|| {
                let meeting = join(1);
                let options = EngineOptions {
                    meeting: Some(Arc::clone(&meeting)),
                    contexts: contexts.clone(),
                    ..options()
                };
                let followed = Engine::follow(load(meeting.clone()), options);
                meeting.finish();
                followed
            });
            let meeting = join(0);
            let options = EngineOptions {
                meeting: Some(Arc::clone(&meeting)),
                contexts: contexts.clone(),
                ..options()
            };
            let engine = Engine::start(load(meeting.clone()), options).unwrap();
            if round == 1 {
                assert_eq!(engine.contexts().unwrap().len(), 1);
                engine.forget("document").unwrap();
            }
            let served = serve(&engine, &document, &prompts);
            // How far the last one came before its listener went away depends on nothing else.
            assert_eq!(served, expected, "round {round}");
            engine.save("document").unwrap();
            assert_eq!(engine.shut_down(Duration::from_secs(60)).unwrap(), 0);
            assert_eq!(engine.load().jobs.len(), 0);
            drop(engine);
            meeting.finish();
            follower.join().unwrap().unwrap();
        });
    }
}
