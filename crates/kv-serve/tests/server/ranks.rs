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

/// The first rank's heads all drop tokens and the second one's do not, so that the ranks' caches
/// have different capacities.
#[test]
fn ranks_whose_heads_keep_different_numbers_share_rows() {
    let policy = r#"{"policy": "duo-attention", "sinks": 4, "recents": 28,
        "alpha": [[0.1, 0.9], [0.2, 0.8], [0.1, 0.9], [0.3, 0.7]]}"#;
    let options = ["--policy", policy, "--budget", "0.5", "--rows", "4", "--least-budget", "0"];
    let server = started(&mut program(&[&RANKS[..], &options].concat()));
    let body = |length: usize| {
        let text = "The old boat lay upon the sand. ".repeat(length);
        format!(
            r#"{{"messages": [{{"role": "user", "content": "{text}"}}], "max_tokens": 30,
            "temperature": 0, "ignore_eos": true}}"#
        )
    };
    let bodies: Vec<String> = (1..=12).map(|at| body(at * 7 % 13 + 1)).collect();
    let path = "/v1/chat/completions";
    let alone: Vec<_> = bodies.iter().map(|body| content(&server.post(path, body)).0).collect();
    let clients: Vec<_> = bodies.iter().map(|body| server.send(path, body)).collect();
    for (mut client, alone) in clients.into_iter().zip(alone) {
        let mut answer = String::new();
        client.read_to_string(&mut answer).unwrap();
        assert_eq!(content(&answer).0, alone);
    }
}

#[test]
fn a_default_policy_that_compares_heads_is_refused() {
    let output = program(&[&RANKS[..], &["--policy", "tova"]].concat()).output().unwrap();
    let log = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    assert!(log.contains("--policy") && log.contains("`tova` compares the heads"), "{log}");
}

#[test]
fn ranks_that_are_started_with_other_options_are_refused() {
    let free = || std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let (meeting, nccl) = (free().to_string(), free().to_string());
    let rank = |rank: &str, rows: &str| {
        let variables = [("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", "2")];
        let mut command = program(&["--rows", rows, "--port", "0"]);
        command.envs(variables).env("KV_MEETING", &meeting).env("NCCL_COMM_ID", &nccl);
        command.stderr(std::process::Stdio::piped()).spawn().unwrap()
    };
    let ranks = [rank("0", "4"), rank("1", "2")];
    let outputs = ranks.map(|rank| rank.wait_with_output().unwrap());
    assert!(outputs.iter().all(|output| !output.status.success()));
    let log = String::from_utf8_lossy(&outputs[1].stderr);
    assert!(log.contains("rows of rank 1 is 2, and of rank 0 4"), "{log}");
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
    drop(server);
    // Two whole documents by one name: no rank has either.
    let old = folder.path().join("rank-1-of-2");
    let parts = ["book.json", "book.cache"];
    std::fs::write(&other, &whole).unwrap();
    let kept = parts.map(|part| std::fs::read(old.join(part)).unwrap());
    let server = started(&mut program(&args));
    assert!(server.request("DELETE", "/v1/kv/contexts/book").starts_with("HTTP/1.1 200"));
    assert!(server.post("/v1/kv/contexts", &body.replace("calm", "wild")).contains("201"));
    assert!(server.post("/v1/kv/contexts/book/save", "").starts_with("HTTP/1.1 200"));
    drop(server);
    for (part, bytes) in parts.iter().zip(kept) {
        std::fs::write(old.join(part), bytes).unwrap();
    }
    let server = started(&mut program(&args));
    assert!(!server.get("/v1/kv/contexts").contains("book"));
    // A rank that cannot save it: no rank has its files.
    std::fs::remove_dir_all(&old).unwrap();
    std::fs::write(&old, "a file in the place of the folder").unwrap();
    let name = body.replace("book", "other");
    assert!(server.post("/v1/kv/contexts", &name).starts_with("HTTP/1.1 201"));
    let refused = server.post("/v1/kv/contexts/other/save", "");
    assert!(refused.contains("another rank could not save context `other`"), "{refused}");
    assert!(server.get("/v1/kv/contexts").contains(r#""saved":false"#));
    assert!(!folder.path().join("rank-0-of-2/other.json").exists());
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
        assert!(log.contains(&format!("rank {rank} of 2 has ended: signal: 9")), "{log}");
        assert!(log.contains(&format!("the connection to rank {rank} of 2 broke")), "{log}");
    }
}
