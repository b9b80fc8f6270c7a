//! `cargo xtask bench`: builds and runs `kv-bench`.

use std::process::{Command, ExitCode};

use anyhow::{Context, Result};

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
    let features = util::program_features(args.features.as_deref(), &args.args);
    eprintln!("building kv-bench (release) with {}", util::show_features(&features));
    eprintln!("the first build takes minutes");
    let bench = util::build_bench(&util::feature_list(&features))?;
    let mut command = Command::new(&bench);
    // The report goes to the workspace's target folder, whichever folder this runs in.
    command.args(&args.args).env("CARGO_TARGET_DIR", util::target_dir());
    util::become_program(command).with_context(|| format!("cannot run {}", bench.display()))
}
