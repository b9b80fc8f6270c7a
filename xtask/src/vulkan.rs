//! A Vulkan driver for the `wgpu` tests: the one that is there, or else Mesa's software driver.

use std::path::Path;
use std::process::Command;

use anyhow::{Result, bail};

use crate::util;

/// What must be installed where there is no GPU driver.
const PACKAGES: [&str; 2] = ["mesa-vulkan-drivers", "libvulkan1"];
/// Where drivers announce themselves.
const DRIVERS: [&str; 3] =
    ["/usr/share/vulkan/icd.d", "/etc/vulkan/icd.d", "/usr/local/share/vulkan/icd.d"];
/// Variables that name drivers elsewhere.
const DRIVER_VARIABLES: [&str; 2] = ["VK_DRIVER_FILES", "VK_ICD_FILENAMES"];
/// Where the loader lies when `ldconfig` cannot be asked.
const LIBRARIES: [&str; 4] =
    ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib"];

/// Makes sure that `wgpu` finds a driver, installing Mesa's software driver where that is possible.
///
/// # Errors
///
/// When there is none and none could be installed; the message says what to do by hand.
pub(crate) fn ensure() -> Result<()> {
    // Elsewhere wgpu goes through the system's own API (Metal, DirectX).
    if !cfg!(target_os = "linux") || (has_driver() && has_loader()) {
        return Ok(());
    }
    let Some(mut install) = installer() else {
        bail!("no Vulkan driver; install one, such as `apt-get install {}`", PACKAGES.join(" "));
    };
    eprintln!("no Vulkan driver: installing {} for the wgpu tests", PACKAGES.join(" "));
    util::run(&mut install)?;
    if !(has_driver() && has_loader()) {
        bail!("no Vulkan driver, even after installing {}", PACKAGES.join(" "));
    }
    Ok(())
}

fn has_driver() -> bool {
    let named = DRIVER_VARIABLES
        .into_iter()
        .filter_map(std::env::var_os)
        .any(|paths| std::env::split_paths(&paths).any(|path| path.is_file()));
    let announced = DRIVERS.into_iter().filter_map(|dir| Path::new(dir).read_dir().ok());
    let is_json = |entry: std::io::Result<std::fs::DirEntry>| {
        entry.is_ok_and(|entry| entry.path().extension().is_some_and(|ext| ext == "json"))
    };
    named || announced.into_iter().flatten().any(is_json)
}

fn has_loader() -> bool {
    let name = "libvulkan.so.1";
    let variable = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    std::env::split_paths(&variable).any(|dir| dir.join(name).exists())
        || LIBRARIES.into_iter().any(|dir| Path::new(dir).join(name).exists())
        || util::output(Command::new("ldconfig").arg("-p")).is_ok_and(|list| list.contains(name))
}

/// The command that installs [`PACKAGES`], where it can run without asking for a password.
fn installer() -> Option<Command> {
    if !util::succeeds("apt-get", &["--version"]) {
        return None;
    }
    let script = format!(
        "export DEBIAN_FRONTEND=noninteractive; apt-get update -qq \
         && apt-get install -qq -y --no-install-recommends {}",
        PACKAGES.join(" ")
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
