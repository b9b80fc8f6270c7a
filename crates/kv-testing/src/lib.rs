#![doc = include_str!("../README.md")]
//!
//! Tests tell the runner what they did through lines in the file that `KV_TEST_REPORT` names:
//! `device NAME`, `golden FILE`, `skip TEST: WHY`, `lacks PART: WHY`.

#![allow(clippy::unwrap_used)]

mod alone;
mod devices;
mod golden;
mod numbers;
mod problems;

use std::fs::OpenOptions;
use std::io::Write;

pub use alone::alone;
pub use devices::{TestDevice, devices, exact_devices, quick_devices, quick_exact_devices};
pub use golden::{Golden, GoldenTensor, golden_files};
pub use numbers::{Numbers, dot, relative_error};
pub use problems::{STEP, Step, timed};

/// Says why a test did nothing, on stderr and to the runner.
pub fn skip(test: &str, why: &str) {
    eprintln!("SKIP {test}: {why}");
    report(&format!("skip {test}: {why}"));
}

/// Says why a part of a test did not run, such as a kernel that a device lacks. The test counts as
/// run.
pub fn lacks(part: &str, why: &str) {
    eprintln!("LACKS {part}: {why}");
    report(&format!("lacks {part}: {why}"));
}

fn report(line: &str) {
    let Ok(path) = std::env::var("KV_TEST_REPORT") else { return };
    // One write a line, so that tests in parallel do not mix theirs.
    if let Ok(mut file) = OpenOptions::new().create(true).append(true).open(path) {
        let _ = file.write_all(format!("{line}\n").as_bytes());
    }
}
