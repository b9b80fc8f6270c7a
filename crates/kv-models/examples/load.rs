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
//! A row of the table has, over the time from the first request to the last token:
//!
//! * requests and new tokens a second;
//! * the time to a request's first token, and between two tokens of a request: median and 99th
//!   percentile;
//! * the mean number of jobs that decoded at once, and the mean bytes of a job;
//! * decode steps that were replayed and launched, and recordings.

use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use burn::tensor::DType;
use clap::Parser;
use kv_models::{Engine, EngineOptions, Job, Model, Request, Update};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, Exp};
use serde_json::{Value, json};
use statrs::statistics::{Data, OrderStatistics, Statistics};

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
    /// Tokens of a prompt, at least and at most, uniformly distributed.
    #[arg(long, default_value = "100-400")]
    inputs: String,
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

fn main() -> Result<()> {
    let args = Args::parse();
    let (low, high) = args.inputs.split_once('-').unwrap_or((&args.inputs, &args.inputs));
    let inputs = low.parse::<usize>()?..=high.parse::<usize>()?;
    let dtype = args.dtype.as_deref().map(dtype_of).transpose()?;
    let mut rows = Vec::new();
    println!(
        "{:<24} {:>7} {:>8} {:>17} {:>17} {:>6} {:>9} {:>22}",
        "policy", "req/s", "tok/s", "first token s", "between ms", "jobs", "MiB/job", "steps"
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
        let row = run(&args, &config, inputs.clone(), dtype)?;
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

fn run(
    args: &Args,
    config: &Value,
    inputs: std::ops::RangeInclusive<usize>,
    dtype: Option<DType>,
) -> Result<Value> {
    let device = kv_core::select_device(args.device)?;
    let name = args.model.clone();
    let options = EngineOptions {
        rows: args.rows,
        queue: args.requests + 1,
        bytes: (args.cache_gib * f64::from(1 << 30)) as usize,
        groups: 1,
        prefill_share: args.prefill_share,
        ..EngineOptions::default()
    };
    let engine = Engine::start(move || Model::load(&name, &device, dtype), options)?;
    let vocabulary = engine.card().config.vocab_size as u32;
    let policy = kv_policies::build(config)?;
    let mut rng = ChaCha8Rng::seed_from_u64(args.seed);
    let request = |rng: &mut ChaCha8Rng, outputs: usize| {
        let tokens = rng.random_range(inputs.clone());
        let tokens = (0..tokens).map(|_| rng.random_range(3..vocabulary)).collect();
        Request { stop_at_end: false, ..Request::greedy(tokens, outputs) }
    };
    // Kernels are compiled and the steps recorded before anything is timed.
    let (warmed, warm) = channel();
    for _ in 0..2 {
        let warmed = warmed.clone();
        let job = Job::new(request(&mut rng, 12), policy.clone());
        engine
            .submit(job, move |update| warmed.send(matches!(update, Update::Ended(_))).is_ok())?;
    }
    drop(warmed);
    while warm.recv().is_ok() {}
    let before = engine.load().totals;
    let gap = Exp::new(args.rate.max(f64::MIN_POSITIVE))?;
    let start = Instant::now();
    let (sender, results) = channel();
    let mut jobs = Vec::new();
    for _ in 0..args.requests {
        if args.rate > 0.0 {
            thread::sleep(Duration::from_secs_f64(gap.sample(&mut rng)));
        }
        let job = Job::new(request(&mut rng, args.outputs), policy.clone());
        let (sender, now) = (sender.clone(), Instant::now());
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
                    drop(seen.take().map(|own| sender.send(own)));
                }
                Update::Failed(error) => {
                    own.failed = Some(error.to_string());
                    drop(seen.take().map(|own| sender.send(own)));
                }
                Update::Started(_) | Update::Token { .. } => {}
            }
            true
        })?;
        jobs.push(engine.load().running as f64);
    }
    drop(sender);
    let mut all = Vec::new();
    loop {
        match results.recv_timeout(Duration::from_millis(200)) {
            Ok(seen) => all.push(seen),
            Err(std::sync::mpsc::RecvTimeoutError::Timeout) => {
                jobs.push(engine.load().running as f64);
            }
            Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => break,
        }
    }
    if let Some(reason) = all.iter().find_map(|seen| seen.failed.clone()) {
        return Err(anyhow!("{config}: {reason}"));
    }
    thread::sleep(Duration::from_millis(100));
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
        "first_token_seconds": firsts,
        "between_tokens_seconds": gaps,
        "jobs": jobs.mean(),
        "bytes_per_job": all.iter().map(|seen| seen.bytes as f64).mean(),
        "replayed": after.replayed_steps - before.replayed_steps,
        "launched": after.launched_steps - before.launched_steps,
        "recordings": after.recordings - before.recordings,
        "prompt_tokens": after.prompt_tokens - before.prompt_tokens,
    }))
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
    format!(
        "{:<24} {:>7.2} {:>8.0} {:>17} {:>17} {:>6.1} {:>9.1} {:>22}",
        name.to_string() + &budget,
        number("requests_per_second"),
        number("tokens_per_second"),
        pair("first_token_seconds", 1.0),
        pair("between_tokens_seconds", 1000.0),
        number("jobs"),
        number("bytes_per_job") / f64::from(1 << 20),
        steps
    )
}
