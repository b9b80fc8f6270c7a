//! One server of several ranks.

use std::io::Read;
use std::process::Command;
use std::time::{Duration, Instant};

use super::program::{Program, program, started};

const RANKS: [&str; 2] = ["--tensor-parallel", "2"];
/// How soon all ranks have ended once one has died.
const SOON: Duration = Duration::from_secs(10);

/// A request, greedy, of a number of new tokens.
fn request(policy: &str, tokens: usize) -> String {
    let text = "The old boat lay upon the sand. ".repeat(8);
    format!(
        r#"{{"messages": [{{"role": "user", "content": "{text}"}}], "max_tokens": {tokens}, "temperature": 0,
        "ignore_eos": true, "logprobs": true, "kv": {{"policy": {policy}, "budget": 0.25}}}}"#
    )
}

/// The text of an answer.
fn content(answer: &str) -> String {
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200"), "{answer}");
    let body: serde_json::Value = serde_json::from_str(body).unwrap();
    body["choices"][0]["message"]["content"].as_str().unwrap().to_string()
}

/// The processes that a process has started.
fn children(of: u32) -> Vec<u32> {
    let list = std::fs::read_to_string(format!("/proc/{of}/task/{of}/children")).unwrap();
    list.split_whitespace().map(|id| id.parse().unwrap()).collect()
}

fn signal(name: &str, process: u32) {
    assert!(Command::new("kill").args([name, &process.to_string()]).status().unwrap().success());
}

fn ended(server: &mut Program, begun: Instant) -> bool {
    loop {
        match server.child.try_wait().unwrap() {
            Some(status) => return status.success(),
            None if begun.elapsed() > SOON => panic!("it still runs"),
            None => std::thread::sleep(Duration::from_millis(20)),
        }
    }
}

#[test]
fn two_ranks_answer_what_one_answers() {
    let alone = started(&mut program(&[]));
    let mut ranks = started(&mut program(&RANKS));
    for policy in [r#""full""#, r#""snapkv""#, r#""h2o""#] {
        let body = request(policy, 24);
        let path = "/v1/chat/completions";
        let expected = content(&alone.post(path, &body));
        assert!(!expected.is_empty());
        assert_eq!(content(&ranks.post(path, &body)), expected, "{policy}");
    }
    let refused = ranks.post("/v1/chat/completions", &request(r#""tova""#, 4));
    assert!(refused.starts_with("HTTP/1.1 400"), "{refused}");
    assert!(refused.contains("tova") && refused.contains("compares the heads"), "{refused}");
    let body = request(r#""full""#, 4);
    assert!(ranks.post("/v1/chat/completions", &body).starts_with("HTTP/1.1 200"));
    signal("-TERM", ranks.child.id());
    assert!(ended(&mut ranks, Instant::now()), "it failed");
}

#[test]
fn a_rank_that_dies_ends_the_server() {
    for rank in [0, 1] {
        let mut server = started(&mut program(&RANKS));
        let _running = server.send("/v1/chat/completions", &request(r#""full""#, 400));
        let processes = children(server.child.id());
        assert_eq!(processes.len(), 2);
        let begun = Instant::now();
        signal("-KILL", processes[rank]);
        assert!(!ended(&mut server, begun), "it ended as if nothing had happened");
        let mut log = String::new();
        server.log.read_to_string(&mut log).unwrap();
        assert!(log.contains(&format!("rank {rank} of 2 has died")), "{log}");
    }
}
