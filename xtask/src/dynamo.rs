//! `cargo xtask dynamo`: the worker for NVIDIA Dynamo, against Dynamo's own kit and front end.

use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

use anyhow::{Result, bail};

use crate::{packages, util};

/// Dynamo's front end. Its other requirements are for engines and tools that are not used here.
const FRONT_END: [&str; 2] = ["ai-dynamo==1.6.1", "ai-dynamo-runtime==1.6.1"];
/// What the front end imports, and the client.
const IMPORTS: [&str; 6] =
    ["msgspec", "openai", "packaging", "pydantic>=2.10.6,<=2.13.5", "PyYAML", "uvloop"];

/// Build and test the worker for NVIDIA Dynamo.
///
/// Runs its tests, Dynamo's conformance kit, and workers on this host behind Dynamo's front end, of
/// which one is killed under load. Installs protoc and libclang, and makes a Python with the front
/// end, where they are missing.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// A Python with ai-dynamo and openai, instead of one in target/dynamo
    #[arg(long, value_name = "PROGRAM")]
    python: Option<PathBuf>,
}

/// Whether there is libclang, which generates bindings of NIXL for Dynamo.
const CLANG: &str = r#"test -n "$LIBCLANG_PATH" || ldconfig -p | grep -q 'libclang[-.0-9]*so'"#;

/// Runs the command.
///
/// # Errors
///
/// When something cannot be installed, and when a step fails.
pub(crate) fn run(args: &Args) -> Result<()> {
    let has_protoc = || util::succeeds("protoc", &["--version"]);
    packages::ensure("protoc", &["protobuf-compiler"], has_protoc)?;
    let has_libclang = || util::succeeds("sh", &["-c", CLANG]);
    packages::ensure("libclang", &["libclang-dev", "g++"], has_libclang)?;
    let python = args.python.clone().map_or_else(python, Ok)?;
    let steps = [
        ("format", "fmt --check"),
        ("lints", "clippy --all-targets -- -D warnings"),
        ("requests, load, options", "test --lib --bins"),
        ("conformance kit", "test --test worker conformance"),
        ("answers", "test --test worker answers"),
        ("workers behind the front end", "test --test worker host -- --nocapture --test-threads 1"),
    ];
    let mut lines = Vec::new();
    for (name, line) in steps {
        eprintln!("== {name}");
        let start = Instant::now();
        let mut command = util::cargo(line);
        command.current_dir(util::root().join("dynamo")).env("KV_DYNAMO_PYTHON", &python);
        let outcome = match util::run(&mut command) {
            Ok(()) => "ok",
            Err(_) => "FAILED",
        };
        lines.push((name, outcome, start.elapsed().as_secs_f32()));
    }
    for (name, outcome, seconds) in &lines {
        println!("{name:<30} {outcome:<8} {seconds:>7.1} s");
    }
    if lines.iter().any(|(_, outcome, _)| *outcome != "ok") {
        bail!("a step failed");
    }
    Ok(())
}

/// A Python with the front end and its client, which is made where it is missing.
fn python() -> Result<PathBuf> {
    let folder = util::target_dir().join("dynamo");
    let python = folder.join("bin/python");
    let name = python.display().to_string();
    if !util::succeeds(&name, &["-c", "import dynamo.frontend.main, openai"]) {
        eprintln!("making {} with Dynamo's front end", folder.display());
        util::run(Command::new("python3").args(["-m", "venv"]).arg(&folder))?;
        let pip = |args: &[&str]| {
            util::run(Command::new(&python).args(["-m", "pip", "install", "-q"]).args(args))
        };
        pip(&IMPORTS)?;
        pip(&["--no-deps", FRONT_END[0], FRONT_END[1]])?;
    }
    Ok(python)
}
