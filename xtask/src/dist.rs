//! `cargo xtask dist`: one small archive to run on another machine.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;

use crate::util::{self, Feature};

/// Pack `kv-bench` and the tests into one archive that runs on another machine.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The backends to build for, such as `cuda` or `cuda,vulkan`
    #[arg(long, value_delimiter = ',', required = true)]
    device: Vec<Device>,
    /// Where to put the archive [default: target/dist]
    #[arg(long)]
    out: Option<PathBuf>,
}

/// What an archive is built for.
#[derive(Clone, Copy, ValueEnum)]
enum Device {
    Cuda,
    Wgpu,
    Vulkan,
    Cpu,
}

impl Device {
    /// Its name in `--device`, here and in `kv-bench`.
    fn name(self) -> &'static str {
        match self {
            Self::Cuda => "cuda",
            Self::Wgpu => "wgpu",
            Self::Vulkan => "vulkan",
            Self::Cpu => "cpu",
        }
    }
}

/// The features for `devices`; the CPU backend is always built.
fn features(devices: &[Device]) -> Vec<Feature> {
    let devices = devices.iter().filter(|device| !matches!(device, Device::Cpu));
    devices.map(|device| Feature::new(device.name(), "--device asks for it")).collect()
}

/// An archive above this is a mistake: it travels to machines over slow lines.
const LIMIT: u64 = 25_000_000;

pub(crate) fn run(args: &Args) -> Result<()> {
    let out = args.out.clone().unwrap_or_else(|| util::target_dir().join("dist"));
    let devices: Vec<&str> = args.device.iter().map(|device| device.name()).collect();
    let name = format!("burn-kv-{}", devices.join("-"));
    let folder = out.join(&name);
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    fs::create_dir_all(&folder)?;

    let features = features(&args.device);
    let shown = util::show_features(&features);
    eprintln!("building kv-bench and the tests (release) with {shown}");
    let features = util::feature_list(&features);
    add(&util::build_program("kv-bench", &features)?, &folder.join("kv-bench"))?;
    add_tests(&features, &folder)?;
    fs::write(folder.join("README"), readme(&devices))?;

    let archive = pack(&out, &name)?;
    fs::remove_dir_all(&folder)?;
    let bytes = fs::metadata(&archive)?.len();
    println!("{} ({:.1} MB)", archive.display(), bytes as f64 / 1e6);
    ensure!(bytes < LIMIT, "the archive is larger than {} MB", LIMIT / 1_000_000);
    Ok(())
}

/// Adds all crates' integration tests, which are one executable of kv-bench's.
fn add_tests(features: &str, folder: &Path) -> Result<()> {
    let line = format!("test --no-run --release --workspace --test=all --features={features}");
    let tests = util::build(&line)?;
    let test = tests.iter().find(|test| test.source.ends_with("tests/all.rs"));
    add(&test.context("the test runner was not built")?.path, &folder.join("tests"))
}

/// Copies an executable and strips the copy; stripping in cargo's profile would rebuild every
/// dependency.
fn add(executable: &Path, to: &Path) -> Result<()> {
    fs::copy(executable, to).with_context(|| format!("cannot copy {}", executable.display()))?;
    util::run(Command::new("strip").arg(to)).context("`strip` comes with the linker (binutils)")
}

fn readme(devices: &[&str]) -> String {
    format!(
        "burn-kv for {}: `./kv-bench --device {}` measures, `./kv-bench --help` says more, \
         `./tests --test-threads=1` tests. KV_GOLDEN_DIR names a copy of the sources' \
         fixtures/golden, KV_MODELS_DIR a folder of larger models (absolute paths); tests that \
         read these are skipped without.\n",
        devices.join(" and "),
        devices[0]
    )
}

/// Packs a folder with xz, or gzip where there is no xz.
fn pack(out: &Path, name: &str) -> Result<PathBuf> {
    let (flags, ending) =
        if util::succeeds("xz", &["--version"]) { ("-cJf", "xz") } else { ("-czf", "gz") };
    let archive = out.join(format!("{name}.tar.{ending}"));
    let mut tar = Command::new("tar");
    // The two executables are mostly the same code, which only a dictionary of their size shows.
    tar.arg("-C").arg(out).arg(flags).arg(&archive).arg(name);
    tar.env("XZ_OPT", "--lzma2=preset=9e,dict=192MiB");
    util::run(&mut tar)?;
    Ok(archive)
}
