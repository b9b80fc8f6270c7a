//! `kv-serve`: a model behind OpenAI's HTTP API, with compressed KV caches.

use std::io::IsTerminal;
use std::process::ExitCode;

use clap::Parser;
use kv_parallel::{Ranks, Role};
use kv_serve::Args;
use tracing_subscriber::EnvFilter;

/// Serves alone, as one of several ranks, or starts these.
fn served(args: &Args) -> anyhow::Result<ExitCode> {
    let ranks = match Ranks::join(args.model.tensor_parallel)? {
        Role::Starter(code) => return Ok(code),
        Role::Rank(ranks) => ranks,
    };
    if ranks.shard().is_first() {
        let runtime = tokio::runtime::Runtime::new()?;
        let served = runtime.block_on(kv_serve::run(args, &ranks));
        // A model that is still being loaded holds nobody up.
        runtime.shutdown_background();
        served?;
    } else {
        kv_serve::follow(&args.model, args.options(&ranks)?, &ranks)?;
    }
    ranks.finish();
    Ok(ExitCode::SUCCESS)
}

fn main() -> ExitCode {
    let args = Args::parse();
    let filter = match EnvFilter::try_new(&args.log) {
        Ok(filter) => filter,
        Err(error) => {
            let log = &args.log;
            eprintln!("error: --log {log}: {error}; `info` or `kv_serve=debug,warn`, for example");
            return ExitCode::FAILURE;
        }
    };
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false)
        .with_env_filter(filter)
        .init();
    match served(&args) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {}", causes(&error));
            ExitCode::FAILURE
        }
    }
}

/// An error and its causes, without those that the error quotes itself.
fn causes(error: &anyhow::Error) -> String {
    error.chain().fold(String::new(), |told, cause| match cause.to_string() {
        cause if told.contains(&cause) => told,
        cause if told.is_empty() => cause,
        cause => format!("{told}: {cause}"),
    })
}
