//! `cargo xtask test`: every test that can run on this machine, and what could not.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};

use crate::programs::{self, Settings};
use crate::report::{Counts, Report};
use crate::util::{self, Executable, Feature};
use crate::{browser, vulkan};

/// Run everything that can run on this machine, and say what was skipped and why.
///
/// Kernels run through `wgpu`, on a software Vulkan driver where there is no GPU. The last line is
/// always `N passed, M failed, K skipped`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Run the kernels through CUDA instead of wgpu; fails where they cannot
    #[arg(long, conflicts_with = "require_wgpu")]
    cuda: bool,
    /// Also run the tests behind the cargo feature `slow-tests`
    #[arg(long)]
    slow: bool,
    /// Fail when no test ran on wgpu (always so where CI=true)
    #[arg(long)]
    require_wgpu: bool,
}

/// The cargo feature that long tests hide behind.
const SLOW: &str = "slow-tests";

/// What was left out as a whole, and what makes the run a failure besides failed tests.
#[derive(Default)]
struct Notes {
    skipped: Vec<String>,
    failures: Vec<String>,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let mut notes = Notes::default();
    let features = features(args, &mut notes)?;
    if let Err(error) = browser::ensure() {
        eprintln!("the report will not be opened in a browser: {error:#}");
    }
    let folder = util::target_dir().join("xtask");
    let report_file = folder.join("test-report.txt");
    std::fs::create_dir_all(&folder)?;
    std::fs::write(&report_file, "")?;

    eprintln!("building all tests (release) with {}", util::show_features(&features));
    let features = util::feature_list(&features);
    let settings =
        Settings { variables: variables(args, &folder, &report_file)?, alone: args.cuda };
    // Without examples, which `cargo xtask check` lints.
    let build = format!("test --release --workspace --no-run --tests --features={features}");
    let counts = match util::build(&build) {
        Ok(executables) => run_all(executables, &features, &settings, &mut notes)?,
        Err(error) => {
            notes.failures.push(format!("{error:#}"));
            Counts::default()
        }
    };

    let report = Report::parse(&std::fs::read_to_string(&report_file)?);
    let backend = if args.cuda { "cuda" } else { "wgpu" };
    let in_ci = std::env::var_os("CI").is_some_and(|ci| ci == "true");
    if (args.cuda || args.require_wgpu || in_ci) && !report.ran_on(backend) {
        notes.failures.push(format!("no test ran on {backend}"));
    }
    Ok(conclude(&counts, &report, &notes))
}

/// The cargo features of the run; what they leave out goes to the notes.
fn features(args: &Args, notes: &mut Notes) -> Result<Vec<Feature>> {
    let mut features = Vec::new();
    if args.cuda {
        features.push(Feature::new("cuda", "--cuda: kernels on an NVIDIA GPU"));
        notes.skipped.push("wgpu kernels: --cuda replaces them".to_string());
    } else {
        notes.skipped.push("CUDA kernels: need an NVIDIA GPU and --cuda".to_string());
        match vulkan::ensure() {
            Ok(()) => features
                .push(Feature::new("wgpu", "kernels through Vulkan, on a GPU or in software")),
            Err(error) => {
                eprintln!("wgpu tests will be skipped: {error:#}");
                notes.skipped.push(format!("wgpu kernels: {error:#}"));
            }
        }
    }
    if has_slow_tests()? {
        if args.slow {
            features.push(Feature::new(SLOW, "--slow"));
        } else {
            notes.skipped.push("slow tests: need --slow".to_string());
        }
    }
    Ok(features)
}

/// Whether a crate of the workspace has slow tests; cargo refuses a feature that none has.
fn has_slow_tests() -> Result<bool> {
    let metadata = util::output(&mut util::cargo("metadata --no-deps --format-version=1"))?;
    let metadata: serde_json::Value = serde_json::from_str(&metadata)?;
    let packages = metadata["packages"].as_array().context("cargo metadata lists no packages")?;
    Ok(packages.iter().any(|package| package["features"].get(SLOW).is_some()))
}

/// A folder that only this user can read, as `XDG_RUNTIME_DIR` must be.
fn runtime_dir(folder: &Path) -> Result<PathBuf> {
    let dir = folder.join("runtime");
    std::fs::create_dir_all(&dir)?;
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(&dir, std::fs::Permissions::from_mode(0o700))?;
    }
    Ok(dir)
}

/// What test executables have in their environment.
fn variables(args: &Args, folder: &Path, report: &Path) -> Result<Vec<(String, String)>> {
    let mut variables = vec![("KV_TEST_REPORT".to_string(), report.display().to_string())];
    if args.cuda {
        // CUDA refuses what other threads do while one records a graph.
        variables.push(("RUST_TEST_THREADS".to_string(), "1".to_string()));
    }
    if std::env::var_os("XDG_RUNTIME_DIR").is_none() {
        // Mesa's driver warns without one.
        let dir = runtime_dir(folder)?;
        variables.push(("XDG_RUNTIME_DIR".to_string(), dir.display().to_string()));
    }
    Ok(variables)
}

/// Runs all executables, then the examples in documentation.
fn run_all(
    executables: Vec<Executable>,
    features: &str,
    settings: &Settings,
    notes: &mut Notes,
) -> Result<Counts> {
    let mut counts = Counts::default();
    for outcome in
        [programs::run(executables, settings)?, programs::run_doc_tests(features, settings)?]
    {
        counts.add(&outcome.counts);
        notes.failures.extend(outcome.broken);
    }
    Ok(counts)
}

/// Prints the summary and its closing line.
fn conclude(counts: &Counts, report: &Report, notes: &Notes) -> ExitCode {
    let devices = report.devices.iter().map(|(name, count)| format!("{name} x {count}"));
    let devices = devices.collect::<Vec<_>>().join(", ");
    println!("\nbackends that tests reported: [{devices}]");
    println!("golden files checked: {}", report.golden.len());
    for (why, parts) in &report.lacking {
        let parts = parts.iter().map(String::as_str).collect::<Vec<_>>().join(", ");
        println!("not run here: {why}: {parts}");
    }
    for (test, why) in &report.skipped {
        println!("skipped test {test}: {why}");
    }
    for note in &notes.skipped {
        println!("skipped {note}");
    }
    for failure in &notes.failures {
        println!("FAILED: {failure}");
    }
    let failed = counts.failed + notes.failures.len();
    let passed = counts.passed.saturating_sub(report.skipped.len());
    let skipped = counts.ignored + report.skipped.len();
    println!("{passed} passed, {failed} failed, {skipped} skipped");
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
