//! A Vulkan driver for the `wgpu` tests: the one that is there, or else Mesa's software driver.

use std::path::Path;
use std::process::Command;

use anyhow::Result;

use crate::{packages, util};

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
    let is_there = || !cfg!(target_os = "linux") || (has_driver() && has_loader());
    packages::ensure("Vulkan driver", &PACKAGES, is_there)
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
