//! `cargo xtask serve`: builds and runs `kv-serve`.

use std::process::ExitCode;

use anyhow::Result;

use crate::util;

/// Build `kv-serve` in release, with the backend that `--device` asks for, and run it.
///
/// Everything but `--features` is passed on; `cargo xtask serve -- --help` shows kv-serve's own
/// help.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Cargo features to build with, instead of those that `--device` implies; give it first
    #[arg(long, value_delimiter = ',')]
    features: Option<Vec<String>>,
    /// What kv-serve gets: `MODEL --device D --port P --policy snapkv --budget 0.25 ...`, each of
    /// them optional; without a model the embedded `needle-1m`
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<String>,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    util::build_and_become("kv-serve", args.features.as_deref(), &args.args)
}
