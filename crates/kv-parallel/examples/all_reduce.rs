//! Times sums over ranks: launched one by one, and as parts of a recording.
//!
//! ```sh
//! cargo run --release -p kv-parallel --features cuda --example all_reduce -- --ranks 2
//! ```
//!
//! Kernels that write into the other ranks' memory add tensors of up to 512 KiB. With
//! `KV_DIRECT_SUMS=0` in the environment, NCCL adds all tensors.
//!
//! A chain is a multiplication and a sum, many times over, as between the products of a model's
//! layers; its time is the median of several chains, divided by their links. The sum alone is the
//! chain with sums less the chain without.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use anyhow::Result;
use burn::tensor::{DType, Device, Tensor};
use clap::Parser;
use kv_core::{DeviceChoice, select_device};
use kv_kernels::Recording;
use kv_parallel::{Collective, Meeting, Ranks, Role};
use statrs::statistics::{Data, OrderStatistics};

/// Times sums over ranks.
#[derive(Debug, Parser)]
struct Args {
    /// Processes, with a GPU each.
    #[arg(long)]
    ranks: Option<usize>,
    /// The device.
    #[arg(long, default_value = "auto")]
    device: DeviceChoice,
    /// Let all ranks use the first GPU, and add without NCCL: right sums, but not their times
    #[arg(long)]
    share_gpu: bool,
    /// Numbers that are added, in bf16.
    #[arg(long, value_delimiter = ',', default_value = "4096,8192,32768,262144,524288")]
    numbers: Vec<usize>,
}

/// Links of a chain.
const LINKS: usize = 64;
/// Chains that are timed.
const RUNS: usize = 30;

fn main() -> Result<ExitCode> {
    let args = Args::parse();
    let ranks = match Ranks::join(args.ranks)? {
        Role::Starter(code) => return Ok(code),
        Role::Rank(ranks) => ranks,
    };
    let local = if args.share_gpu { 0 } else { ranks.local() };
    let device = select_device(args.device.of_process(local))?;
    let collective = match (args.share_gpu, ranks.meeting()) {
        (true, Some(meeting)) => direct(meeting, &device)?,
        _ => ranks.collective(&device)?,
    };
    if ranks.shard().is_first() {
        println!("us a link: multiplication; multiplication and sum; the sum alone");
        println!("{:>9} {:>24} {:>24}", "numbers", "launched", "recorded");
    }
    for &numbers in &args.numbers {
        let x = Tensor::<2>::ones([1, numbers], (&device, DType::BF16));
        let mut cells = Vec::new();
        for recorded in [false, true] {
            let alone = time(&x, &device, recorded, &|x| Ok(x))?;
            let both = time(&x, &device, recorded, &|x| Ok(collective.all_reduce(x)?))?;
            let cell = |both: f64, alone: f64| format!("{alone:.1} {both:.1} {:.1}", both - alone);
            cells.push(both.zip(alone).map_or("-".into(), |(both, alone)| cell(both, alone)));
        }
        if ranks.shard().is_first() {
            println!("{numbers:>9} {:>24} {:>24}", cells[0], cells[1]);
        }
    }
    ranks.finish();
    Ok(ExitCode::SUCCESS)
}

#[cfg(feature = "cuda")]
fn direct(meeting: &Meeting, device: &Device) -> Result<Arc<dyn Collective>> {
    Ok(Arc::new(kv_parallel::Direct::new(meeting, device)?))
}

#[cfg(not(feature = "cuda"))]
fn direct(_: &Meeting, _: &Device) -> Result<Arc<dyn Collective>> {
    anyhow::bail!("build with `--features cuda` for --share-gpu")
}

/// Microseconds of a link; `None` where the device cannot record.
fn time(
    x: &Tensor<2>,
    device: &Device,
    recorded: bool,
    sum: &dyn Fn(Tensor<2>) -> Result<Tensor<2>>,
) -> Result<Option<f64>> {
    let chain = || (0..LINKS).try_fold(x.clone(), |x, _| sum(x.mul_scalar(0.5)));
    let sync = || device.sync().map_err(|error| anyhow::anyhow!("{error}"));
    for _ in 0..3 {
        chain()?;
    }
    sync()?;
    let graph = match recorded {
        false => None,
        true => {
            let Some(recording) = Recording::begin(device) else { return Ok(None) };
            chain()?;
            Some(recording.record(chain)?)
        }
    };
    let mut times = Vec::with_capacity(RUNS);
    for _ in 0..RUNS {
        let clock = Instant::now();
        match &graph {
            None => drop(chain()?),
            // SAFETY: the recorded tensors live as long as the graph.
            Some((output, graph)) => {
                output.as_ref().map_err(|error| anyhow::anyhow!("{error}"))?;
                unsafe { graph.replay()? };
            }
        }
        sync()?;
        times.push(clock.elapsed().as_secs_f64() * 1e6 / LINKS as f64);
    }
    Ok(Some(Data::new(times).median()))
}
