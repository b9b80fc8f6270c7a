//! A browser for the tests that open the report: the one that is there, or else Chromium.

use anyhow::Result;

use crate::{packages, util};

/// What must be installed where there is no browser.
const PACKAGES: [&str; 1] = ["chromium"];
/// Programs that the tests start, whichever is there.
const PROGRAMS: [&str; 3] = ["chromium", "chromium-browser", "google-chrome"];

/// Makes sure that there is a browser, installing Chromium where that is possible.
///
/// # Errors
///
/// When there is none and none could be installed.
pub(crate) fn ensure() -> Result<()> {
    let is_there = || PROGRAMS.iter().any(|program| util::succeeds(program, &["--version"]));
    packages::ensure("browser", &PACKAGES, is_there)
}
