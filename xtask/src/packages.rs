//! Packages of the system that tests need, installed where that is possible.

use std::process::Command;

use anyhow::{Result, bail};

use crate::util;

/// Makes sure that something is there, installing packages where it is not.
///
/// # Errors
///
/// When it is not there and could not be installed; the message says what to do by hand.
pub(crate) fn ensure(what: &str, packages: &[&str], is_there: impl Fn() -> bool) -> Result<()> {
    if is_there() {
        return Ok(());
    }
    let names = packages.join(" ");
    let Some(mut install) = installer(&names) else {
        bail!("no {what}; install one, such as `apt-get install {names}`");
    };
    eprintln!("no {what}: installing {names} for the tests");
    util::run(&mut install)?;
    if !is_there() {
        bail!("no {what}, even after installing {names}");
    }
    Ok(())
}

/// The command that installs packages, where it can run without asking for a password.
fn installer(names: &str) -> Option<Command> {
    if !util::succeeds("apt-get", &["--version"]) {
        return None;
    }
    let script = format!(
        "export DEBIAN_FRONTEND=noninteractive; apt-get update -qq \
         && apt-get install -qq -y --no-install-recommends {names}"
    );
    let is_root = util::output(Command::new("id").arg("-u")).is_ok_and(|id| id.trim() == "0");
    let shell: &[&str] = if is_root {
        &["sh", "-c"]
    } else if util::succeeds("sudo", &["-n", "true"]) {
        &["sudo", "-n", "sh", "-c"]
    } else {
        return None;
    };
    let mut command = Command::new(shell[0]);
    command.args(&shell[1..]).arg(script);
    // Keeps standard output for the tests' own lines.
    command.stdout(std::io::stderr());
    Some(command)
}
