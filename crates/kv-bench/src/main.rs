//! `kv-bench` measures the cost and the quality of KV-cache compression policies.

mod allocator;
mod args;
mod bench;
mod certificates;
mod console;
mod families;
mod figures;
mod files;
mod format;
mod inputs;
mod interrupt;
mod interval;
mod measure;
mod merge_records;
mod options;
mod policy_runs;
mod progress;
mod prompts;
mod record;
mod record_log;
mod report;
mod run;
mod studies;
mod suites;
mod table;
#[cfg(test)]
mod testing;

use std::io::IsTerminal;
use std::process::ExitCode;

use clap::Parser;
use tracing_subscriber::EnvFilter;

/// The log without `RUST_LOG`: warnings of this project, errors of others. The policies' remarks
/// are left out, as suites note them.
const WARNINGS: &str =
    "error,kv_core=warn,kv_models=warn,kv_policies=warn,kv_policies::remarks=off";

fn main() -> ExitCode {
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .without_time()
        .with_target(false)
        .with_env_filter(
            EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(WARNINGS)),
        )
        .init();
    let args = args::Args::parse();
    match interrupt::tell().and_then(|()| run::run(&args)) {
        Ok(code) => code,
        Err(error) => {
            console::say!("error: {}", console::causes(&error));
            ExitCode::FAILURE
        }
    }
}
