//! Generates text with a compressed KV cache, and says what that saved.
//!
//! ```text
//! cargo run --release -p kv-models --example generate -- \
//!     --model FOLDER_OR_HUB_ID --policy snapkv --budget 0.25 --prompt "..." --chat
//! ```

use std::io::Write;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use kv_core::{Budget, DeviceChoice, MemoryReport, device_name, select_device};
use kv_models::{Message, Model, Sampling, Session};
use kv_policies::{Policy, build, build_named};
use serde_json::{Value, json};

/// Generate text with a compressed KV cache.
#[derive(Parser)]
struct Args {
    /// A model folder, a hub id (`organisation/name`), or `needle-1m`
    #[arg(long, default_value = "needle-1m")]
    model: String,
    /// A policy's name, or its configuration as a JSON object
    #[arg(long, default_value = "snapkv")]
    policy: String,
    /// What to keep: a share of the prompt (0.25) or tokens (512)
    #[arg(long, default_value = "0.25")]
    budget: Budget,
    /// The prompt
    #[arg(long)]
    prompt: String,
    /// Put the prompt into the model's chat template
    #[arg(long)]
    chat: bool,
    /// At most this many new tokens
    #[arg(long, default_value_t = 128)]
    new_tokens: usize,
    /// 0 always takes the likeliest token
    #[arg(long, default_value_t = 0.0)]
    temperature: f64,
    /// Only the likeliest tokens that together reach this probability
    #[arg(long)]
    top_p: Option<f64>,
    /// Seed of sampling, and of policies that draw
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// auto, cpu, wgpu[:i], vulkan[:i], metal[:i] or cuda[:i]
    #[arg(long, default_value = "auto")]
    device: DeviceChoice,
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<()> {
    ensure!(args.new_tokens > 0, "--new-tokens is 0, expected at least 1");
    let policy = policy(&args.policy, args.budget)?;
    let device = select_device(args.device)?;
    eprintln!("loading {} on {}", args.model, device_name(&device));
    let model = Model::load(&args.model, &device, None)?;
    let tokenizer = model.tokenizer().context("this model has no tokenizer")?;
    let prompt = if args.chat {
        model.encode_chat(&[Message::user(&args.prompt)])?
    } else {
        model.encode(&args.prompt)?
    };
    let sampling = Sampling {
        temperature: args.temperature,
        top_p: args.top_p,
        seed: args.seed,
        ..Sampling::greedy()
    };

    let start = Instant::now();
    let prompt_tokens = prompt.len();
    let seeds = [args.seed];
    let session = Session::start(&model, policy, &[prompt], &seeds, args.new_tokens)?;
    let mut decoder = session.decoder(&[sampling])?;
    let mut token = decoder.next_tokens()?[0];
    let prefill = start.elapsed().as_secs_f64();

    let start = Instant::now();
    let mut text = tokenizer.stream(true);
    let mut steps = 0;
    for index in 0..args.new_tokens {
        if model.config().eos_token_ids.contains(&token) {
            break;
        }
        show(text.push(token)?)?;
        if !decoder.session().has_position(0) {
            eprint!("\n(the model's last position is reached)");
            break;
        }
        if index + 1 < args.new_tokens {
            token = decoder.next_tokens()?[0];
            steps += 1;
        }
    }
    let decode = start.elapsed().as_secs_f64();
    show(text.finish()?)?;
    println!();

    let rate = |tokens: usize, seconds: f64| tokens as f64 / seconds.max(1e-9);
    eprintln!(
        "prompt: {prompt_tokens} tokens, {:.1} tokens/s; decode: {steps} steps, {:.1} tokens/s",
        rate(prompt_tokens, prefill),
        rate(steps, decode),
    );
    report_memory(decoder.session(), &model);
    Ok(())
}

/// Prints text as it comes.
fn show(piece: Option<String>) -> Result<()> {
    print!("{}", piece.unwrap_or_default());
    Ok(std::io::stdout().flush()?)
}

/// A policy by name, or from JSON; a configuration may carry its own budget.
fn policy(text: &str, budget: Budget) -> Result<Arc<dyn Policy>> {
    if !text.trim_start().starts_with('{') {
        return Ok(build_named(text, budget)?);
    }
    let mut config: Value = serde_json::from_str(text).context("--policy is not valid JSON")?;
    let parts: &[&str] =
        if config["policy"] == "combine" { &["/prefill", "/decode"] } else { &[""] };
    for part in parts {
        if let Some(Value::Object(part)) = config.pointer_mut(part) {
            part.entry("budget").or_insert(json!(budget));
        }
    }
    Ok(build(&config)?)
}

fn report_memory(session: &Session<'_>, model: &Model) {
    let (config, llama) = (model.config(), model.llama());
    let seen: usize = session.cache().seen.iter().sum();
    let full = MemoryReport::full(
        seen,
        config.num_layers,
        config.num_kv_heads,
        config.head_dim,
        llama.dtype(),
    );
    let memory = session.memory();
    let mib = |bytes: usize| bytes as f64 / f64::from(1 << 20);
    eprintln!(
        "cache under {}: {:.2} MiB in use, {:.2} MiB with room and metadata; a full cache of \
         {seen} tokens: {:.2} MiB",
        session.policy().name(),
        mib(memory.in_use),
        mib(memory.total() - memory.scratch),
        mib(full),
    );
}
