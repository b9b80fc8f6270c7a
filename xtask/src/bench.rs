//! `cargo xtask bench`: builds and runs `kv-bench`.

use std::process::{Command, ExitCode};

use anyhow::{Context, Result};

use crate::util;

/// Build `kv-bench` in release, with the backend that `--device` asks for, and run it.
///
/// Everything but `--features` is passed on; `cargo xtask bench -- --help` shows kv-bench's own help.
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
    let features = match &args.features {
        Some(features) => features.join(","),
        None => device_feature(&args.args).unwrap_or_default().to_string(),
    };
    eprintln!("building kv-bench (release, features: [{features}]); the first build takes minutes");
    let bench = util::build_bench(&features)?;
    let status = Command::new(&bench)
        .args(&args.args)
        // The report goes to the workspace's target folder, whichever folder this runs in.
        .env("CARGO_TARGET_DIR", util::target_dir())
        .status()
        .with_context(|| format!("cannot run {}", bench.display()))?;
    // A process that a signal ended has no exit code.
    let code = status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1);
    Ok(ExitCode::from(code))
}

/// The cargo feature behind the arguments' `--device`; the CPU backend is always built.
fn device_feature(args: &[String]) -> Option<&'static str> {
    let device = args.iter().enumerate().rev().find_map(|(i, arg)| match arg.as_str() {
        "--device" => args.get(i + 1).map(String::as_str),
        arg => arg.strip_prefix("--device="),
    })?;
    match device.split(':').next() {
        Some("cuda") => Some("cuda"),
        Some("vulkan") => Some("vulkan"),
        Some("wgpu") => Some("wgpu"),
        Some("metal") => Some("metal"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::device_feature;

    fn feature(line: &str) -> Option<&'static str> {
        device_feature(&line.split(' ').map(String::from).collect::<Vec<_>>())
    }

    #[test]
    fn the_device_chooses_the_feature() {
        assert_eq!(feature("quality --device cuda:1 --quick"), Some("cuda"));
        assert_eq!(feature("--device=vulkan"), Some("vulkan"));
        assert_eq!(feature("--device wgpu --device metal"), Some("metal"));
        assert_eq!(feature("kernels --device cpu"), None);
        assert_eq!(feature("kernels --quick --device"), None);
        assert_eq!(feature("kernels"), None);
    }
}
