//! Workers and Dynamo's front end on one host, asked by OpenAI's client.
//!
//! The front end is a Python package. `KV_DYNAMO_PYTHON` names a Python that has `ai-dynamo` and
//! `openai`; `cargo xtask dynamo` makes one.

use std::collections::HashSet;
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

use crate::support::CARD;

/// The time that processes have to start, and a client to come to its end.
const PATIENCE: Duration = Duration::from_secs(120);

/// A process that ends with this.
struct Process(Child);

impl Process {
    fn kill(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A front end with workers.
struct Host {
    workers: Vec<Process>,
    port: u16,
    python: String,
    _front_end: Process,
    /// Where they find each other.
    store: TempDir,
}

/// A Python with the front end, or a note that there is none.
fn python(test: &str) -> Option<String> {
    let python = std::env::var("KV_DYNAMO_PYTHON").ok();
    if python.is_none() {
        let reason = "KV_DYNAMO_PYTHON names no Python with ai-dynamo and openai";
        println!("skip {test}: {reason}; cargo xtask dynamo makes one");
    }
    python
}

/// A command whose processes find each other by files, and speak over loopback alone.
fn local(program: impl AsRef<std::ffi::OsStr>, store: &Path) -> Command {
    let mut command = Command::new(program);
    command.env("DYN_DISCOVERY_BACKEND", "file").env("DYN_FILE_KV", store);
    command.env("DYN_REQUEST_PLANE", "tcp").env("DYN_EVENT_PLANE", "zmq");
    command.env("DYN_TCP_RPC_HOST", "127.0.0.1").env("DYN_TCP_RESPONSE_STREAM_HOST", "127.0.0.1");
    command.env("DYN_EVENT_PLANE_HOST", "127.0.0.1");
    command.env("DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS", "1");
    command.env("DYN_LOG", "warn,kv_dynamo=info").env_remove("DYN_SYSTEM_PORT");
    command.stdin(Stdio::null()).stdout(Stdio::null());
    command
}

impl Host {
    /// Starts a front end and workers, and waits until all of them serve.
    fn start(python: String, workers: usize) -> Self {
        let store = TempDir::new().unwrap();
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let mut command = local(&python, store.path());
        command.args(["-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port"]);
        command.args([
            &port.to_string(),
            "--router-mode",
            "least-loaded",
            "--migration-limit",
            "3",
        ]);
        let front_end = Process(command.spawn().unwrap());
        let workers: Vec<_> = (0..workers).map(|_| worker(store.path())).collect();
        let host = Self { workers, port, python, _front_end: front_end, store };
        host.wait_for(host.workers.len());
        host
    }

    /// Waits until so many workers are registered, and the front end has their model.
    fn wait_for(&self, workers: usize) {
        let begun = Instant::now();
        let is_ready = || {
            let models = self.get("/v1/models");
            models.contains("needle-1m") && self.instances() == workers
        };
        while !is_ready() {
            assert!(begun.elapsed() < PATIENCE, "{} of {workers} workers", self.instances());
            sleep(Duration::from_millis(100));
        }
    }

    /// Workers that are registered.
    fn instances(&self) -> usize {
        let health = self.get("/health");
        let health: Value = serde_json::from_str(&health).unwrap_or_default();
        let instances = health["instances"].as_array().into_iter().flatten();
        instances.filter(|instance| instance["endpoint"] == "generate").count()
    }

    /// The body of an answer; empty where there is none.
    fn get(&self, path: &str) -> String {
        let url = format!("http://127.0.0.1:{}{path}", self.port);
        let answer = ureq::get(&url).timeout(Duration::from_secs(5)).call();
        answer.ok().and_then(|answer| answer.into_string().ok()).unwrap_or_default()
    }

    /// Runs OpenAI's client, and `meanwhile` once all of its streams have begun.
    fn ask(
        &mut self,
        requests: usize,
        tokens: usize,
        meanwhile: impl FnOnce(&mut Self),
    ) -> Vec<Value> {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/client.py");
        let mut command = Command::new(&self.python);
        command.arg(script).arg(format!("http://127.0.0.1:{}", self.port));
        command.args([requests.to_string(), tokens.to_string()]).stdout(Stdio::piped());
        let mut client = Process(command.spawn().unwrap());
        let begun = Instant::now();
        let mut lines = BufReader::new(client.0.stdout.take().unwrap()).lines();
        let running = lines.next().expect("the client failed before its streams began").unwrap();
        assert_eq!(running, "running");
        meanwhile(self);
        // The client has limits of its own, each shorter than this one.
        let ended = loop {
            if let Some(status) = client.0.try_wait().unwrap() {
                break status;
            }
            assert!(begun.elapsed() < 2 * PATIENCE, "the client hangs");
            sleep(Duration::from_millis(50));
        };
        assert!(ended.success(), "{ended}");
        let told: Value = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
        let kept = &told["data"]["engine_data"];
        assert!(kept["kv_tokens_kept"].as_f64().is_some_and(|kept| kept > 8.0), "{told}");
        told["answers"].as_array().unwrap().clone()
    }
}

fn worker(store: &Path) -> Process {
    let mut command = local(env!("CARGO_BIN_EXE_kv-dynamo"), store);
    command.args(["needle-1m", "--device", "cpu", "--policy", "snapkv", "--budget", "0.25"]);
    command.args(["--card", CARD]);
    Process(command.spawn().unwrap())
}

/// Checks that all answers came to their end, with all of their tokens, and that they began at so
/// many workers.
fn check(test: &str, answers: &[Value], tokens: usize, workers: usize) {
    for answer in answers {
        assert_eq!(
            (&answer["finish"], &answer["tokens"]),
            (&"length".into(), &tokens.into()),
            "{answer}"
        );
    }
    let longest = answers.iter().filter_map(|answer| answer["longest"].as_f64());
    let longest = longest.fold(0.0, f64::max);
    println!(
        "{test}: {} answers of {workers} workers, at most {longest:.2} s between tokens",
        answers.len()
    );
    let asked: HashSet<String> = answers.iter().map(|told| told["worker"].to_string()).collect();
    assert_eq!(asked.len(), workers, "{asked:?}");
}

#[test]
fn no_request_hangs_where_a_worker_is_killed() {
    let test = "no_request_hangs_where_a_worker_is_killed";
    let Some(python) = python(test) else { return };
    let mut host = Host::start(python, 2);
    let answers = host.ask(12, 600, |host| host.workers[0].kill());
    check(test, &answers, 600, 2);
    // Another one takes its place.
    host.workers[0] = worker(host.store.path());
    host.wait_for(2);
    check(test, &host.ask(8, 50, |_| {}), 50, 2);
}

#[test]
fn four_workers_share_the_load() {
    let test = "four_workers_share_the_load";
    let Some(python) = python(test) else { return };
    let mut host = Host::start(python, 4);
    check(test, &host.ask(16, 50, |_| {}), 50, 4);
    // One worker ends in order: it takes no more requests, and its running requests end.
    let answers = host.ask(8, 300, |host| {
        let id = host.workers[0].0.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &id]).status().unwrap().success());
    });
    check(test, &answers, 300, 4);
    assert!(host.workers[0].0.wait().unwrap().success());
    host.wait_for(3);
}
