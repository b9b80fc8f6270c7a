//! The program as a whole: what it leaves behind where a run ends early or a disk is full, and
//! its report in a browser.
#![cfg(unix)]
#![allow(clippy::unwrap_used)]

mod report_page;

use std::fs::{File, OpenOptions};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// A run that takes seconds, with its report in a folder.
const SHORT: [&str; 10] = [
    "quality",
    "--quick",
    "--limit",
    "1",
    "--no-perplexity",
    "--policy",
    "streaming-llm",
    "--device",
    "cpu",
    "--report",
];

fn program() -> Command {
    Command::new(env!("CARGO_BIN_EXE_kv-bench"))
}

fn short(folder: &Path) -> Command {
    let mut command = program();
    command.args(SHORT).arg(folder.join("report.html"));
    command
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Linux's device that is always full.
fn full_device() -> Option<File> {
    let full = OpenOptions::new().write(true).open("/dev/full");
    if full.is_err() {
        kv_testing::skip("full_device", "this system has no /dev/full");
    }
    full.ok()
}

#[test]
fn a_full_standard_output_is_an_error_line() {
    let Some(full) = full_device() else { return };
    let output = program().arg("list").stdout(full).stderr(Stdio::piped()).output().unwrap();
    let told = stderr(&output);
    assert!(!output.status.success());
    assert!(told.contains("error: printing on standard output: No space left"), "{told}");
    assert!(!told.contains("panicked"), "{told}");
}

#[test]
fn readers_that_have_gone_away_end_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("records.json");
    for mut command in [short(folder.path()), program()] {
        match command.get_args().next() {
            Some(_) => command.arg("--json").arg(&json),
            None => command.arg("list"),
        };
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        assert!(!stderr(&output).contains("panicked"));
    }
    assert!(std::fs::read_to_string(json).unwrap().ends_with("]\n"));
    // Nor does a progress that nobody reads, or that finds no room.
    let mut child =
        short(folder.path()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stderr.take());
    assert!(child.wait().unwrap().success());
    let Some(full) = full_device() else { return };
    assert!(short(folder.path()).stdout(Stdio::null()).stderr(full).status().unwrap().success());
}

/// A file system of a few KiB, as long as it lives; `None` where none may be mounted.
struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    fn mount() -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", "size=16k", "tmpfs"]).arg(folder.path());
        let mounted = mount.stderr(Stdio::null()).status().is_ok_and(|status| status.success());
        mounted.then(|| Self(folder))
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0.path()).status();
    }
}

#[test]
fn a_full_disk_costs_neither_tables_nor_earlier_records() {
    let Some(disk) = SmallDisk::mount() else {
        kv_testing::skip("a_full_disk", "a file system cannot be mounted here");
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let json = disk.0.path().join("records.json");
    let earlier = "[]\n";
    std::fs::write(&json, earlier).unwrap();
    // All that is left of the disk.
    let filler = disk.0.path().join("filler");
    let mut room = 16_384;
    while room > 0 && std::fs::write(&filler, vec![b'x'; room]).is_err() {
        room -= 1_024;
    }
    let output = short(folder.path()).arg("--json").arg(&json).output().unwrap();
    let (told, shown) = (stderr(&output), String::from_utf8_lossy(&output.stdout).into_owned());
    assert!(!output.status.success() && !told.contains("panicked"), "{told}");
    assert!(told.contains("records.json") && told.contains("No space left"), "{told}");
    assert!(shown.contains("streaming-llm"), "the tables are shown: {shown}");
    assert!(folder.path().join("report.html").exists());
    assert_eq!(std::fs::read_to_string(&json).unwrap(), earlier);
}

/// Waits until a file holds something.
fn wait_for(path: &Path, child: &mut Child) {
    let started = Instant::now();
    while std::fs::metadata(path).map_or(0, |file| file.len()) == 0 {
        assert!(child.try_wait().unwrap().is_none(), "the run has ended before it was interrupted");
        assert!(started.elapsed() < Duration::from_secs(120), "nothing is measured");
        sleep(Duration::from_millis(20));
    }
}

/// Questions about a text, for `evaluate`.
fn questions(path: &Path, count: usize) {
    let filler = "The sea was calm that day, and the old boat lay upon the sand. ".repeat(40);
    let line = |index: usize| {
        format!(
            "{{\"id\": \"{index}\", \"context\": \"{filler}\", \"question\": \"Where? \", \
             \"answers\": [\"sand\"], \"max_new_tokens\": 16}}\n"
        )
    };
    std::fs::write(path, (0..count).map(line).collect::<String>()).unwrap();
}

#[test]
fn an_interrupted_evaluation_keeps_its_answers() {
    let folder = tempfile::tempdir().unwrap();
    let [task, answers, report] =
        ["task.jsonl", "answers.jsonl", "report.html"].map(|name| folder.path().join(name));
    questions(&task, 400);
    let mut command = program();
    command.args(["evaluate", "--device", "cpu", "--policy", "snapkv", "--task"]).arg(&task);
    command.arg("--answers").arg(&answers).arg("--report").arg(&report);
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    wait_for(&answers, &mut child);
    let whole = || std::fs::read_to_string(&answers).unwrap().lines().count();
    while whole() < 3 {
        sleep(Duration::from_millis(20));
    }
    assert!(
        Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success()
    );
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130));
    let told = stderr(&output);
    assert!(told.contains("answers so far, from which this command goes on: "), "{told}");
    assert!(told.contains("answers.jsonl") && whole() >= 3, "{told}");
}

#[test]
fn an_interrupted_run_says_what_it_leaves() {
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("records.json");
    let mut command = program();
    // All policies and prompts, which no machine runs in no time.
    command.args(["quality", "--device", "cpu", "--no-perplexity", "--json"]).arg(&json);
    command.arg("--report").arg(folder.path().join("report.html"));
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let left = folder.path().join("records.json.partial");
    wait_for(&left, &mut child);
    let id = child.id().to_string();
    assert!(Command::new("kill").args(["-INT", &id]).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130));
    let told = stderr(&output);
    assert!(told.contains("interrupted: records so far, which --merge reads: "), "{told}");
    assert!(told.contains("records.json.partial") && !json.exists(), "{told}");
    let mut merging = short(folder.path());
    let merged = merging.arg("--merge").arg(&left).output().unwrap();
    assert!(merged.status.success(), "{}", stderr(&merged));
    assert!(String::from_utf8_lossy(&merged.stdout).contains("h2o"));
}
