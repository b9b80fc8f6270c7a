//! What a test run says about itself: libtest's counts, and the report file that tests append to.
//!
//! libtest knows only passed, failed and ignored. What else a reader needs (which tests could not
//! run here, which golden files were checked, which backends really ran) the tests append as lines
//! to the file that the variable `KV_TEST_REPORT` names:
//!
//! ```text
//! skip <test>: <why>
//! lacks <part of a test>: <why>
//! golden <file>
//! device <name>
//! ```
//!
//! A test that appends `skip` counts as skipped, not as passed. One that appends `lacks` ran, but for
//! the part that this machine cannot run.

use std::collections::{BTreeMap, BTreeSet};

/// Sums over libtest's `test result:` lines.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) passed: usize,
    pub(crate) failed: usize,
    pub(crate) ignored: usize,
}

impl Counts {
    /// Adds another executable's sums.
    pub(crate) fn add(&mut self, other: &Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.ignored += other.ignored;
    }

    /// Adds a line such as `test result: ok. 3 passed; 0 failed; 1 ignored; …`; others are nothing.
    pub(crate) fn add_line(&mut self, line: &str) {
        let Some(result) = line.strip_prefix("test result: ") else {
            return;
        };
        for field in result.split(['.', ';']) {
            let Some((count, kind)) = field.trim().split_once(' ') else {
                continue;
            };
            let Ok(count) = count.parse::<usize>() else {
                continue;
            };
            match kind {
                "passed" => self.passed += count,
                "failed" => self.failed += count,
                "ignored" => self.ignored += count,
                _ => {}
            }
        }
    }
}

/// The report file, read.
#[derive(Debug, Default)]
pub(crate) struct Report {
    /// Test → why it was skipped.
    pub(crate) skipped: BTreeMap<String, String>,
    /// Why parts of tests did not run → these parts.
    pub(crate) lacking: BTreeMap<String, BTreeSet<String>>,
    /// Golden files that were checked.
    pub(crate) golden: BTreeSet<String>,
    /// Backend → how often a test ran on it.
    pub(crate) devices: BTreeMap<String, usize>,
}

impl Report {
    /// Reads the file's text; lines of other kinds are left out.
    pub(crate) fn parse(text: &str) -> Self {
        let mut report = Self::default();
        for (kind, rest) in text.lines().filter_map(|line| line.split_once(' ')) {
            match kind {
                "skip" => {
                    let (test, why) = rest.split_once(": ").unwrap_or((rest, "no reason given"));
                    report.skipped.insert(test.to_string(), why.to_string());
                }
                "lacks" => {
                    let (part, why) = rest.split_once(": ").unwrap_or((rest, "no reason given"));
                    report.lacking.entry(why.to_string()).or_default().insert(part.to_string());
                }
                "golden" => {
                    report.golden.insert(rest.to_string());
                }
                "device" => *report.devices.entry(rest.to_string()).or_default() += 1,
                _ => {}
            }
        }
        report
    }

    /// Whether a test ran on a backend, whichever of its devices (`wgpu`, `wgpu:1`).
    pub(crate) fn ran_on(&self, backend: &str) -> bool {
        self.devices.keys().any(|name| name.split([':', ' ']).next() == Some(backend))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_summed_over_binaries() {
        let mut counts = Counts::default();
        for line in [
            "running 4 tests",
            "test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; \
             finished in 0.52s",
            "test kernels::attend ... ok",
            "test result: FAILED. 10 passed; 2 failed; 0 ignored; 0 measured; 7 filtered out; \
             finished in 12.00s",
        ] {
            counts.add_line(line);
        }
        assert_eq!(counts, Counts { passed: 13, failed: 2, ignored: 1 });
    }

    #[test]
    fn a_report_is_distinct_files_tests_and_counted_devices() {
        let report = Report::parse(
            "device wgpu:0\ngolden a.safetensors\ndevice flex\ngolden a.safetensors\n\
             skip attend::bf16: no bf16 here: llvmpipe\ndevice flex\nskip other\n\n\
             lacks attend on wgpu: no matrices\nlacks merge on wgpu: no matrices\n",
        );
        assert_eq!(report.golden.len(), 1);
        assert_eq!(report.devices["flex"], 2);
        assert_eq!(report.skipped["attend::bf16"], "no bf16 here: llvmpipe");
        assert_eq!(report.skipped["other"], "no reason given");
        assert_eq!(report.skipped.len(), 2);
        let parts: Vec<_> = report.lacking["no matrices"].iter().map(String::as_str).collect();
        assert_eq!(parts, ["attend on wgpu", "merge on wgpu"]);
        assert!(report.ran_on("wgpu") && report.ran_on("flex") && !report.ran_on("cuda"));
    }
}
