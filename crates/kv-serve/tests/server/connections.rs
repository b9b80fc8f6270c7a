//! Limits of connections, in number and in time.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use kv_models::EngineOptions;
use kv_serve::Settings;
use serde_json::{Value, json};

use super::support::{CHAT, bound, chat, error_of, send, settings};

/// What a server sends until it closes the connection.
fn rest(mut stream: TcpStream) -> String {
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

fn get(address: SocketAddr, path: &str) -> TcpStream {
    let mut stream = TcpStream::connect(address).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").unwrap();
    stream
}

/// Connections that the server has open, the asking one among them.
fn open(address: SocketAddr) -> usize {
    let metrics = rest(get(address, "/metrics"));
    let line = metrics.lines().find(|line| line.starts_with("kv_serve_connections ")).unwrap();
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

/// Waits until no connection but the asking one is open.
fn all_closed(address: SocketAddr) {
    let begun = Instant::now();
    while open(address) > 1 {
        assert!(begun.elapsed() < Duration::from_secs(20));
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn half_open_connections_are_closed() {
    let client_timeout = Duration::from_millis(300);
    let server = bound(EngineOptions::default(), Settings { client_timeout, ..settings() }).await;
    let address = server.address;
    let done = tokio::task::spawn_blocking(move || {
        let halves = ["", "POST", "POST /v1/chat/completions HTTP/1.1\r\ncontent-le"];
        let halves = halves.map(|start| {
            let mut stream = TcpStream::connect(address).unwrap();
            stream.write_all(start.as_bytes()).unwrap();
            stream
        });
        assert_eq!(open(address), 4);
        halves.into_iter().for_each(|half| drop(rest(half)));
        // An answered client that asks for nothing more is no better.
        let mut kept = TcpStream::connect(address).unwrap();
        write!(kept, "GET /health HTTP/1.1\r\nhost: x\r\n\r\n").unwrap();
        assert!(rest(kept).starts_with("HTTP/1.1 200"));
        all_closed(address);
    });
    done.await.unwrap();
    server.end.send(()).unwrap();
    server.served.await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_that_does_not_come_is_an_error() {
    let client_timeout = Duration::from_millis(300);
    let server = bound(EngineOptions::default(), Settings { client_timeout, ..settings() }).await;
    let address = server.address;
    let answer = tokio::task::spawn_blocking(move || {
        let mut stream = TcpStream::connect(address).unwrap();
        let head = "host: x\r\ncontent-type: application/json\r\ncontent-length: 100";
        write!(stream, "POST {CHAT} HTTP/1.1\r\n{head}\r\n\r\n{{\"me").unwrap();
        rest(stream)
    });
    let answer = answer.await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 408"), "{answer}");
    let body: Value = serde_json::from_str(answer.split("\r\n\r\n").nth(1).unwrap()).unwrap();
    let error = error_of(&body);
    assert_eq!(error["code"], "timeout");
    assert!(error["message"].as_str().unwrap().contains("300ms"), "{error}");
    server.end.send(()).unwrap();
    server.served.await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_beyond_the_limit_wait() {
    let server =
        bound(EngineOptions::default(), Settings { max_connections: 2, ..settings() }).await;
    let address = server.address;
    let done = tokio::task::spawn_blocking(move || {
        let first = TcpStream::connect(address).unwrap();
        let _second = TcpStream::connect(address).unwrap();
        std::thread::sleep(Duration::from_millis(100));
        let mut third = get(address, "/health");
        third.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
        let waits = third.read(&mut [0]).unwrap_err().kind();
        assert!(matches!(waits, ErrorKind::WouldBlock | ErrorKind::TimedOut), "{waits}");
        drop(first);
        assert!(rest(third).starts_with("HTTP/1.1 200"));
    });
    done.await.unwrap();
    server.end.send(()).unwrap();
    server.served.await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_that_nobody_reads_are_dropped() {
    let client_timeout = Duration::from_millis(500);
    let server = bound(EngineOptions::default(), Settings { client_timeout, ..settings() }).await;
    let address = server.address;
    let done = tokio::task::spawn_blocking(move || {
        // Megabytes, which no socket takes at once.
        let more = json!({"stream": true, "n": 4, "max_tokens": 1000, "ignore_eos": true,
            "logprobs": true, "top_logprobs": 20});
        let unread = send(address, &chat("The sea", more));
        while open(address) < 2 {
            std::thread::sleep(Duration::from_millis(5));
        }
        all_closed(address);
        drop(unread);
    });
    done.await.unwrap();
    server.end.send(()).unwrap();
    server.served.await.unwrap().unwrap();
}
