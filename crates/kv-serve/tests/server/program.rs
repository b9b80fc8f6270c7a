//! The program: its command line, its port, its signals.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A running program and its address.
pub(crate) struct Program {
    pub(crate) child: Child,
    pub(crate) address: String,
    pub(crate) log: BufReader<std::process::ChildStderr>,
}

pub(crate) fn program(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kv-serve"));
    command.args(["--device", "cpu"]).args(args).env_remove("KV_SERVE_API_KEY");
    command.stdout(Stdio::null()).stderr(Stdio::piped());
    command
}

pub(crate) fn started(command: &mut Command) -> Program {
    let mut child = command.args(["--port", "0"]).spawn().unwrap();
    let log = BufReader::new(child.stderr.take().unwrap());
    let mut program = Program { child, address: String::new(), log };
    while program.address.is_empty() {
        let mut line = String::new();
        assert!(program.log.read_line(&mut line).unwrap() > 0, "it ended");
        if let Some((_, rest)) = line.split_once("listening on http://") {
            program.address = rest.split(',').next().unwrap().trim().to_string();
        }
    }
    program
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Program {
    pub(crate) fn get(&self, path: &str) -> String {
        self.request("GET", path)
    }

    pub(crate) fn request(&self, method: &str, path: &str) -> String {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        write!(stream, "{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    }

    pub(crate) fn send(&self, path: &str, body: &str) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        let length = body.len();
        let head = "host: x\r\nconnection: close\r\ncontent-type: application/json";
        let head = format!("POST {path} HTTP/1.1\r\n{head}\r\ncontent-length: {length}");
        write!(stream, "{head}\r\n\r\n{body}").unwrap();
        stream
    }

    pub(crate) fn post(&self, path: &str, body: &str) -> String {
        let mut text = String::new();
        self.send(path, body).read_to_string(&mut text).unwrap();
        text
    }
}

/// A server that a shell starts behind its own settings, such as a limit.
#[cfg(unix)]
fn program_behind(settings: &str, args: &[&str]) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", &format!("{settings} && exec \"$0\" \"$@\"")]);
    command.arg(env!("CARGO_BIN_EXE_kv-serve")).args(["--device", "cpu"]).args(args);
    command.env_remove("KV_SERVE_API_KEY").stdout(Stdio::null()).stderr(Stdio::piped());
    command
}

/// Waits until the server counts so many connections, the asking one among them: a client may see
/// the end of a connection before the server counts it.
#[cfg(unix)]
fn has_connections(server: &Program, expected: u64) {
    let line = format!("kv_serve_connections {expected}\n");
    let begun = Instant::now();
    loop {
        let metrics = server.get("/metrics");
        if metrics.contains(&line) {
            return;
        }
        assert!(begun.elapsed() < Duration::from_secs(10), "{metrics}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Half-open connections hold nobody up, and are closed. The shell's limit of open files is that of
/// many systems, and less than the connections.
#[cfg(unix)]
#[test]
fn ten_thousand_half_open_connections_hold_nobody_up() {
    const CONNECTIONS: u64 = 10_000;
    let patience = Duration::from_secs(12);
    let needed = CONNECTIONS + 512;
    let files = rlimit::increase_nofile_limit(needed).unwrap();
    if files < needed {
        let why = format!("a process may open {files} files here, and {needed} are needed");
        return kv_testing::skip("ten_thousand_half_open_connections_hold_nobody_up", &why);
    }
    let server = started(&mut program_behind("ulimit -Sn 1024", &["--client-timeout", "12s"]));
    let begun = Instant::now();
    let mut half = Vec::new();
    for at in 0..CONNECTIONS {
        let mut stream = TcpStream::connect(&server.address).unwrap();
        let start = ["", "POST /v1/chat/completions HTTP/1.1\r\ncontent-le"][at as usize % 2];
        stream.write_all(start.as_bytes()).unwrap();
        half.push(stream);
    }
    let body = r#"{"messages": [{"role": "user", "content": "The sea"}], "max_tokens": 5}"#;
    let answer = server.post("/v1/chat/completions", body);
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    let answered = begun.elapsed();
    assert!(answered < patience, "{answered:?}");
    has_connections(&server, CONNECTIONS + 1);
    for mut stream in half {
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream.read_to_end(&mut Vec::new()).unwrap();
    }
    let closed = begun.elapsed();
    assert!(closed < 4 * patience, "{closed:?}");
    has_connections(&server, 1);
    eprintln!("answered after {answered:?}, all closed after {closed:?}");
}

/// Requests that run when the signal comes are answered to their end.
#[cfg(unix)]
#[test]
fn a_signal_under_load_cuts_no_answer() {
    let mut server = started(&mut program(&[]));
    let address = server.address.clone();
    let body = r#"{"messages": [{"role": "user", "content": "The sea"}], "max_tokens": 300,
        "ignore_eos": true, "stream": true}"#;
    let clients: Vec<_> = (0..24).map(|_| server.send("/v1/chat/completions", body)).collect();
    let begun = Instant::now();
    while !server.get("/metrics").contains("kv_serve_jobs_submitted_total 24") {
        assert!(begun.elapsed() < Duration::from_secs(30));
    }
    let pid = server.child.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    for mut client in clients {
        let mut text = String::new();
        client.read_to_string(&mut text).unwrap();
        assert!(text.starts_with("HTTP/1.1 200"), "{text}");
        assert!(text.contains("\"finish_reason\":\"length\"") && text.contains("[DONE]"), "{text}");
    }
    assert!(server.child.wait().unwrap().success());
    assert!(TcpStream::connect(address).is_err());
}

/// A file may grow to 32 KiB here: a context is larger.
#[cfg(unix)]
#[test]
fn a_full_disk_leaves_saved_contexts_as_they_are() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    let body = |name: &str| {
        let text = "The sea was calm that day. ".repeat(30);
        format!(r#"{{"name": "{name}", "text": "{text}", "kv": {{"policy": "full"}}}}"#)
    };
    let files = || {
        let mut files: Vec<_> =
            std::fs::read_dir(path).unwrap().map(|file| file.unwrap().path()).collect();
        files.sort();
        files.into_iter().map(|path| (std::fs::read(&path).unwrap(), path)).collect::<Vec<_>>()
    };
    let saved = {
        let server = started(&mut program(&["--contexts", path]));
        assert!(server.post("/v1/kv/contexts", &body("book")).starts_with("HTTP/1.1 201"));
        let answer = server.post("/v1/kv/contexts/book/save", "");
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        files()
    };
    assert_eq!(saved.len(), 2);
    // 64 blocks of 512 bytes, or 32 of 1,024 in some shells.
    let full = "ulimit -f 32 && trap '' XFSZ";
    let server = started(&mut program_behind(full, &["--contexts", path]));
    assert!(server.post("/v1/kv/contexts", &body("other")).starts_with("HTTP/1.1 201"));
    for name in ["book", "other"] {
        let answer = server.post(&format!("/v1/kv/contexts/{name}/save"), "");
        assert!(answer.starts_with("HTTP/1.1 507"), "{answer}");
        let (_, body) = answer.split_once("\r\n\r\n").unwrap();
        let error = super::support::error_of(&serde_json::from_str(body).unwrap());
        assert_eq!(error["code"], "disk_full");
        // Paths of the server are for its log.
        assert!(!error["message"].as_str().unwrap().contains(path), "{error}");
    }
    assert!(files() == saved, "the files have changed");
    let list = server.get("/v1/kv/contexts");
    assert!(list.contains("book") && list.contains("other"), "{list}");
    let body = r#"{"messages": [{"role": "user", "content": "Where?"}], "max_tokens": 3,
        "kv": {"context": "book"}}"#;
    assert!(server.post("/v1/chat/completions", body).starts_with("HTTP/1.1 200"));
}

#[cfg(unix)]
#[test]
fn it_serves_until_it_is_told_to_end() {
    for signal in ["-TERM", "-INT"] {
        let mut server = started(&mut program(&["needle-1m"]));
        assert!(server.get("/health").contains("needle-1m"));
        let pid = server.child.id().to_string();
        assert!(Command::new("kill").args([signal, &pid]).status().unwrap().success());
        assert!(server.child.wait().unwrap().success());
        let mut rest = String::new();
        server.log.read_to_string(&mut rest).unwrap();
        assert!(rest.contains("all requests have ended"), "{rest}");
    }
}

#[test]
fn two_servers_share_no_port() {
    let first = started(&mut program(&[]));
    let port = first.address.rsplit(':').next().unwrap().to_string();
    let output = program(&["--port", &port]).output().unwrap();
    let log = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success());
    assert!(log.contains("cannot listen") && log.contains("--port"), "{log}");
}

#[test]
fn wrong_command_lines_say_what_is_wrong() {
    for (args, part) in [
        (vec!["no/such/model-here"], "model-here"),
        (vec!["--policy", "snapvk"], "snapkv"),
        (vec!["--budget", "2.5"], "at most 1"),
        (vec!["--allow-policy", "h20"], "h2o"),
        (vec!["--chat-template", "/no/such/file"], "/no/such/file"),
        (vec!["--log", "=="], "--log"),
        (vec!["--queue", "0"], "--queue"),
        (vec!["--client-timeout", "soon"], "--client-timeout"),
        (vec!["random:nothing"], "nothing"),
    ] {
        let output = program(&args).args(["--port", "0"]).output().unwrap();
        let log = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && log.contains(part), "{args:?}: {log}");
    }
}

#[test]
fn a_key_comes_from_the_environment() {
    let mut command = program(&[]);
    let server = started(command.env("KV_SERVE_API_KEY", "one,two"));
    assert!(server.get("/v1/models").starts_with("HTTP/1.1 401"));
}
