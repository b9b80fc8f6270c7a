//! `cargo xtask dist`: one small archive to run on another machine.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;

use crate::util;

/// Pack `kv-bench` and the tests into one archive that runs on another machine.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The backend to build for
    #[arg(long)]
    device: Device,
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

    /// Its cargo feature; the CPU backend is always built.
    fn feature(self) -> &'static str {
        match self {
            Self::Cpu => "",
            other => other.name(),
        }
    }
}

/// An archive above this is a mistake: it travels to machines over slow lines.
const LIMIT: u64 = 25_000_000;

pub(crate) fn run(args: &Args) -> Result<()> {
    let out = args.out.clone().unwrap_or_else(|| util::target_dir().join("dist"));
    let name = format!("burn-kv-{}", args.device.name());
    let folder = out.join(&name);
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    fs::create_dir_all(&folder)?;

    eprintln!("building kv-bench and the tests (release, {})", args.device.name());
    add(&util::build_bench(args.device.feature())?, &folder.join("kv-bench"))?;
    add_tests(args.device, &folder)?;
    fs::write(folder.join("README"), readme(args.device))?;

    let archive = pack(&out, &name)?;
    fs::remove_dir_all(&folder)?;
    let bytes = fs::metadata(&archive)?.len();
    println!("{} ({:.1} MB)", archive.display(), bytes as f64 / 1e6);
    ensure!(bytes < LIMIT, "the archive is larger than {} MB", LIMIT / 1_000_000);
    Ok(())
}

/// Adds all crates' integration tests, which are one executable of kv-bench's.
fn add_tests(device: Device, folder: &Path) -> Result<()> {
    let features = device.feature();
    let line = format!("test --no-run --release -p kv-bench --test=all --features={features}");
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

fn readme(device: Device) -> String {
    let device = device.name();
    format!(
        "burn-kv for {device}: `./kv-bench --device {device}` measures, `./kv-bench --help` says \
         more, `./tests` tests (golden files: KV_GOLDEN_DIR, models: KV_MODELS_DIR).\n"
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
