//! Puts an engine under load: requests that arrive at random, of random lengths, under several
//! policies, one after the other.
//!
//! ```sh
//! cargo run --release -p kv-models --example load -- --model needle-1m \
//!     --policy 'full;snapkv;longflow'
//! cargo run --release -p kv-models --features cuda --example load -- --model random:llama-3.1-8b \
//!     --dtype bf16 --inputs 2000-16000 --outputs 512 --rows 64 --cache-gib 40
//! ```
//!
//! With `--contexts 8`, eight documents are compressed before the load begins, and each request
//! asks a question of one of them:
//!
//! ```sh
//! cargo run --release -p kv-models --example load -- --model needle-1m --contexts 8 \
//!     --policy 'full;keydiff' --questions 32
//! ```
//!
//! A row of the table has:
//!
//! * requests and new tokens a second, over the time from the first request to the last token;
//! * the sustained rates: new tokens, tokens of prompts and jobs that decode at once, from the
//!   moment when a quarter of the requests has ended until three quarters have;
//! * the time to a request's first token, and between two tokens of a request: median and 99th
//!   percentile;
//! * the mean bytes of a job;
//! * decode steps that were replayed and launched, and recordings.

use std::borrow::Borrow;
use std::ops::RangeInclusive;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use burn::tensor::DType;
use clap::Parser;
use kv_models::{Engine, EngineOptions, Job, Model, Request, Totals, Update};
use kv_parallel::{Ranks, Role};
use kv_policies::Policy;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, Exp};
use serde_json::{Value, json};
use statrs::statistics::{Data, OrderStatistics, Statistics};
use tracing_subscriber::EnvFilter;

/// Puts an engine under load.
#[derive(Debug, Parser)]
struct Args {
    /// The model.
    #[arg(long, default_value = "needle-1m")]
    model: String,
    /// The device.
    #[arg(long, default_value = "cpu")]
    device: kv_core::DeviceChoice,
    /// f32, bf16 or f16; the model's own type without it.
    #[arg(long)]
    dtype: Option<String>,
    /// Policies, by name or as JSON, one run each.
    #[arg(long, value_delimiter = ';', default_value = "full;snapkv;longflow")]
    policy: Vec<String>,
    /// The budget of policies without one.
    #[arg(long, default_value = "0.25")]
    budget: kv_core::Budget,
    /// Requests.
    #[arg(long, default_value_t = 32)]
    requests: usize,
    /// Requests a second; 0 for all at once.
    #[arg(long, default_value_t = 0.0)]
    rate: f64,
    /// Tokens of a prompt or of a document, at least and at most, uniformly distributed.
    #[arg(long, default_value = "100-400")]
    inputs: String,
    /// Documents that are compressed before the load and then asked; 0 for prompts of their own.
    #[arg(long, default_value_t = 0)]
    contexts: usize,
    /// Tokens of a question to a document.
    #[arg(long, default_value_t = 64)]
    questions: usize,
    /// GiB of all compressed documents.
    #[arg(long, default_value_t = 1.0)]
    context_gib: f64,
    /// New tokens of a request.
    #[arg(long, default_value_t = 64)]
    outputs: usize,
    /// The most jobs that decode at once.
    #[arg(long, default_value_t = 16)]
    rows: usize,
    /// GiB of all caches.
    #[arg(long, default_value_t = 1.0)]
    cache_gib: f64,
    /// The share of the time that prompts may take while others decode.
    #[arg(long, default_value_t = 0.5)]
    prefill_share: f64,
    /// Processes that compute the model together, with a GPU each.
    #[arg(long)]
    tensor_parallel: Option<usize>,
    /// Seed of arrivals and prompts.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Writes the rows as JSON.
    #[arg(long)]
    json: Option<std::path::PathBuf>,
}

/// What one request saw.
struct Seen {
    submitted: Instant,
    first: Option<Instant>,
    last: Instant,
    gaps: Vec<f64>,
    tokens: usize,
    bytes: usize,
    failed: Option<String>,
}

fn main() -> Result<ExitCode> {
    // `RUST_LOG=debug` shows the engine's turns.
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_env_filter(EnvFilter::from_default_env())
        .init();
    let args = Args::parse();
    let ranks = match Ranks::join(args.tensor_parallel)? {
        Role::Starter(code) => return Ok(code),
        Role::Rank(ranks) => ranks,
    };
    if ranks.shard().is_first() {
        put_under_load(&args, &ranks)?;
    } else {
        Engine::follow(loader(&args, &ranks)?, options(&args, &ranks))?;
    }
    ranks.finish();
    Ok(ExitCode::SUCCESS)
}

fn put_under_load(args: &Args, ranks: &Ranks) -> Result<()> {
    let (low, high) = args.inputs.split_once('-').unwrap_or((&args.inputs, &args.inputs));
    let inputs = low.parse::<usize>()?..=high.parse::<usize>()?;
    // The engine that all policies have in turn.
    let engine = Engine::start(loader(args, ranks)?, options(args, ranks))?;
    let mut rows = Vec::new();
    println!(
        "{:<20} {:>6} {:>6} {:>7} {:>8} {:>8} {:>5} {:>15} {:>15} {:>8} {:>15}",
        "policy",
        "req/s",
        "tok/s",
        "| req/s",
        "tok/s",
        "prompt/s",
        "jobs",
        "| first token s",
        "between ms",
        "MiB/job",
        "steps"
    );
    for name in &args.policy {
        let config = match name.starts_with('{') {
            true => serde_json::from_str(name)?,
            false => json!({ "policy": name }),
        };
        let config = match kv_policies::leaves_budget_open(&config) {
            true => kv_policies::with_budget(&config, args.budget),
            false => config,
        };
        let row = run(&engine, args, &config, inputs.clone())?;
        println!("{}", line(&row));
        rows.push(row);
    }
    if let Some(path) = &args.json {
        std::fs::write(path, serde_json::to_string_pretty(&rows)?)?;
    }
    Ok(())
}

fn dtype_of(name: &str) -> Result<DType> {
    match name {
        "f32" => Ok(DType::F32),
        "bf16" => Ok(DType::BF16),
        "f16" => Ok(DType::F16),
        _ => Err(anyhow!("unknown dtype `{name}`; expected f32, bf16 or f16")),
    }
}

/// Loads a rank's part of the model.
fn loader(
    args: &Args,
    ranks: &Ranks,
) -> Result<impl FnOnce() -> kv_models::Result<Model> + Send + 'static> {
    let (name, ranks) = (args.model.clone(), ranks.clone());
    let dtype = args.dtype.as_deref().map(dtype_of).transpose()?;
    let device = match ranks.shard().is_part() {
        true => args.device.of_process(ranks.local()),
        false => args.device,
    };
    Ok(move || {
        let device = kv_core::select_device(device)?;
        let collective = ranks.collective(&device)?;
        Model::load_part(&name, &device, dtype, collective)
    })
}

fn options(args: &Args, ranks: &Ranks) -> EngineOptions {
    let bytes = |gib: f64| (gib * f64::from(1 << 30)) as usize;
    EngineOptions {
        rows: args.rows,
        queue: args.requests + 1,
        bytes: bytes(args.cache_gib),
        groups: 1,
        prefill_share: args.prefill_share,
        context_bytes: bytes(args.context_gib),
        meeting: ranks.meeting().cloned(),
        ..EngineOptions::default()
    }
}

fn run(
    engine: &Engine,
    args: &Args,
    config: &Value,
    inputs: RangeInclusive<usize>,
) -> Result<Value> {
    let mut load = RandomLoad::new(engine, args, kv_policies::build(config)?, inputs)?;
    // Kernels are compiled and the steps recorded before anything is timed.
    let (sender, warmed) = channel();
    for _ in 0..2 {
        submit(engine, load.job(12), &sender)?;
    }
    drop(sender);
    failure(warmed.iter())?;

    let before = engine.load().totals;
    let gap = Exp::new(args.rate.max(f64::MIN_POSITIVE))?;
    let start = Instant::now();
    let (sender, results) = channel();
    let (mut left, mut due) = (args.requests, start);
    let (mut all, mut samples) = (Vec::new(), Vec::new());
    while all.len() < args.requests {
        while left > 0 && Instant::now() >= due {
            submit(engine, load.job(args.outputs), &sender)?;
            left -= 1;
            if args.rate > 0.0 {
                due += Duration::from_secs_f64(gap.sample(&mut load.rng));
            }
        }
        let next = if left > 0 { due - Instant::now().min(due) } else { SAMPLED };
        if let Ok(seen) = results.recv_timeout(next.min(SAMPLED)) {
            all.push(seen);
        }
        let now = engine.load();
        samples.push(Sample { at: start.elapsed(), running: now.running, totals: now.totals });
    }
    failure(all.iter())?;
    (0..args.contexts).try_for_each(|number| engine.forget(&document(number)))?;
    thread::sleep(SAMPLED);
    let after = engine.load().totals;
    let seconds = all.iter().map(|seen| seen.last - start).max().unwrap_or_default().as_secs_f64();
    let tokens: usize = all.iter().map(|seen| seen.tokens).sum();
    let firsts = all.iter().filter_map(|seen| Some((seen.first? - seen.submitted).as_secs_f64()));
    let firsts = quantiles(firsts.collect());
    let gaps = quantiles(all.iter().flat_map(|seen| seen.gaps.iter().copied()).collect());
    Ok(json!({
        "policy": config,
        "requests": all.len(),
        "seconds": seconds,
        "requests_per_second": all.len() as f64 / seconds,
        "tokens_per_second": tokens as f64 / seconds,
        "sustained": sustained(&samples, before.ended, args.requests),
        "first_token_seconds": firsts,
        "between_tokens_seconds": gaps,
        "bytes_per_job": all.iter().map(|seen| seen.bytes as f64).mean(),
        "replayed": after.replayed_steps - before.replayed_steps,
        "launched": after.launched_steps - before.launched_steps,
        "recordings": after.recordings - before.recordings,
        "prompt_tokens": after.prompt_tokens - before.prompt_tokens,
    }))
}

/// How often an engine's load is looked at.
const SAMPLED: Duration = Duration::from_millis(50);

/// Jobs of random prompts, or of random questions to documents.
struct RandomLoad {
    policy: Arc<dyn Policy>,
    inputs: RangeInclusive<usize>,
    contexts: usize,
    vocabulary: u32,
    rng: ChaCha8Rng,
}

impl RandomLoad {
    fn new(
        engine: &Engine,
        args: &Args,
        policy: Arc<dyn Policy>,
        inputs: RangeInclusive<usize>,
    ) -> Result<Self> {
        let rng = ChaCha8Rng::seed_from_u64(args.seed);
        let vocabulary = engine.card().config.vocab_size as u32;
        let mut load = Self { policy, inputs, contexts: args.contexts, vocabulary, rng };
        for number in 0..args.contexts {
            let tokens = load.tokens();
            engine.compress(&document(number), tokens, load.policy.clone())?;
        }
        if args.contexts > 0 {
            load.inputs = args.questions..=args.questions;
        }
        Ok(load)
    }

    fn tokens(&mut self) -> Vec<u32> {
        let tokens = self.rng.random_range(self.inputs.clone());
        (0..tokens).map(|_| self.rng.random_range(3..self.vocabulary)).collect()
    }

    fn job(&mut self, outputs: usize) -> Job {
        let request = Request { stop_at_end: false, ..Request::greedy(self.tokens(), outputs) };
        let mut job = Job::new(request, self.policy.clone());
        if self.contexts > 0 {
            job.context = Some(document(self.rng.random_range(0..self.contexts)));
        }
        job
    }
}

fn document(number: usize) -> String {
    format!("document-{number}")
}

/// Submits a job, which sends `results` its times once it has ended.
fn submit(engine: &Engine, job: Job, results: &Sender<Seen>) -> Result<()> {
    let (results, now) = (results.clone(), Instant::now());
    let mut seen = Some(Seen {
        submitted: now,
        first: None,
        last: now,
        gaps: Vec::new(),
        tokens: 0,
        bytes: 0,
        failed: None,
    });
    engine.submit(job, move |update| {
        let Some(own) = &mut seen else { return false };
        let now = Instant::now();
        match update {
            Update::Token { token: Some(_), .. } => {
                match own.first {
                    None => own.first = Some(now),
                    Some(_) => own.gaps.push((now - own.last).as_secs_f64()),
                }
                own.tokens += 1;
                own.last = now;
            }
            Update::Ended(ended) => {
                own.bytes = ended.held.bytes;
                drop(seen.take().map(|own| results.send(own)));
            }
            Update::Failed(error) => {
                own.failed = Some(error.to_string());
                drop(seen.take().map(|own| results.send(own)));
            }
            Update::Started(_) | Update::Token { .. } => {}
        }
        true
    })?;
    Ok(())
}

/// The first failure of jobs.
fn failure(seen: impl IntoIterator<Item = impl Borrow<Seen>>) -> Result<()> {
    match seen.into_iter().find_map(|seen| seen.borrow().failed.clone()) {
        Some(reason) => Err(anyhow!(reason)),
        None => Ok(()),
    }
}

/// The load at one moment.
struct Sample {
    at: Duration,
    running: usize,
    totals: Totals,
}

/// Rates while the second and the third quarter of the requests ended: without the first requests,
/// which decode in small batches, and without the last ones.
fn sustained(samples: &[Sample], before: u64, requests: usize) -> Value {
    let ended = |sample: &&Sample| (sample.totals.ended - before) as f64 / requests as f64;
    let within: Vec<&Sample> =
        samples.iter().filter(|sample| (0.25..=0.75).contains(&ended(sample))).collect();
    let (Some(first), Some(last)) = (within.first(), within.last()) else { return Value::Null };
    let seconds = (last.at - first.at).as_secs_f64();
    let rate =
        |count: fn(&Totals) -> u64| (count(&last.totals) - count(&first.totals)) as f64 / seconds;
    json!({
        "seconds": seconds,
        "requests_per_second": rate(|totals| totals.ended),
        "tokens_per_second": rate(|totals| totals.new_tokens),
        "prompt_tokens_per_second": rate(|totals| totals.prompt_tokens),
        "jobs": within.iter().map(|sample| sample.running as f64).mean(),
    })
}

/// The median and the 99th percentile.
fn quantiles(values: Vec<f64>) -> [f64; 2] {
    let mut data = Data::new(values);
    [data.quantile(0.5), data.quantile(0.99)]
}

fn line(row: &Value) -> String {
    let number = |key: &str| row[key].as_f64().unwrap_or(f64::NAN);
    let pair = |key: &str, scale: f64| {
        let of = |at: usize| row[key][at].as_f64().unwrap_or(f64::NAN) * scale;
        format!("{:.2} / {:.2}", of(0), of(1))
    };
    let name = row["policy"]["policy"].as_str().unwrap_or_default();
    let budget = match &row["policy"]["budget"] {
        Value::Null => String::new(),
        budget => format!(" {budget}"),
    };
    let steps = format!("{}/{}/{}", row["replayed"], row["launched"], row["recordings"]);
    let sustained = |key: &str| row["sustained"][key].as_f64().unwrap_or(f64::NAN);
    format!(
        "{:<20} {:>6.2} {:>6.0} | {:>5.2} {:>8.0} {:>8.0} {:>5.1} | {:>13} {:>15} {:>8.1} {:>15}",
        name.to_string() + &budget,
        number("requests_per_second"),
        number("tokens_per_second"),
        sustained("requests_per_second"),
        sustained("tokens_per_second"),
        sustained("prompt_tokens_per_second"),
        sustained("jobs"),
        pair("first_token_seconds", 1.0),
        pair("between_tokens_seconds", 1000.0),
        number("bytes_per_job") / f64::from(1 << 20),
        steps
    )
}
