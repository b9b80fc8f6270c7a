//! Engines: jobs that come and go get what they get alone.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use burn::tensor::{DType, Device};
use kv_models::{
    Ended, Engine, EngineOptions, Finish, Held, Job, JobError, JobId, LogitsShaper, Model, Request,
    Sampling, Started, Update,
};
use kv_policies::build;
use kv_testing::{TestDevice, devices, quick_devices};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use serde_json::{Value, json};

use super::support::{embedded_in_f32, prompts, run_requests};

pub(crate) fn engine(device: &Device, options: EngineOptions) -> Engine {
    let device = device.clone();
    Engine::start(move || Model::load("needle-1m", &device, Some(DType::F32)), options).unwrap()
}

/// Few bytes: software GPUs have no more.
pub(crate) fn small() -> EngineOptions {
    EngineOptions { bytes: 32 << 20, ..EngineOptions::default() }
}

pub(crate) fn cpu() -> TestDevice {
    devices().remove(0)
}

/// What a job was told.
#[derive(Debug, Default)]
pub(crate) struct Told {
    pub(crate) started: Option<Started>,
    pub(crate) tokens: Vec<u32>,
    pub(crate) text: String,
    pub(crate) ended: Option<Ended>,
    pub(crate) failed: Option<JobError>,
}

pub(crate) fn submit(engine: &Engine, job: Job) -> Result<(JobId, Receiver<Update>), JobError> {
    let (sender, receiver) = channel();
    let id = engine.submit(job, move |update| sender.send(update).is_ok())?;
    Ok((id, receiver))
}

pub(crate) fn listen(updates: &Receiver<Update>) -> Told {
    let mut told = Told::default();
    while let Ok(update) = updates.recv_timeout(Duration::from_secs(120)) {
        match update {
            Update::Started(started) => told.started = Some(started),
            Update::Token { token, text, .. } => {
                told.tokens.extend(token);
                told.text += &text;
            }
            Update::Ended(ended) => {
                told.ended = Some(ended);
                break;
            }
            Update::Failed(error) => {
                told.failed = Some(error);
                break;
            }
        }
    }
    told
}

pub(crate) fn job(policy: &Value, tokens: &[u32], new_tokens: usize) -> Job {
    let request = Request { stop_at_end: false, ..Request::greedy(tokens.to_vec(), new_tokens) };
    Job::new(request, build(policy).unwrap())
}

pub(crate) fn run_job(engine: &Engine, job: Job) -> Told {
    listen(&submit(engine, job).unwrap().1)
}

/// One job of a random schedule.
#[derive(Debug, Clone)]
struct Plan {
    policy: usize,
    budget: f64,
    /// The place among [`CONTEXTS`] of the context that it continues.
    context: Option<usize>,
    first: usize,
    tokens: usize,
    new_tokens: usize,
    temperature: f64,
    penalty: bool,
    logprobs: Option<usize>,
    cancelled: Option<Cancelled>,
    /// Milliseconds before it is submitted.
    pause: u64,
}

/// How a job is cancelled.
#[derive(Debug, Clone, Copy)]
enum Cancelled {
    /// Its listener goes away after so many tokens.
    ByListener(usize),
    /// By its number, so many milliseconds after it was submitted.
    ByHandle(u64),
}

/// Contexts of a random schedule: policies that leave a document's slots alone.
const CONTEXTS: [(&str, &str); 3] = [("some", "snapkv"), ("other", "knorm"), ("all", "full")];

/// The configuration of a context's policy.
fn context_policy(at: usize) -> Value {
    let mut policy = json!({"policy": CONTEXTS[at].1, "budget": 0.4});
    if CONTEXTS[at].1 == "knorm" {
        policy["decode"] = false.into();
    }
    policy
}

const NAMES: [&str; 13] = [
    "full",
    "snapkv",
    "adakv",
    "keydiff",
    "pyramidkv",
    "h2o",
    "streaming-llm",
    "longflow",
    "cis",
    "quest",
    "kvreviver",
    "balancekv",
    "d2o",
];

fn plan() -> impl Strategy<Value = Plan> {
    let cancelled = prop_oneof![
        (0..6usize).prop_map(Cancelled::ByListener),
        (0..30u64).prop_map(Cancelled::ByHandle),
    ];
    // Few first tokens, so that many prompts begin alike, or with another prompt as a whole.
    let first = prop_oneof![Just(0usize), Just(64), 0..200usize];
    (
        (0..NAMES.len(), 0.2..0.9, proptest::option::weighted(0.25, 0..CONTEXTS.len())),
        (first, prop_oneof![Just(40usize), 20..160usize], 1..14usize),
        (prop_oneof![Just(0.0), Just(0.8)], any::<bool>()),
        proptest::option::weighted(0.3, 0..4usize),
        (proptest::option::weighted(0.3, cancelled), 0..12u64),
    )
        .prop_map(|(kind, prompt, (temperature, penalty), logprobs, (cancelled, pause))| {
            let ((policy, budget, context), (first, tokens, new_tokens)) = (kind, prompt);
            let penalty = penalty && temperature > 0.0;
            Plan {
                policy,
                budget,
                context,
                first,
                tokens,
                new_tokens,
                temperature,
                penalty,
                logprobs,
                cancelled,
                pause,
            }
        })
}

impl Plan {
    fn policy(&self) -> Value {
        match self.context {
            Some(at) => context_policy(at),
            None => json!({"policy": NAMES[self.policy], "budget": self.budget}),
        }
    }

    fn request(&self, text: &[u32], seed: u64) -> Request {
        let tokens = text[self.first..self.first + self.tokens].to_vec();
        let sampling = Sampling {
            temperature: self.temperature,
            top_p: (self.temperature > 0.0).then_some(0.9),
            repetition_penalty: if self.penalty { 1.3 } else { 1.0 },
            seed,
            ..Sampling::default()
        };
        let greedy = Request::greedy(tokens, self.new_tokens);
        Request { sampling, stop_at_end: false, ..greedy }
    }

    fn job(&self, request: &Request) -> Job {
        let mut job = Job::new(request.clone(), build(&self.policy()).unwrap());
        job.context = self.context.map(|at| CONTEXTS[at].0.to_string());
        job.logprobs = self.logprobs;
        job
    }

    /// The tokens of a request that runs alone: on the model, or on an engine without other jobs
    /// where it continues a context. Seeds draw other tokens after a question that `generate`
    /// appends.
    fn alone(&self, model: &Model, engine: &Engine, request: &Request) -> Vec<u32> {
        match self.context {
            Some(_) => run_job(engine, Self { logprobs: None, ..self.clone() }.job(request)).tokens,
            None => {
                let all = run_requests(model, &self.policy(), std::slice::from_ref(request));
                all[0].tokens.clone()
            }
        }
    }
}

/// Compresses the contexts of a random schedule.
fn compress_all(engine: &Engine, text: &[u32]) {
    for (at, (name, _)) in CONTEXTS.iter().enumerate() {
        engine.compress(name, document(text, at), build(&context_policy(at)).unwrap()).unwrap();
    }
}

/// The document of a context.
fn document(text: &[u32], at: usize) -> Vec<u32> {
    text[at * 30..at * 30 + 120].to_vec()
}

/// Submits a job of a schedule after its pause.
fn submit_planned(engine: &Engine, plan: &Plan, job: Job) -> (JobId, Receiver<Update>) {
    thread::sleep(Duration::from_millis(plan.pause));
    let (sender, updates) = channel();
    let mut left = match plan.cancelled {
        Some(Cancelled::ByListener(count)) => Some(count),
        _ => None,
    };
    let top = plan.logprobs;
    let listen_on = move |update: Update| {
        let is_token = matches!(update, Update::Token { .. });
        if let Update::Token { token: Some(_), logprobs, .. } = &update {
            assert_eq!(logprobs.as_ref().map(|logprobs| logprobs.top.len()), top);
        }
        let _ = sender.send(update);
        match &mut left {
            Some(0) => false,
            Some(left) => {
                *left -= usize::from(is_token);
                true
            }
            None => true,
        }
    };
    (engine.submit(job, listen_on).unwrap(), updates)
}

/// Random arrivals, cancels, lengths, policies, budgets, contexts, prefixes, samplings and
/// log-probabilities: every job gets exactly the tokens that it gets alone, and all bytes are free
/// in the end.
#[test]
fn jobs_that_come_and_go_get_what_they_get_alone() {
    const PREFIXES: usize = 4 << 20;
    for tested in devices() {
        let model = embedded_in_f32(&tested);
        let text = prompts(&model).concat().repeat(4);
        let quiet = engine(&tested.device, EngineOptions { rows: 1, ..small() });
        compress_all(&quiet, &text);
        let cases = match tested.name {
            "cpu" => 24,
            _ if tested.runs_everything() => 3,
            _ => 1,
        };
        let mut runner = TestRunner::new(Config { cases, ..Config::default() });
        let options = (1..5usize, 1..4usize, 0.0..0.9f64, any::<bool>());
        let schedule = (proptest::collection::vec(plan(), 2..9), options);
        let ran = runner.run(&schedule, |(plans, (rows, groups, prefill_share, shares))| {
            let prefix_bytes = if shares { PREFIXES } else { 0 };
            let options = EngineOptions { rows, groups, prefill_share, prefix_bytes, ..small() };
            let engine = engine(&tested.device, options);
            compress_all(&engine, &text);
            let requests: Vec<Request> =
                plans.iter().zip(3..).map(|(plan, seed)| plan.request(&text, seed)).collect();
            let listeners: Vec<_> = plans
                .iter()
                .zip(&requests)
                .map(|(plan, request)| {
                    let (id, updates) = submit_planned(&engine, plan, plan.job(request));
                    if let Some(Cancelled::ByHandle(after)) = plan.cancelled {
                        let engine = engine.clone();
                        thread::spawn(move || {
                            thread::sleep(Duration::from_millis(after));
                            engine.cancel(id);
                        });
                    }
                    updates
                })
                .collect();
            for ((plan, request), updates) in plans.iter().zip(&requests).zip(&listeners) {
                let (told, policy) = (listen(updates), plan.policy());
                prop_assert!(told.failed.is_none(), "{policy}: {:?}", told.failed);
                let expected = plan.alone(&model, &quiet, request);
                let finish = told.ended.unwrap().finish;
                match (plan.cancelled, finish) {
                    (None, _) | (Some(Cancelled::ByHandle(_)), Finish::Length) => {
                        prop_assert_eq!(&told.tokens, &expected, "{} {}", policy, tested.name);
                        prop_assert_eq!(finish, Finish::Length);
                    }
                    (Some(_), _) => prop_assert!(expected.starts_with(&told.tokens), "{policy}"),
                }
            }
            CONTEXTS.iter().for_each(|(name, _)| engine.forget(name).unwrap());
            prop_assert_eq!(engine.shut_down(Duration::from_secs(60)).unwrap(), 0);
            let load = engine.load();
            prop_assert_eq!((load.jobs.len(), load.running, load.waiting), (0, 0, 0));
            // Prompts are kept for those to come.
            prop_assert!(load.bytes <= prefix_bytes, "{load:?}");
            Ok(())
        });
        ran.unwrap_or_else(|error| panic!("{}: {error}", tested.name));
    }
}

/// Steps that join or leave do not record anew, and sequences of different policies and budgets
/// share one recording.
#[test]
fn joins_and_leaves_keep_recordings() {
    for tested in quick_devices("engine") {
        let engine = engine(&tested.device, EngineOptions { rows: 3, ..small() });
        let model = embedded_in_f32(&tested);
        let text = prompts(&model).concat();
        let policies = ["full", "snapkv", "keydiff", "knorm", "snapkv"];
        let run = |new: usize| {
            let all: Vec<_> = policies
                .iter()
                .enumerate()
                .map(|(index, name)| {
                    let mut policy = json!({"policy": name, "budget": 0.3 + 0.1 * index as f64});
                    if ["keydiff", "knorm"].contains(name) {
                        policy["decode"] = false.into();
                    }
                    submit(&engine, job(&policy, &text[index..index + 60], new + index)).unwrap().1
                })
                .collect();
            all.iter().for_each(|updates| assert!(listen(updates).ended.is_some()));
        };
        run(12);
        thread::sleep(Duration::from_millis(200));
        let before = engine.load().totals;
        run(9);
        run(15);
        thread::sleep(Duration::from_millis(200));
        let after = engine.load().totals;
        assert!(before.recordings <= 1, "{}: {before:?}", tested.name);
        assert_eq!(after.recordings, before.recordings, "{}", tested.name);
        if after.recordings > 0 {
            let launched = after.launched_steps - before.launched_steps;
            assert_eq!(launched, 0, "{}: {after:?}", tested.name);
        }
    }
}

/// Policies with state of their own share rows too: slots to write to (LongFlow), index sets (CIS)
/// and quantised tokens (KVReviver) are replaced in place.
#[test]
fn rows_of_states_are_replaced_in_place() {
    // The lengths of prompts, new tokens, and the kinds of steps, each of which is recorded.
    let policies = [
        (json!({"policy": "longflow", "budget": 40}), [70; 4], 30, 1),
        (
            json!({"policy": "cis", "budget": 40, "sinks": 4, "recents": 8, "block": 8}),
            [70; 4],
            30,
            1,
        ),
        // Rows move a block at different steps, and shorter prompts have fewer blocks.
        (json!({"policy": "kvreviver", "budget": 0.5}), [260, 230, 245, 150], 80, 2),
        // Longer prompts have more blocks and fewer exact slots: rows that are made anew have room
        // for both.
        (json!({"policy": "kvreviver", "budget": 230}), [130, 500, 180, 140], 80, 2),
    ];
    for tested in quick_devices("engine") {
        let model = embedded_in_f32(&tested);
        let text = prompts(&model).concat();
        for (policy, lengths, new_tokens, kinds) in &policies {
            let options = EngineOptions { rows: 2, groups: 1, ..small() };
            let engine = engine(&tested.device, options);
            let what = format!("{}, {policy}", tested.name);
            let mut steps = 0;
            for round in 0..3 {
                let before = engine.load().totals;
                let at = |(at, length): (usize, &usize)| &text[at + round..at + round + length];
                let prompts: Vec<&[u32]> = lengths.iter().enumerate().map(at).collect();
                let all: Vec<_> = prompts
                    .iter()
                    .map(|prompt| submit(&engine, job(policy, prompt, *new_tokens)).unwrap().1)
                    .collect();
                for (prompt, updates) in prompts.iter().zip(&all) {
                    let request = Request::greedy(prompt.to_vec(), *new_tokens);
                    let request = Request { stop_at_end: false, ..request };
                    let alone = run_requests(&model, policy, &[request]);
                    assert_eq!(listen(updates).tokens, alone[0].tokens, "{what}");
                }
                // Loads are published from time to time.
                thread::sleep(Duration::from_millis(200));
                let after = engine.load().totals;
                steps = after.launched_steps + after.replayed_steps
                    - before.launched_steps
                    - before.replayed_steps;
            }
            // Two jobs decode in one step.
            let most = 3 * *new_tokens as u64;
            assert!(steps < most, "{what}: {steps} steps for 4 jobs of {new_tokens} tokens");
            let load = engine.load();
            assert!(load.totals.recordings <= 2 * kinds, "{what}: {:?}", load.totals);
        }
    }
}

/// Greedy tokens, each with the likeliest tokens and their log-probabilities.
type Likeliest = Vec<(u32, Vec<(u32, f32)>)>;

/// What a job draws, and how many of its tokens were there already.
fn likeliest(engine: &Engine, mut job: Job) -> (Likeliest, usize) {
    job.logprobs = Some(4);
    let (mut drawn, mut cached) = (Vec::new(), 0);
    let updates = submit(engine, job).unwrap().1;
    while let Ok(update) = updates.recv_timeout(Duration::from_secs(120)) {
        match update {
            Update::Started(started) => cached = started.cached_tokens,
            Update::Token { token, logprobs, .. } => {
                drawn.extend(token.zip(logprobs.map(|logprobs| logprobs.top)));
            }
            Update::Ended(_) => return (drawn, cached),
            Update::Failed(error) => panic!("{error}"),
        }
    }
    panic!("the job has not ended");
}

/// Whether two runs agree up to a step at which both runs' tokens are nearly as likely.
fn check_as_likely(found: &Likeliest, expected: &Likeliest, what: &str) {
    const NEARLY: f32 = 0.01;
    for (step, ((token, own), (other, likely))) in found.iter().zip(expected).enumerate() {
        let of_own = likely.iter().find(|(id, _)| id == token).map(|(_, logprob)| *logprob);
        let of_own = of_own.unwrap_or_else(|| panic!("{what}: {found:?}, alone {expected:?}"));
        let differ = (own[0].1 - likely[0].1).abs().max(likely[0].1 - of_own);
        assert!(differ < NEARLY, "{what}, step {step}: {found:?}, alone {expected:?}");
        if token != other {
            return;
        }
    }
}

/// Prompts that begin alike share their beginning's keys and values, and get what they get alone.
/// CUDA multiplies f32 by TensorFloat-32, whose sums depend on the number of rows.
#[test]
fn shared_prefixes_change_no_token() {
    for tested in quick_devices("engine") {
        let options = EngineOptions { prefix_bytes: 4 << 20, ..small() };
        let (engine, alone) = (engine(&tested.device, options), engine(&tested.device, small()));
        let text = prompts(&embedded_in_f32(&tested)).concat();
        let system = &text[..90];
        let names = match tested.name {
            "cpu" => &["full", "snapkv", "h2o", "longflow", "balancekv", "expected-attention"][..],
            _ => &["snapkv", "h2o"][..],
        };
        for name in names {
            let policy = json!({"policy": name, "budget": 0.4});
            let mut cached = Vec::new();
            for (from, count) in [(100, 70), (120, 70), (100, 70), (100, 85)] {
                let prompt = [system, &text[from..from + count]].concat();
                let (found, reused) = likeliest(&engine, job(&policy, &prompt, 8));
                let (expected, none) = likeliest(&alone, job(&policy, &prompt, 8));
                assert_eq!((found.len(), expected.len(), none), (8, 8, 0));
                let what = format!("{name} on {}", tested.name);
                check_as_likely(&found, &expected, &what);
                if tested.name != "cuda" {
                    let tokens =
                        |all: &Likeliest| -> Vec<u32> { all.iter().map(|o| o.0).collect() };
                    assert_eq!(tokens(&found), tokens(&expected), "{what}");
                }
                cached.push(reused);
            }
            match *name {
                // It looks at all queries before RoPE.
                "expected-attention" => assert_eq!(cached, [0; 4]),
                // Sums of attention are known at the ends of prompts alone.
                "h2o" => assert!(cached[3] == 160, "{cached:?}"),
                _ => assert!(cached[1] >= 90 && cached[3] >= 90, "{name}: {cached:?}"),
            }
        }
        assert!(engine.load().bytes <= 4 << 20);
    }
}

/// Jobs with one prompt compute it once, and get the tokens that each gets alone, also under
/// policies whose steps change slots.
#[test]
fn jobs_of_one_prompt_compute_it_once() {
    for tested in quick_devices("engine") {
        let engine = engine(&tested.device, small());
        let model = embedded_in_f32(&tested);
        let text = prompts(&model).concat();
        let names = match tested.name {
            "cpu" => &["full", "snapkv", "h2o", "longflow", "keepkv", "quest", "random"][..],
            _ => &["snapkv", "longflow"][..],
        };
        let mut computed = 0;
        for name in names {
            let policy = json!({"policy": name, "budget": 0.4});
            let requests = (0..5).map(|seed| {
                let sampling = Sampling { temperature: 1.0, seed, ..Sampling::default() };
                let greedy = Request::greedy(text[..100].to_vec(), 12);
                Request { sampling, stop_at_end: false, ..greedy }
            });
            let requests: Vec<Request> = requests.collect();
            let alone = requests.iter().map(|request| {
                let request = std::slice::from_ref(request);
                run_requests(&model, &policy, request)[0].tokens.clone()
            });
            let alone: Vec<Vec<u32>> = alone.collect();
            let (jobs, updates): (Vec<_>, Vec<_>) = requests
                .into_iter()
                .map(|request| {
                    let (sender, receiver) = channel();
                    let job = Job::new(request, build(&policy).unwrap());
                    ((job, move |update| sender.send(update).is_ok()), receiver)
                })
                .unzip();
            engine.submit_all(jobs).unwrap();
            let told: Vec<Told> = updates.iter().map(listen).collect();
            let tokens: Vec<Vec<u32>> = told.iter().map(|told| told.tokens.clone()).collect();
            assert_eq!(tokens, alone, "{name} on {}", tested.name);
            assert!(alone.iter().any(|tokens| *tokens != alone[0]), "{name}");
            let cached: usize = told.iter().map(|told| told.started.unwrap().cached_tokens).sum();
            // Seeds choose the random policy's slots.
            let expected = if *name == "random" { 0 } else { 400 };
            assert_eq!(cached, expected, "{name} on {}", tested.name);
            computed += 500 - cached as u64;
        }
        engine.shut_down(Duration::from_secs(60)).unwrap();
        let load = engine.load();
        assert_eq!((load.totals.prompt_tokens, load.bytes), (computed, 0));
    }
}

/// Idle rows take part in steps. Policies that evict rarely, or as a text grows, would let them
/// outgrow their capacities.
#[test]
fn idle_rows_outgrow_nothing() {
    for tested in quick_devices("engine") {
        let engine = engine(&tested.device, small());
        let model = embedded_in_f32(&tested);
        let text = prompts(&model).concat();
        let names = match tested.name {
            "cpu" => &[
                "keydiff",
                "r-kv",
                "lagkv",
                "expected-attention",
                "kvmerger",
                "pyramidinfer",
                "h2o",
                "longflow",
            ][..],
            _ => &["keydiff"][..],
        };
        for name in names {
            let policy = json!({"policy": name, "budget": 0.3});
            // One after another, then beside each other.
            for (at, together) in [1, 1, 1, 1, 3, 2].into_iter().enumerate() {
                let prompt = &text[at..at + 150];
                let jobs =
                    (0..together).map(|_| submit(&engine, job(&policy, prompt, 40)).unwrap());
                let jobs: Vec<_> = jobs.collect();
                let greedy = Request::greedy(prompt.to_vec(), 40);
                let request = Request { stop_at_end: false, ..greedy };
                let alone = run_requests(&model, &policy, &[request]);
                for (_, updates) in &jobs {
                    let told = listen(updates);
                    assert!(told.failed.is_none(), "{name} {at}: {:?}", told.failed);
                    assert_eq!(told.tokens, alone[0].tokens, "{name} on {}", tested.name);
                }
            }
        }
    }
}

/// What can never run is refused with what would fit, and what waits in vain is refused too.
#[test]
fn jobs_that_cannot_run_are_refused() {
    let tested = cpu();
    let options = EngineOptions { bytes: 200_000, groups: 1, queue: 1, rows: 1, ..small() };
    let engine = engine(&tested.device, options);
    let model = embedded_in_f32(&tested);
    let text = prompts(&model).concat().repeat(3);
    let full = json!({"policy": "full"});
    let told = run_job(&engine, job(&full, &text[..400], 5));
    let error = told.failed.unwrap();
    assert!(matches!(error, JobError::TooLarge { .. }), "{error}");
    assert!(error.to_string().contains("at most"), "{error}");
    let smaller = json!({"policy": "snapkv", "budget": 50});
    assert!(run_job(&engine, job(&smaller, &text[..400], 5)).ended.is_some());
    // As many new tokens as the model has positions for, however many are asked for.
    let positions = model.config().max_positions;
    let longest = text.repeat(20)[..positions - 4].to_vec();
    let told = run_job(&engine, job(&json!({"policy": "snapkv", "budget": 40}), &longest, 4096));
    assert_eq!(told.tokens.len(), 5, "{:?}", told.failed);
    assert_eq!(told.ended.unwrap().finish, Finish::Length);
    assert!(matches!(submit(&engine, job(&full, &[], 5)), Err(JobError::Model(_))));
    let long = text.repeat(20);
    assert!(matches!(submit(&engine, job(&full, &long, 5)), Err(JobError::Model(_))));
    let (_, first) = submit(&engine, job(&smaller, &text[..300], 30)).unwrap();
    let mut refused = 0;
    let more: Vec<_> = (0..8)
        .filter_map(|_| match submit(&engine, job(&smaller, &text[..300], 30)) {
            Ok((_, updates)) => Some(updates),
            Err(JobError::QueueFull { .. }) => {
                refused += 1;
                None
            }
            Err(error) => panic!("{error}"),
        })
        .collect();
    assert!(refused > 0);
    assert!(listen(&first).ended.is_some());
    more.iter().for_each(|updates| assert!(listen(updates).ended.is_some()));
}

/// Allows only even tokens, and ends behind the fourth.
struct Even(usize);

impl LogitsShaper for Even {
    fn shape(&mut self, logits: &mut [f32]) -> Result<(), String> {
        logits.iter_mut().skip(1).step_by(2).for_each(|logit| *logit = f32::NEG_INFINITY);
        Ok(())
    }

    fn accept(&mut self, token: u32) -> Result<bool, String> {
        assert!(token.is_multiple_of(2));
        self.0 += 1;
        Ok(self.0 == 4)
    }
}

/// Shapers and log-probabilities work beside rows that have none.
#[test]
fn the_host_changes_logits_of_its_own_rows_alone() {
    for tested in quick_devices("engine") {
        let engine = engine(&tested.device, small());
        let model = embedded_in_f32(&tested);
        let text = prompts(&model).concat();
        let full = json!({"policy": "full"});
        let plain = submit(&engine, job(&full, &text[..80], 12)).unwrap().1;
        let shaped = Job {
            shaper: Some(Box::new(Even(0))),
            logprobs: Some(3),
            ..job(&full, &text[..80], 12)
        };
        let shaped = submit(&engine, shaped).unwrap().1;
        let mut count = 0;
        while let Ok(update) = shaped.recv() {
            match update {
                Update::Token { token: Some(token), logprobs, .. } => {
                    let logprobs = logprobs.unwrap();
                    assert_eq!((token % 2, logprobs.top.len()), (0, 3));
                    assert!(logprobs.logprob <= logprobs.top[0].1);
                    count += 1;
                }
                Update::Ended(ended) => assert_eq!(ended.finish, Finish::Stop),
                Update::Failed(error) => panic!("{error}"),
                _ => {}
            }
        }
        assert_eq!(count, 4);
        let request = Request { stop_at_end: false, ..Request::greedy(text[..80].to_vec(), 12) };
        let alone = run_requests(&model, &full, &[request]);
        assert_eq!(listen(&plain).tokens, alone[0].tokens, "{}", tested.name);
    }
}

#[test]
fn log_probabilities_tell_nothing_of_a_stop_string() {
    for tested in quick_devices("engine") {
        let engine = engine(&tested.device, small());
        let model = embedded_in_f32(&tested);
        let text = prompts(&model).concat();
        let full = json!({"policy": "full"});
        let plain = run_job(&engine, job(&full, &text[..80], 24)).text;
        let (from, to) = (plain.chars().count() / 3, plain.chars().count() / 3 + 6);
        let stop: String = plain.chars().skip(from).take(to - from).collect();
        let expected = plain.split(&stop).next().unwrap();
        for top in [None, Some(2)] {
            let mut stopped = Job { logprobs: top, ..job(&full, &text[..80], 24) };
            stopped.request.stop = vec![stop.clone()];
            let told = run_job(&engine, stopped);
            let ended = told.ended.unwrap();
            assert_eq!((told.text.as_str(), ended.finish), (expected, Finish::Stop), "{stop:?}");
            let tokens = model.tokenizer().unwrap().decode(&told.tokens, true).unwrap();
            if top.is_some() {
                assert!(expected.starts_with(&tokens), "{tokens:?} of {expected:?}");
                assert!(told.tokens.len() < ended.tokens);
            }
        }
    }
}

#[test]
fn a_short_prompt_does_not_wait_for_a_long_one() {
    let engine = engine(&cpu().device, small());
    let policy = json!({"policy": "snapkv", "budget": 0.25});
    let long: Vec<u32> = (0..1_900).map(|at| 3 + at % 900).collect();
    let (sender, order) = channel();
    let send = |name: &'static str, tokens: &[u32], new_tokens: usize| {
        let sender = sender.clone();
        let job = job(&policy, tokens, new_tokens);
        let listener = move |update| {
            matches!(update, Update::Started(_)).then(|| sender.send(name).is_ok());
            true
        };
        engine.submit(job, listener).unwrap()
    };
    // Beside a job that decodes, a long prompt takes several turns.
    let decoding = send("decoding", &long[..50], 1_500);
    assert_eq!(order.recv().unwrap(), "decoding");
    send("long", &long, 2);
    send("alike", &long[..1_000], 2);
    send("short", &long[..30], 2);
    let all: Vec<&str> = (0..3).map(|_| order.recv().unwrap()).collect();
    assert_eq!(all, ["short", "long", "alike"]);
    engine.cancel(decoding);
}

/// Cancelled jobs end, wherever they are, and pictures show slots by layer and head, also behind
/// the end.
#[test]
fn jobs_are_cancelled_wherever_they_are() {
    let tested = cpu();
    let options = EngineOptions { rows: 1, ..small() };
    let engine = engine(&tested.device, options);
    let model = embedded_in_f32(&tested);
    let config = model.config();
    let text = prompts(&model).concat();
    let policy = json!({"policy": "snapkv", "budget": 30});
    let (running, updates) = submit(&engine, job(&policy, &text[..90], 400)).unwrap();
    assert!(matches!(updates.recv().unwrap(), Update::Started(_)));
    let (waiting, other) = submit(&engine, job(&policy, &text[..90], 400)).unwrap();
    let picture = loop {
        match engine.picture(running).unwrap() {
            Some(picture) => break picture,
            None => thread::yield_now(),
        }
    };
    assert_eq!(picture.kept.len(), config.num_layers);
    assert!((90..=490).contains(&picture.tokens), "{}", picture.tokens);
    assert!(picture.kept.iter().flatten().all(|&slots| (30..=430).contains(&slots)));
    assert!(picture.is_running);
    engine.cancel(waiting);
    engine.cancel(running);
    for updates in [&other, &updates] {
        let told = listen(updates);
        assert_eq!(told.ended.unwrap().finish, Finish::Cancelled);
    }
    let last = engine.picture(running).unwrap().unwrap();
    assert!(!last.is_running && last.tokens >= picture.tokens, "{last:?}");
    assert!(last.kept.iter().flatten().all(|&slots| slots >= 30), "{last:?}");
    assert!(engine.picture(waiting).unwrap().is_none(), "it never decoded");
    let held = Held::default();
    assert_eq!(held.bytes, 0);
    let shared = Arc::new(engine);
    assert_eq!(shared.shut_down(Duration::ZERO).unwrap(), 0);
    let late = submit(&shared, job(&policy, &text[..90], 4));
    assert!(matches!(late, Err(JobError::Stopped { .. })), "{late:?}");
}

/// Of two jobs, the second one has a much shorter prompt, and is done with it first. There is one
/// row for both, or slots for one of them.
#[test]
fn second_tokens_do_not_wait_for_a_row() {
    // The arena's slots of needle-1m in f32: 2 KiB and 16 bytes for each of two heads, four layers.
    let slot = 4 * 2 * (2 * 32 * 4 + 4);
    for (rows, bytes, warmed) in [(1, 32 << 20, false), (1, 32 << 20, true), (4, 500 * slot, true)]
    {
        let options = EngineOptions { rows, groups: 1, bytes, ..EngineOptions::default() };
        let engine = engine(&cpu().device, options);
        let prompt = |tokens| (0..tokens).map(|at| 3 + at % 60).collect::<Vec<u32>>();
        let full = json!({"policy": "full"});
        if warmed {
            assert_eq!(run_job(&engine, job(&full, &prompt(30), 5)).tokens.len(), 5);
        }
        let (sender, updates) = channel();
        let jobs = [400, 40].into_iter().enumerate().map(|(at, tokens)| {
            let (job, sender) = (job(&full, &prompt(tokens), 40), sender.clone());
            (job, move |update| sender.send((at, update)).is_ok())
        });
        engine.submit_all(jobs.collect()).unwrap();
        drop(sender);
        // Of each job: its tokens, and tokens of the other one between its first two.
        let (mut tokens, mut between) = ([0, 0], [0, 0]);
        for (at, update) in updates {
            match update {
                Update::Token { token: Some(_), .. } => {
                    tokens[at] += 1;
                    between[1 - at] += usize::from(tokens[1 - at] == 1);
                }
                Update::Failed(error) => panic!("{error}"),
                _ => {}
            }
        }
        assert_eq!(tokens, [40, 40]);
        assert_eq!(between, [0, 0], "{rows} rows: tokens of the other job between the first two");
    }
}

/// Two clients send one request after another under one configuration, so that its group never is
/// idle. A request of another configuration gets its turn all the same, and so do they.
#[test]
fn a_group_runs_empty_for_another_configuration() {
    let engine = engine(&cpu().device, EngineOptions { groups: 2, ..small() });
    let prompt: Vec<u32> = (0..60).map(|at| 3 + at % 60).collect();
    let h2o = |budget: usize| json!({"policy": "h2o", "budget": budget});
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let clients: Vec<_> = (0..2)
            .map(|client: u64| {
                let (engine, is_over, prompt) = (&engine, &is_over, &prompt);
                scope.spawn(move || {
                    // They never end together.
                    thread::sleep(Duration::from_millis(30 * client));
                    let mut served = 0;
                    while !is_over.load(Ordering::Relaxed) {
                        run_job(engine, job(&h2o(20), prompt, 200));
                        served += 1;
                    }
                    served
                })
            })
            .collect();
        thread::sleep(Duration::from_millis(100));
        let began = Instant::now();
        let other = run_job(&engine, job(&h2o(24), &prompt, 5));
        let waited = began.elapsed();
        is_over.store(true, Ordering::Relaxed);
        assert_eq!(other.tokens.len(), 5);
        assert!(waited < Duration::from_secs(30), "{waited:?}");
        for client in clients {
            assert!(client.join().unwrap() > 0);
        }
    });
}
