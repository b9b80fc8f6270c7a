//! Decodes one prompt by recorded steps, and again by steps whose kernels are launched one by one,
//! on one device or on several GPUs. Says how fast both are, and whether they give equal logits,
//! bit for bit, and equal tokens on all ranks. `--again` decodes each way twice, which shows
//! whether a way equals itself.
//!
//! ```text
//! cargo run --release -p kv-models --features cuda --example steps -- \
//!     --model random:llama-3.1-8b --device cuda --tensor-parallel 2 --steps 2000
//! ```
//!
//! On a CPU nothing is recorded, and both ways are one.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use burn::tensor::{DType, Tensor};
use clap::{Parser, ValueEnum};
use kv_core::{Budget, DeviceChoice, select_device};
use kv_models::{Decoder, Model, Sampling, Session};
use kv_parallel::{Collective, Ranks, Role, Shard};
use kv_policies::{Policy, build, build_named};

/// Logits are compared at each of the first steps, and later where so many steps lie between.
const FIRST: usize = 32;
const BETWEEN: usize = 100;

/// Compare recorded steps with launched ones, and ranks with each other.
#[derive(Parser)]
struct Args {
    /// A model folder, a hub id, `needle-1m`, or `random:` and a shape
    #[arg(long, default_value = "needle-1m")]
    model: String,
    /// A policy's name, or its configuration as a JSON object
    #[arg(long, default_value = "full")]
    policy: String,
    /// What to keep: a share of the prompt (0.25) or tokens (512)
    #[arg(long, default_value = "0.25")]
    budget: Budget,
    /// Tokens of the prompt
    #[arg(long, default_value_t = 1024)]
    tokens: usize,
    /// Decode steps
    #[arg(long, default_value_t = 2000)]
    steps: usize,
    /// Sequences that decode together
    #[arg(long, default_value_t = 1)]
    batch: usize,
    /// auto, cpu, wgpu[:i], vulkan[:i], metal[:i] or cuda[:i]
    #[arg(long, default_value = "auto")]
    device: DeviceChoice,
    /// Divide the model among so many processes, with a GPU each
    #[arg(long, value_name = "RANKS")]
    tensor_parallel: Option<usize>,
    /// Time what one of so many GPUs computes: the first part of the model, without sums over ranks
    #[arg(long, value_name = "PARTS", conflicts_with = "tensor_parallel")]
    part_of: Option<usize>,
    /// Type of weights and cache; without it f32 on the CPU, the model's own elsewhere
    #[arg(long)]
    dtype: Option<Float>,
    /// Decode each way twice
    #[arg(long)]
    again: bool,
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

/// A part of a model without the other parts: sums are its own terms.
#[derive(Debug)]
struct Part(Shard);

impl Collective for Part {
    fn shard(&self) -> Shard {
        self.0
    }

    fn all_reduce(&self, tensor: Tensor<2>) -> kv_parallel::Result<Tensor<2>> {
        Ok(tensor)
    }
}

/// What a run has decoded.
struct Decoded {
    /// The tokens of each step.
    tokens: Vec<Vec<u32>>,
    /// All sequences' logits behind some of the steps.
    logits: Vec<(usize, Vec<f32>)>,
    /// Steps that were one launch of a recording.
    replayed: u64,
    /// The median time of a step, in milliseconds.
    milliseconds: f64,
}

fn main() -> ExitCode {
    match start(&Args::parse()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs alone, or as one of several ranks.
fn start(args: &Args) -> Result<ExitCode> {
    let ranks = match Ranks::join(args.tensor_parallel)? {
        Role::Starter(code) => return Ok(code),
        Role::Rank(ranks) => ranks,
    };
    run(args, &ranks)?;
    ranks.finish();
    Ok(ExitCode::SUCCESS)
}

fn run(args: &Args, ranks: &Ranks) -> Result<()> {
    let device = match ranks.shard().is_part() {
        true => args.device.of_process(ranks.local()),
        false => args.device,
    };
    let device = select_device(device)?;
    let dtype = args.dtype.map(|dtype| match dtype {
        Float::F32 => DType::F32,
        Float::F16 => DType::F16,
        Float::Bf16 => DType::BF16,
    });
    let collective = match args.part_of {
        Some(parts) => Arc::new(Part(Shard::new(0, parts)?)),
        None => ranks.collective(&device)?,
    };
    let model = Model::load_part(&args.model, &device, dtype, collective)?;
    let policy: Arc<dyn Policy> = match args.policy.starts_with('{') {
        true => build(&serde_json::from_str(&args.policy)?)?,
        false => build_named(&args.policy, args.budget)?,
    };
    // Prompts of numbers that have nothing in common but their range.
    let vocabulary = model.config().vocab_size;
    let token = |row: usize, at: usize| ((7919 * at + 104_729 * row + 13) % vocabulary) as u32;
    let prompts = (0..args.batch).map(|row| (0..args.tokens).map(|at| token(row, at)).collect());
    let prompts: Vec<Vec<u32>> = prompts.collect();
    let seeds: Vec<u64> = (0..args.batch as u64).collect();
    let session = Session::start(&model, policy, &prompts, &seeds, args.steps + 1)?;
    let decoder = || session.fork().decoder(&vec![Sampling::greedy(); args.batch]);
    let recorded = decode(decoder()?, args.steps)?;
    let launched = decode(decoder()?.without_recording(), args.steps)?;
    let mut differences = vec![("recorded and launched steps", recorded.difference(&launched))];
    if args.again {
        let again = decode(decoder()?, args.steps)?;
        differences.push(("recorded steps, twice", recorded.difference(&again)));
        let again = decode(decoder()?.without_recording(), args.steps)?;
        differences.push(("launched steps, twice", launched.difference(&again)));
    }
    let is_equal = differences.iter().all(|(_, difference)| difference.is_none());
    let on_all = agree(ranks, is_equal)?;
    let equals_first = agree(ranks, is_of_first(ranks, &recorded.tokens)?)?;
    if ranks.shard().is_first() {
        println!(
            "{} ranks, {} steps of {} sequences: {} of them recorded, {:.3} ms a step (median); \
             launched one by one {:.3} ms",
            ranks.shard().world(),
            args.steps,
            args.batch,
            recorded.replayed,
            recorded.milliseconds,
            launched.milliseconds
        );
        for (what, difference) in &differences {
            let words = difference.as_deref().unwrap_or("equal tokens, and equal logits");
            println!("{what}: {words}");
        }
        if is_equal && !on_all {
            println!("another rank found a difference");
        }
        println!("tokens of all ranks: {}", if equals_first { "equal" } else { "NOT equal" });
    }
    if !(on_all && equals_first) {
        bail!("steps differ");
    }
    Ok(())
}

fn decode(mut decoder: Decoder<'_>, steps: usize) -> Result<Decoded> {
    let (mut tokens, mut logits, mut times) = (Vec::new(), Vec::new(), Vec::new());
    for step in 1..=steps {
        let began = Instant::now();
        tokens.push(decoder.next_tokens()?);
        times.push(began.elapsed().as_secs_f64() * 1e3);
        if step <= FIRST || step % BETWEEN == 0 || step == steps {
            let rows = decoder.session().read_logits()?;
            logits.push((step, rows.into_iter().flatten().collect()));
        }
    }
    times.sort_by(f64::total_cmp);
    let milliseconds = times.get(times.len() / 2).copied().context("no steps")?;
    Ok(Decoded { tokens, logits, replayed: decoder.counts().replayed, milliseconds })
}

impl Decoded {
    /// Where another run first differs, in words; `None` for equal tokens and equal bits of logits.
    fn difference(&self, other: &Self) -> Option<String> {
        let token = self.tokens.iter().zip(&other.tokens).position(|(own, other)| own != other);
        let mut both = self.logits.iter().zip(&other.logits);
        let logits = both.find_map(|((step, own), (_, other))| {
            let mut pairs = own.iter().zip(other);
            let differ = pairs.any(|(own, other)| own.to_bits() != other.to_bits());
            let largest = || own.iter().zip(other).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            differ.then(|| format!("logits differ at step {step}, by up to {:e}", largest()))
        });
        let token = token.map(|at| format!("tokens differ at step {}", at + 1));
        match (logits, token) {
            (None, None) => None,
            (logits, token) => {
                let parts: Vec<String> = logits.into_iter().chain(token).collect();
                Some(parts.join("; "))
            }
        }
    }
}

/// Whether all ranks say yes.
fn agree(ranks: &Ranks, own: bool) -> Result<bool> {
    Ok(ranks.meeting().map(|meeting| meeting.agree(own)).transpose()?.unwrap_or(own))
}

/// Whether the first rank has these tokens, too.
fn is_of_first(ranks: &Ranks, tokens: &[Vec<u32>]) -> Result<bool> {
    let Some(meeting) = ranks.meeting() else { return Ok(true) };
    let own = serde_json::to_vec(tokens)?;
    if ranks.shard().is_first() {
        meeting.command(&own)?;
        return Ok(true);
    }
    Ok(meeting.next_command().context("the first rank has left")? == own)
}
