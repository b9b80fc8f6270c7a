//! `cargo xtask bench`: builds and runs `kv-bench`.

use std::process::ExitCode;

use anyhow::Result;

use crate::util;

/// Build `kv-bench` in release, with the backend that `--device` asks for, and run it.
///
/// Everything but `--features` is passed on; `cargo xtask bench -- --help` shows kv-bench's own
/// help.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Cargo features to build with, instead of those that `--device` implies; give it first
    #[arg(long, value_delimiter = ',')]
    features: Option<Vec<String>>,
    /// What kv-bench gets: `SUITE --model M --device D --policy a,b --budget 0.25,512 --json FILE
    /// --quick`, each of them optional
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<String>,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    util::build_and_become("kv-bench", args.features.as_deref(), &args.args)
}
