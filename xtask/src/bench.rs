//! `cargo xtask bench`: builds and runs `kv-bench`.

use std::process::{Command, ExitCode};

use anyhow::{Context, Result};

use crate::util::{self, Feature};

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
    let features = features(args);
    eprintln!("building kv-bench (release) with {}", util::show_features(&features));
    eprintln!("the first build takes minutes");
    let bench = util::build_bench(&util::feature_list(&features))?;
    let mut command = Command::new(&bench);
    // The report goes to the workspace's target folder, whichever folder this runs in.
    command.args(&args.args).env("CARGO_TARGET_DIR", util::target_dir());
    become_program(command).with_context(|| format!("cannot run {}", bench.display()))
}

/// Goes on as another program, so that an interrupt is that program's alone.
#[cfg(unix)]
fn become_program(mut command: Command) -> Result<ExitCode> {
    use std::os::unix::process::CommandExt;
    Err(command.exec().into())
}

/// Runs another program to its end.
#[cfg(not(unix))]
fn become_program(mut command: Command) -> Result<ExitCode> {
    let code = command.status()?.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1);
    Ok(ExitCode::from(code))
}

/// The cargo features of the build, each with its reason.
fn features(args: &Args) -> Vec<Feature> {
    match &args.features {
        Some(features) => {
            features.iter().map(|name| Feature::new(name, "--features names it")).collect()
        }
        None => {
            let device = device_feature(&args.args);
            device.map(|name| Feature::new(name, "--device asks for it")).into_iter().collect()
        }
    }
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
    use super::{Args, device_feature, features};
    use crate::util::show_features;

    fn feature(line: &str) -> Option<&'static str> {
        device_feature(&line.split(' ').map(String::from).collect::<Vec<_>>())
    }

    #[test]
    fn features_have_reasons() {
        let shown = |features: Option<Vec<String>>, line: &str| {
            let args = line.split(' ').map(String::from).collect();
            show_features(&super::features(&Args { features, args }))
        };
        assert_eq!(shown(None, "quality"), "the cargo features flex (the CPU: always)");
        assert_eq!(
            shown(None, "--device cuda"),
            "the cargo features flex (the CPU: always), cuda (--device asks for it)"
        );
        let named = shown(Some(vec!["wgpu".into()]), "--device cuda");
        assert!(named.ends_with("wgpu (--features names it)"), "{named}");
        assert!(features(&Args { features: None, args: Vec::new() }).is_empty());
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
