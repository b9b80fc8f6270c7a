//! Generates text with a compressed KV cache, and says what that saved.
//!
//! ```text
//! cargo run --release -p kv-models --example generate -- \
//!     --model FOLDER_OR_HUB_ID --policy snapkv --budget 0.25 --prompt "..." --chat
//! ```

use std::io::{BufRead, IsTerminal, Read, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use burn::tensor::DType;
use clap::{ArgGroup, Parser, ValueEnum};
use kv_core::{Budget, DeviceChoice, MemoryReport, counted, device_name, select_device};
use kv_models::{ChatTemplate, Message, Model, Sampling, Session, TextOutput};
use kv_parallel::{Ranks, Role};
use kv_policies::{Policy, build, build_named};
use serde_json::{Map, Value, json};

/// Generate text with a compressed KV cache.
#[derive(Parser)]
#[command(group(
    ArgGroup::new("input").required(true).multiple(true).args(["prompt", "file", "interactive"])
))]
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
    /// The prompt; with --chat several make a conversation, each answered before the next
    #[arg(long, conflicts_with = "file")]
    prompt: Vec<String>,
    /// A file with the prompt, `-` for stdin
    #[arg(long, value_name = "PATH")]
    file: Option<PathBuf>,
    /// Put the prompt into the model's chat template
    #[arg(long)]
    chat: bool,
    /// Go on with the conversation: every line of stdin is a turn
    #[arg(long, requires = "chat")]
    interactive: bool,
    /// What the conversation's system message says
    #[arg(long, requires = "chat")]
    system: Option<String>,
    /// A variable of the chat template, its value as JSON or text: `enable_thinking=false`
    #[arg(long, value_name = "NAME=VALUE", value_parser = variable, requires = "chat")]
    chat_variable: Vec<(String, Value)>,
    /// At most this many new tokens a turn
    #[arg(long, default_value_t = 128)]
    new_tokens: usize,
    /// A text at which to stop, which is not shown; may be given several times
    #[arg(long)]
    stop: Vec<String>,
    /// 0 always takes the likeliest token
    #[arg(long, default_value_t = 0.0)]
    temperature: f64,
    /// Only the likeliest so many tokens
    #[arg(long)]
    top_k: Option<usize>,
    /// Only the likeliest tokens that together reach this probability
    #[arg(long)]
    top_p: Option<f64>,
    /// Only tokens of at least this fraction of the likeliest one's probability
    #[arg(long)]
    min_p: Option<f64>,
    /// Above 1, tokens that are in the prompt or were generated become less likely
    #[arg(long, default_value_t = 1.0)]
    repetition_penalty: f64,
    /// Seed of sampling, and of policies that draw
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// auto, cpu, wgpu[:i], vulkan[:i], metal[:i] or cuda[:i]
    #[arg(long, default_value = "auto")]
    device: DeviceChoice,
    /// Divide the model among so many processes, with a GPU each; torchrun, srun, mpirun and
    /// Kubernetes can start them as well
    #[arg(long, value_name = "RANKS")]
    tensor_parallel: Option<usize>,
    /// Type in which matrices are stored: f16 or bf16 of a model that computes in f32 on the CPU
    #[arg(long)]
    matrices: Option<Float>,
    /// Type of weights and cache; without it f32 on the CPU, the model's own elsewhere
    #[arg(long)]
    dtype: Option<Float>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Float {
    /// Single precision
    F32,
    /// Half precision
    F16,
    /// Half precision with the range of f32
    Bf16,
}

fn main() -> ExitCode {
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_max_level(tracing_subscriber::filter::LevelFilter::WARN)
        .without_time()
        .with_target(false)
        .init();
    match start(&Args::parse()) {
        Ok(code) => code,
        // Who reads the text, such as `head`, has had enough.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs alone, or as one of several ranks. The first rank shows the text.
fn start(args: &Args) -> Result<ExitCode> {
    let ranks = match Ranks::join(args.tensor_parallel)? {
        Role::Starter(code) => return Ok(code),
        Role::Rank(ranks) => ranks,
    };
    let reads_stdin = args.interactive || args.file.as_deref() == Some(Path::new("-"));
    ensure!(
        !reads_stdin || !ranks.shard().is_part(),
        "several processes cannot share stdin: give --prompt, or --file with the name of a file"
    );
    run(args, &ranks)?;
    ranks.finish();
    Ok(ExitCode::SUCCESS)
}

fn run(args: &Args, ranks: &Ranks) -> Result<()> {
    // All that can be wrong is said before the model is loaded, which takes a while.
    ensure!(args.new_tokens > 0, "--new-tokens is 0, expected at least 1");
    ensure!(
        args.chat || args.prompt.len() < 2,
        "--prompt is given {} times: several are the turns of a conversation, add --chat",
        args.prompt.len()
    );
    let prompts = match &args.file {
        Some(path) => vec![read(path)?],
        None => args.prompt.clone(),
    };
    let policy = policy(&args.policy, args.budget)?;
    let sampling = Sampling {
        repetition_penalty: args.repetition_penalty,
        temperature: args.temperature,
        top_k: args.top_k,
        top_p: args.top_p,
        min_p: args.min_p,
        seed: args.seed,
    };
    sampling.validate()?;
    if args.chat {
        ChatTemplate::from_name(&args.model)?;
    }
    let (shows, is_part) = (ranks.shard().is_first(), ranks.shard().is_part());
    let choice = if is_part { args.device.of_process(ranks.local()) } else { args.device };
    let device = select_device(choice)?;
    let dtype_of = |dtype| match dtype {
        Float::F32 => DType::F32,
        Float::F16 => DType::F16,
        Float::Bf16 => DType::BF16,
    };
    let dtype = args.dtype.map(dtype_of);
    if shows {
        eprintln!("loading {} on {}", args.model, device_name(&device));
    }
    let collective = ranks.collective(&device)?;
    let mut model = Model::load_part(&args.model, &device, dtype, collective)?;
    if let Some(matrices) = args.matrices {
        model = model.with_matrices_in(dtype_of(matrices))?;
    }
    let turn = Turn { args, model: &model, policy, sampling, shows };

    if !args.chat {
        return prompts.iter().try_for_each(|prompt| turn.run(model.encode(prompt)?).map(drop));
    }
    let variables: Map<String, Value> = args.chat_variable.iter().cloned().collect();
    let mut messages: Vec<Message> = args.system.iter().map(Message::system).collect();
    let mut answer = |prompt: String| {
        messages.push(Message::user(prompt));
        let text = turn.run(model.encode_chat_with(&messages, &variables)?)?;
        messages.push(Message::assistant(text));
        anyhow::Ok(())
    };
    prompts.into_iter().try_for_each(&mut answer)?;
    if args.interactive {
        for line in std::io::stdin().lock().lines() {
            answer(line.context("cannot read stdin")?)?;
        }
    }
    Ok(())
}

/// What all turns share.
struct Turn<'a> {
    args: &'a Args,
    model: &'a Model,
    policy: Arc<dyn Policy>,
    sampling: Sampling,
    /// Whether this process shows the text.
    shows: bool,
}

impl Turn<'_> {
    /// Answers a prompt, shows the answer as it comes, and returns it.
    fn run(&self, prompt: Vec<u32>) -> Result<String> {
        let Self { args, model, .. } = self;
        let tokenizer = model.tokenizer().context("this model has no tokenizer")?;
        let start = Instant::now();
        let (prompt_tokens, seeds) = (prompt.len(), [args.seed]);
        let session =
            Session::start(model, self.policy.clone(), &[prompt], &seeds, args.new_tokens)?;
        let mut decoder = session.decoder(&[self.sampling])?;
        let mut token = decoder.next_tokens()?[0];
        let prefill = start.elapsed().as_secs_f64();

        let start = Instant::now();
        let mut output = TextOutput::new(tokenizer.stream(true), args.stop.clone());
        let mut steps = 0;
        for index in 0..args.new_tokens {
            if model.config().eos_token_ids.contains(&token) {
                break;
            }
            self.show(&output.push(token)?)?;
            if output.is_stopped() {
                break;
            }
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
        self.show(&output.finish()?)?;
        self.show("\n")?;
        if !self.shows {
            return Ok(output.into_text());
        }

        let rate = |tokens: usize, seconds: f64| tokens as f64 / seconds.max(1e-9);
        eprintln!(
            "prompt: {}, {:.1} tokens/s; decode: {}, {:.1} tokens/s",
            counted(prompt_tokens, "token"),
            rate(prompt_tokens, prefill),
            counted(steps, "step"),
            rate(steps, decode),
        );
        report_memory(decoder.session(), model);
        Ok(output.into_text())
    }

    /// Prints text as it comes.
    fn show(&self, piece: &str) -> Result<()> {
        if !self.shows {
            return Ok(());
        }
        let mut stdout = std::io::stdout();
        stdout.write_all(piece.as_bytes())?;
        Ok(stdout.flush()?)
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let io = error.downcast_ref::<std::io::Error>();
    io.is_some_and(|error| error.kind() == std::io::ErrorKind::BrokenPipe)
}

/// A file's text, or that of stdin.
fn read(path: &Path) -> Result<String> {
    let mut text = String::new();
    if path == Path::new("-") {
        std::io::stdin().read_to_string(&mut text).context("cannot read stdin")?;
        return Ok(text);
    }
    std::fs::read_to_string(path).with_context(|| format!("cannot read `{}`", path.display()))
}

/// `NAME=VALUE`, the value as JSON, or as text where it is not.
fn variable(text: &str) -> Result<(String, Value)> {
    let (name, value) = text.split_once('=').context("expected NAME=VALUE")?;
    let value = serde_json::from_str(value).unwrap_or_else(|_| value.into());
    Ok((name.to_string(), value))
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
        "cache under {}: {:.2} MiB in use, {:.2} MiB with room and metadata; a full cache of {}: \
         {:.2} MiB",
        session.policy().name(),
        mib(memory.in_use),
        mib(memory.total() - memory.scratch),
        counted(seen, "token"),
        mib(full),
    );
}
