//! `kv-dynamo`: a worker for NVIDIA Dynamo with compressed KV caches.

use std::process::ExitCode;
use std::sync::Arc;

use clap::Parser;
use kv_dynamo::{Args, KvEngine};
use kv_parallel::{Ranks, Role};

/// Serves alone, as one of several ranks, or starts these.
fn served(args: Args) -> anyhow::Result<ExitCode> {
    let ranks = match Ranks::join(args.model.tensor_parallel)? {
        Role::Starter(code) => return Ok(code),
        Role::Rank(ranks) => ranks,
    };
    if ranks.shard().is_first() {
        let (engine, config) = KvEngine::new(args, ranks.clone())?;
        dynamo_backend_common::run(Arc::new(engine), config)?;
    } else {
        kv_serve::follow(&args.model, args.engine.options(&ranks)?, &ranks)?;
    }
    ranks.finish();
    Ok(ExitCode::SUCCESS)
}

fn main() -> ExitCode {
    served(Args::parse()).unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::FAILURE
    })
}
