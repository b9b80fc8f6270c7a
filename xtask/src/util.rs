//! Running cargo and other programs.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

/// The workspace's root folder.
pub(crate) fn root() -> PathBuf {
    // As cargo says now: checkouts that share a target folder may run each other's program.
    let own = std::env::var_os("CARGO_MANIFEST_DIR");
    let own = own.unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    let parent = Path::new(&own).parent().expect("xtask is a folder of the workspace");
    parent.to_path_buf()
}

/// Where cargo builds.
pub(crate) fn target_dir() -> PathBuf {
    root().join(std::env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into()))
}

/// A cargo command, given as one would type it, in the workspace's root.
pub(crate) fn cargo(line: &str) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(line.split_whitespace()).current_dir(root());
    // `cargo run` names the package that it runs in variables that some build scripts watch (ring's
    // does): passed on, they would rebuild what plain cargo built.
    let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    for name in names.filter(|n| n.starts_with("CARGO_PKG_") || n.starts_with("CARGO_MANIFEST_")) {
        command.env_remove(name);
    }
    command
}

/// Runs a command to its end.
///
/// # Errors
///
/// When it cannot be started, or fails.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("cannot start {}", show(command)))?;
    ensure!(status.success(), "{} failed ({status})", show(command));
    Ok(())
}

/// Runs a command to its end and returns its standard output.
///
/// # Errors
///
/// When it cannot be started, fails, or writes something that is not UTF-8.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let output = command
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("cannot start {}", show(command)))?;
    ensure!(output.status.success(), "{} failed ({})", show(command), output.status);
    String::from_utf8(output.stdout).with_context(|| format!("output of {}", show(command)))
}

/// Whether a command exists and succeeds; its output is dropped.
pub(crate) fn succeeds(program: &str, args: &[&str]) -> bool {
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

/// An executable that cargo built.
pub(crate) struct Executable {
    /// The target's root source file.
    pub(crate) source: PathBuf,
    /// The folder of the target's package.
    pub(crate) package: PathBuf,
    /// Whether it runs tests.
    pub(crate) tests: bool,
    /// The executable itself.
    pub(crate) path: PathBuf,
}

/// Runs a cargo command that builds (`build …`, `test --no-run …`) and returns the executables
/// made.
///
/// # Errors
///
/// When the build fails.
pub(crate) fn build(line: &str) -> Result<Vec<Executable>> {
    let messages = output(cargo(line).arg("--message-format=json-render-diagnostics"))?;
    let messages = messages.lines().filter_map(|line| serde_json::from_str(line).ok());
    Ok(messages.filter_map(|message: Value| executable(&message)).collect())
}

/// A cargo feature of a build, and why it has it.
pub(crate) struct Feature {
    name: String,
    reason: String,
}

impl Feature {
    pub(crate) fn new(name: impl Into<String>, reason: impl Into<String>) -> Self {
        Self { name: name.into(), reason: reason.into() }
    }
}

/// Features as cargo takes them.
pub(crate) fn feature_list(features: &[Feature]) -> String {
    features.iter().map(|feature| feature.name.as_str()).collect::<Vec<_>>().join(",")
}

/// Features and their reasons, in words; the CPU's is a default of all crates.
pub(crate) fn show_features(features: &[Feature]) -> String {
    let cpu = Feature::new("flex", "the CPU: always");
    let all = std::iter::once(&cpu).chain(features);
    let all: Vec<_> = all.map(|Feature { name, reason }| format!("{name} ({reason})")).collect();
    format!("the cargo features {}", all.join(", "))
}

/// Builds a program of the workspace in release and goes on as it. `named` are the cargo features;
/// those that the arguments' `--device` implies where there are none.
///
/// # Errors
///
/// When the build fails, or the program cannot be started.
pub(crate) fn build_and_become(
    name: &str,
    named: Option<&[String]>,
    args: &[String],
) -> Result<ExitCode> {
    let features = program_features(named, args);
    eprintln!("building {name} (release) with {}", show_features(&features));
    eprintln!("the first build takes minutes");
    let program = build_program(name, &feature_list(&features))?;
    let mut command = Command::new(&program);
    // What a program writes goes to the workspace's target folder, whichever folder this runs in.
    command.args(args).env("CARGO_TARGET_DIR", target_dir());
    become_program(command).with_context(|| format!("cannot run {}", program.display()))
}

/// Builds a program in release with some cargo features, and returns the executable. The whole
/// workspace is named, as for tests, so that crates have the features that tests build them with
/// and are compiled once.
///
/// # Errors
///
/// When the build fails.
pub(crate) fn build_program(name: &str, features: &str) -> Result<PathBuf> {
    let line = format!("build --release --workspace --bin {name} --features={features}");
    let built = build(&line)?.into_iter().next();
    Ok(built.with_context(|| format!("cargo built no executable for {name}"))?.path)
}

/// Goes on as another program, so that an interrupt is that program's alone.
///
/// # Errors
///
/// When it cannot be started.
#[cfg(unix)]
fn become_program(mut command: Command) -> Result<ExitCode> {
    use std::os::unix::process::CommandExt;
    Err(command.exec().into())
}

/// Runs another program to its end.
///
/// # Errors
///
/// When it cannot be started.
#[cfg(not(unix))]
fn become_program(mut command: Command) -> Result<ExitCode> {
    let code = command.status()?.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1);
    Ok(ExitCode::from(code))
}

/// The cargo features of a program's build, each with its reason: those that are named, or the one
/// behind the program's own `--device`.
fn program_features(named: Option<&[String]>, args: &[String]) -> Vec<Feature> {
    match named {
        Some(features) => {
            features.iter().map(|name| Feature::new(name, "--features names it")).collect()
        }
        None => {
            let device = device_feature(args);
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

/// Reads one of cargo's JSON messages; most are not about an executable.
fn executable(message: &Value) -> Option<Executable> {
    Some(Executable {
        source: message["target"]["src_path"].as_str()?.into(),
        package: Path::new(message["manifest_path"].as_str()?).parent()?.to_path_buf(),
        tests: message["profile"]["test"].as_bool()?,
        path: message["executable"].as_str()?.into(),
    })
}

/// A command as one would type it.
fn show(command: &Command) -> String {
    let program = Path::new(command.get_program());
    let program = program.file_name().unwrap_or(program.as_os_str());
    let words = std::iter::once(program).chain(command.get_args());
    let words: Vec<_> = words.map(|word| word.to_string_lossy()).collect();
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use super::{device_feature, program_features, show_features};

    fn feature(line: &str) -> Option<&'static str> {
        device_feature(&line.split(' ').map(String::from).collect::<Vec<_>>())
    }

    #[test]
    fn features_have_reasons() {
        let shown = |features: Option<&[String]>, line: &str| {
            let args: Vec<String> = line.split(' ').map(String::from).collect();
            show_features(&program_features(features, &args))
        };
        assert_eq!(shown(None, "quality"), "the cargo features flex (the CPU: always)");
        assert_eq!(
            shown(None, "--device cuda"),
            "the cargo features flex (the CPU: always), cuda (--device asks for it)"
        );
        let named = shown(Some(&["wgpu".into()]), "--device cuda");
        assert!(named.ends_with("wgpu (--features names it)"), "{named}");
        assert!(program_features(None, &[]).is_empty());
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
