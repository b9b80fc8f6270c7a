use std::process::Command;

const ALONE: &str = "KV_TEST_ALONE";

/// Whether this process runs `test` alone. If not, another one is run that does, and must pass: for
/// tests of what all tests of a process share. `module` is the test's `module_path!()`.
pub fn alone(module: &str, test: &str) -> bool {
    if std::env::var_os(ALONE).is_some() {
        return true;
    }
    // The executable's own name comes first in paths, but not in the runner's.
    let path =
        module.split_once("::").map_or(test.to_string(), |(_, rest)| format!("{rest}::{test}"));
    let status = Command::new(std::env::current_exe().unwrap())
        .args([path.as_str(), "--exact", "--nocapture"])
        .env(ALONE, "1")
        .status()
        .unwrap();
    assert!(status.success(), "{path} alone: {status}");
    false
}
