//! Clients that vanish, read slowly, or send half a request.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use kv_models::EngineOptions;
use kv_serve::{Settings, listen, serve};
use serde_json::{Value, json};
use tokio::sync::oneshot;

use super::support::{ask, bound, chat, engine, idle, send, settings};

fn long(stream: bool) -> Value {
    chat("The sea", json!({"max_tokens": 1000, "ignore_eos": true, "stream": stream}))
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_that_vanish_cancel_their_jobs() {
    let options = EngineOptions { rows: 2, ..EngineOptions::default() };
    let server = bound(options, settings()).await;
    for stream in [true, false] {
        let clients: Vec<TcpStream> = (0..6).map(|_| send(server.address, &long(stream))).collect();
        let begun = Instant::now();
        while server.engine.load().running == 0 {
            assert!(begun.elapsed() < Duration::from_secs(30));
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        drop(clients);
        idle(&server.engine).await;
    }
    let totals = server.engine.load().totals;
    assert!(totals.cancelled >= 8, "{totals:?}");
    server.end.send(()).unwrap();
    server.served.await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_readers_lose_nothing_and_hold_nobody_up() {
    let server = bound(EngineOptions::default(), settings()).await;
    let mut slow = send(server.address, &long(true));
    // Its job ends whether it reads or not.
    tokio::time::sleep(Duration::from_millis(50)).await;
    idle(&server.engine).await;
    let text = tokio::task::spawn_blocking(move || {
        let (mut all, mut piece) = (Vec::new(), [0; 4096]);
        loop {
            match slow.read(&mut piece).unwrap() {
                0 => break String::from_utf8(all).unwrap(),
                count => all.extend_from_slice(&piece[..count]),
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    });
    let text = text.await.unwrap();
    assert_eq!(text.matches("finish_reason\":\"length\"").count(), 1);
    assert!(text.contains("data: [DONE]"));
    server.end.send(()).unwrap();
    server.served.await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn half_requests_hold_nobody_up() {
    let server = bound(EngineOptions::default(), settings()).await;
    let halves: Vec<TcpStream> = ["", "POST", "POST /v1/chat/completions HTTP/1.1\r\ncontent-le"]
        .iter()
        .map(|start| {
            let mut stream = TcpStream::connect(server.address).unwrap();
            stream.write_all(start.as_bytes()).unwrap();
            stream
        })
        .collect();
    let mut wrong = TcpStream::connect(server.address).unwrap();
    wrong.write_all(b"\x16\x03\x01 this is no HTTP\r\n\r\n").unwrap();
    let answer = tokio::task::spawn_blocking({
        let address = server.address;
        move || {
            let mut text = String::new();
            send(address, &chat("The sea", json!({}))).read_to_string(&mut text).unwrap();
            text
        }
    });
    assert!(answer.await.unwrap().starts_with("HTTP/1.1 200"));
    drop(halves);
    server.end.send(()).unwrap();
    server.served.await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_end_lets_running_requests_finish() {
    let server = bound(EngineOptions::default(), settings()).await;
    let mut running = send(server.address, &long(true));
    let begun = Instant::now();
    while server.engine.load().running == 0 {
        assert!(begun.elapsed() < Duration::from_secs(30));
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    server.end.send(()).unwrap();
    let text = tokio::task::spawn_blocking(move || {
        let mut text = String::new();
        running.read_to_string(&mut text).unwrap();
        text
    });
    assert!(text.await.unwrap().contains("finish_reason\":\"length\""));
    server.served.await.unwrap().unwrap();
    assert!(TcpStream::connect(server.address).is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_are_refused_while_running_ones_end() {
    let drain_timeout = Duration::from_secs(3);
    let server = bound(EngineOptions::default(), Settings { drain_timeout, ..settings() }).await;
    // More than can end within that time.
    let running: Vec<TcpStream> = (0..200).map(|_| send(server.address, &long(true))).collect();
    let begun = Instant::now();
    while server.engine.load().running == 0 {
        assert!(begun.elapsed() < Duration::from_secs(30));
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    server.end.send(()).unwrap();
    let address = server.address;
    let answers = tokio::task::spawn_blocking(move || {
        // The end comes to the server, and to its engine, a little later.
        while ask(address, "/ready").0 == 200 {
            assert!(begun.elapsed() < Duration::from_secs(30));
        }
        let ready = ask(address, "/ready");
        let mut text = String::new();
        send(address, &long(false)).read_to_string(&mut text).unwrap();
        drop(running);
        (ready, text)
    });
    let (ready, text) = answers.await.unwrap();
    assert!(ready.0 == 503 && ready.1.contains("\"unavailable\""), "{ready:?}");
    assert!(text.starts_with("HTTP/1.1 503") && text.contains("shutting down"), "{text}");
    server.served.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_server_ends_before_its_model_is_loaded() {
    let listener = listen("127.0.0.1:0".parse().unwrap()).unwrap();
    let served = serve(listener, std::future::pending(), settings(), std::future::ready(()));
    let ended = tokio::time::timeout(Duration::from_secs(30), served).await.unwrap();
    assert!(ended.unwrap_err().to_string().contains("before the model was loaded"));
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_are_refused_until_the_model_is_loaded() {
    let listener = listen("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = listener.local_addr().unwrap();
    let (load, loading) = oneshot::channel();
    let (end, ended) = oneshot::channel::<()>();
    let loading = async { Ok(loading.await?) };
    let until = async {
        let _ = ended.await;
    };
    let served = tokio::spawn(serve(listener, loading, settings(), until));
    let early = tokio::task::spawn_blocking(move || {
        ["/health", "/ready", "/v1/models", "/"].map(|path| ask(address, path))
    });
    let early = early.await.unwrap();
    for (status, text) in &early {
        let told = text.to_lowercase().contains("the model is being loaded");
        assert!(*status == 503 && told, "{status} {text}");
    }
    let pages = early.map(|(_, text)| text.contains("text/html") && text.contains("refresh"));
    assert_eq!(pages, [false, false, false, true]);
    assert!(load.send(engine(EngineOptions::default())).is_ok());
    let ready = tokio::task::spawn_blocking(move || {
        let begun = Instant::now();
        while ask(address, "/ready").0 != 200 {
            assert!(begun.elapsed() < Duration::from_secs(30));
        }
        ask(address, "/v1/models")
    });
    let (status, text) = ready.await.unwrap();
    assert!(status == 200 && text.contains("needle-1m"), "{status} {text}");
    end.send(()).unwrap();
    served.await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_end_cancels_what_takes_too_long() {
    let drain_timeout = Duration::from_millis(20);
    let server = bound(EngineOptions::default(), Settings { drain_timeout, ..settings() }).await;
    let mut running = send(server.address, &long(true));
    let begun = Instant::now();
    while server.engine.load().running == 0 {
        assert!(begun.elapsed() < Duration::from_secs(30));
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    server.end.send(()).unwrap();
    let text = tokio::task::spawn_blocking(move || {
        let mut text = String::new();
        running.read_to_string(&mut text).unwrap();
        text
    });
    let text = text.await.unwrap();
    // A fast machine may have come to the end before.
    assert!(text.contains("shutting down") || text.contains("\"length\""), "{text}");
    server.served.await.unwrap().unwrap();
}
