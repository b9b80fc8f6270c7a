//! The workspace's commands: `cargo xtask bench`, `serve`, `test`, `check`, `conformance`, `dist`,
//! `dynamo`, `model`.
//!
//! Everything that CI does and everything a developer does more than once is here, so that both run
//! the same thing.

mod bench;
mod browser;
mod check;
mod conformance;
mod dist;
mod dynamo;
mod model;
mod packages;
mod programs;
mod report;
mod serve;
mod test;
mod util;
mod vulkan;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Build, test and benchmark commands of the workspace.
#[derive(Parser)]
#[command(bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Bench(bench::Args),
    Serve(serve::Args),
    Test(test::Args),
    /// Format, dependencies, lints, docs: cheapest first, stopping at the first failure.
    Check,
    Conformance(conformance::Args),
    Dist(dist::Args),
    Dynamo(dynamo::Args),
    Model(model::Args),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Bench(args) => bench::run(&args),
        Command::Serve(args) => serve::run(&args),
        Command::Test(args) => test::run(&args),
        Command::Check => check::run().map(|()| ExitCode::SUCCESS),
        Command::Conformance(args) => conformance::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Dist(args) => dist::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Dynamo(args) => dynamo::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Model(args) => model::run(&args).map(|()| ExitCode::SUCCESS),
    };
    result.unwrap_or_else(|error| {
        // Not `main`'s own error, which would add a backtrace that says nothing to the caller.
        eprintln!("error: {error:#}");
        ExitCode::FAILURE
    })
}
