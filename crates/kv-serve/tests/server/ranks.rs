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
        r#"{{"messages": [{{"role": "user", "content": "{text}"}}],
        "max_tokens": {tokens}, "temperature": 0, "ignore_eos": true, "logprobs": true,
        "kv": {{"policy": {policy}, "budget": 0.25}}}}"#
    )
}

/// The text of an answer, and what it used.
fn content(answer: &str) -> (String, serde_json::Value) {
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200"), "{answer}");
    let body: serde_json::Value = serde_json::from_str(body).unwrap();
    let text = body["choices"][0]["message"]["content"].as_str().unwrap().to_string();
    (text, body["usage"].clone())
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
        assert!(!expected.0.is_empty());
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

/// As service managers and `timeout` send it: to all processes at once.
#[test]
fn a_signal_to_the_whole_group_cuts_no_answer() {
    let mut command = program(&RANKS);
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    let mut server = started(&mut command);
    let body = request(r#""full""#, 300).replacen('{', r#"{"stream": true, "#, 1);
    let clients: Vec<_> = (0..4).map(|_| server.send("/v1/chat/completions", &body)).collect();
    let begun = Instant::now();
    while !server.get("/metrics").contains("kv_serve_jobs_submitted_total 4") {
        assert!(begun.elapsed() < SOON);
    }
    let group = format!("-{}", server.child.id());
    assert!(Command::new("kill").args(["-TERM", "--", &group]).status().unwrap().success());
    for mut client in clients {
        let mut text = String::new();
        client.read_to_string(&mut text).unwrap();
        assert!(text.contains("[DONE]"), "{text}");
    }
    assert!(server.child.wait().unwrap().success());
}

/// What one rank alone cannot do is not done on any, and the server goes on.
#[test]
fn ranks_agree_on_contexts() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    let args = [&RANKS[..], &["--contexts", path]].concat();
    let text = "The sea was calm that day. ".repeat(10);
    let body = format!(r#"{{"name": "book", "text": "{text}", "kv": {{"policy": "full"}}}}"#);
    let server = started(&mut program(&args));
    assert!(server.post("/v1/kv/contexts", &body).starts_with("HTTP/1.1 201"));
    assert!(server.post("/v1/kv/contexts/book/save", "").starts_with("HTTP/1.1 200"));
    // The second rank's file is no longer what it wrote.
    let other = folder.path().join("rank-1-of-2/book.cache");
    let whole = std::fs::read(&other).unwrap();
    std::fs::write(&other, &whole[..whole.len() / 2]).unwrap();
    for _ in 0..2 {
        let refused = server.request("DELETE", "/v1/kv/contexts/book");
        assert!(refused.contains("another rank could not delete context `book`"), "{refused}");
    }
    assert!(server.get("/v1/kv/contexts").contains("book"));
    let ask = r#"{"messages": [{"role": "user", "content": "Where?"}], "max_tokens": 3,
        "kv": {"context": "book"}}"#;
    assert!(server.post("/v1/chat/completions", ask).starts_with("HTTP/1.1 200"));
    drop(server);
    // A rank that cannot load it: no rank has it.
    let server = started(&mut program(&args));
    assert!(!server.get("/v1/kv/contexts").contains("book"));
    assert!(server.post("/v1/chat/completions", &request(r#""full""#, 3)).contains("200 OK"));
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
