//! The program: its command line, its port, its signals.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};

/// A running program and its address.
struct Program {
    child: Child,
    address: String,
    log: BufReader<std::process::ChildStderr>,
}

fn program(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kv-serve"));
    command.args(["--device", "cpu"]).args(args).env_remove("KV_SERVE_API_KEY");
    command.stdout(Stdio::null()).stderr(Stdio::piped());
    command
}

fn started(command: &mut Command) -> Program {
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
    fn get(&self, path: &str) -> String {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    }
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
