//! `cargo xtask check`: format, dependencies, lints, docs.

use std::time::Instant;

use anyhow::{Result, bail};

use crate::util;

pub(crate) fn run() -> Result<()> {
    step("format", || cargo("fmt --all --check"))?;
    step("no fusion feature", || no_fusion("wgpu").and_then(|()| no_fusion("cuda")))?;
    // One set of features for lints and docs, so that dependencies are checked once; tests build
    // wgpu by itself.
    step("lints (wgpu, cuda)", || {
        cargo("clippy --release --workspace --all-targets --features=wgpu,cuda -- -D warnings")?;
        // All tests in one executable, which `cargo xtask dist` alone builds.
        cargo("clippy --release --workspace --test all --features=wgpu,cuda -- -D warnings")
    })?;
    // The build that has only the CPU's backend, where what only GPUs use is dead code.
    step("lints (flex)", || cargo("clippy --release -p kv-bench -- -D warnings"))?;
    step("docs", || {
        let mut docs = util::cargo("doc --release --no-deps --workspace --features=wgpu,cuda");
        util::run(docs.env("RUSTDOCFLAGS", "-D warnings"))
    })
}

/// Announces a step, runs it, and says how long it took.
fn step(name: &str, work: impl FnOnce() -> Result<()>) -> Result<()> {
    eprintln!("== {name}");
    let start = Instant::now();
    work()?;
    eprintln!("   ok, {:.1} s", start.elapsed().as_secs_f32());
    Ok(())
}

fn cargo(line: &str) -> Result<()> {
    util::run(&mut util::cargo(line))
}

/// Burn's `fusion` feature slows small operations down several times, and comes back with the
/// default features of any Burn crate.
fn no_fusion(features: &str) -> Result<()> {
    let line = format!("tree --workspace --edges=features --prefix=none --features={features}");
    let tree = util::output(&mut util::cargo(&line))?;
    let mut found: Vec<&str> = tree.lines().filter(|line| is_fusion(line)).collect();
    found.sort_unstable();
    found.dedup();
    if !found.is_empty() {
        bail!(
            "Burn's `fusion` feature is on with `--features {features}`; give every Burn crate \
             `default-features = false`:\n  {}",
            found.join("\n  ")
        );
    }
    Ok(())
}

/// Whether a line of `cargo tree` is a fusion feature, or a crate that only fusion needs.
fn is_fusion(line: &str) -> bool {
    let package = line.split(' ').next().unwrap_or_default();
    package == "burn-fusion"
        || package == "burn-cubecl-fusion"
        || (package.starts_with("burn") && line.contains("feature \"fusion\""))
}

#[cfg(test)]
mod tests {
    use super::is_fusion;

    #[test]
    fn fusion_is_recognised() {
        assert!(is_fusion("burn-cubecl feature \"fusion\""));
        assert!(is_fusion("burn-fusion v0.22.1"));
        assert!(is_fusion("burn-cubecl-fusion v0.22.1 (*)"));
        assert!(!is_fusion("burn-cubecl feature \"std\""));
        assert!(!is_fusion("burn-cubecl v0.22.1"));
    }
}
