//! A server within the test, and requests to it.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use axum::http::{Method, Request, Response, StatusCode};
use http_body_util::BodyExt;
use kv_core::Budget;
use kv_models::{Engine, EngineOptions, JobError, Model};
use kv_serve::{Policies, Settings, listen, router, serve};
use serde_json::{Value, json};
use tokio::sync::oneshot;
use tower::ServiceExt;

/// A prompt whose answer the embedded model knows.
pub(crate) const NUMBER: &str = "21963";

pub(crate) fn question() -> String {
    let sea = "The sea was calm that day, and the old boat lay upon the sand. ".repeat(8);
    format!(
        "{sea}\nThe secret number of the clever fiddle is {NUMBER}.\n{sea}\nQuestion: What is the \
         secret number of the clever fiddle?\nAnswer: "
    )
}

/// An engine with the embedded model on the CPU.
pub(crate) fn engine(options: EngineOptions) -> Engine {
    try_engine(options).unwrap()
}

pub(crate) fn try_engine(options: EngineOptions) -> Result<Engine, JobError> {
    let load = || Model::load("needle-1m", &kv_core::select_device("cpu".parse()?)?, None);
    Engine::start(load, options)
}

/// An engine that tests share.
pub(crate) fn shared() -> Engine {
    static ENGINE: OnceLock<Engine> = OnceLock::new();
    ENGINE.get_or_init(|| engine(EngineOptions::default())).clone()
}

/// Settings without limits that a test would meet by chance.
pub(crate) fn settings() -> Settings {
    Settings {
        name: None,
        chat_template: None,
        policies: Policies::new("snapkv", Budget::Ratio(0.5), &[]).unwrap(),
        api_keys: Vec::new(),
        cors: Vec::new(),
        max_tokens: 1024,
        max_choices: 8,
        max_body: 1 << 20,
        body_bytes: 1 << 28,
        max_connections: 1024,
        request_timeout: Duration::from_secs(60),
        client_timeout: Duration::from_secs(30),
        drain_timeout: Duration::from_secs(10),
    }
}

/// A server with the settings of most tests.
pub(crate) fn server() -> Router {
    router(shared(), settings())
}

/// A request with a JSON body, or without one.
pub(crate) fn request(method: Method, path: &str, body: Option<&Value>) -> Request<Body> {
    let builder = Request::builder().method(method).uri(path);
    match body {
        Some(body) => builder
            .header("content-type", "application/json")
            .body(Body::from(body.to_string()))
            .unwrap(),
        None => builder.body(Body::empty()).unwrap(),
    }
}

/// The answer's status, and its body as text.
pub(crate) async fn text(router: &Router, request: Request<Body>) -> (StatusCode, String) {
    let response = router.clone().oneshot(request).await.unwrap();
    let status = response.status();
    (status, body(response).await)
}

pub(crate) async fn body(response: Response<Body>) -> String {
    let bytes = response.into_body().collect().await.unwrap().to_bytes();
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// The answer's status, and its body as JSON.
pub(crate) async fn json_of(router: &Router, request: Request<Body>) -> (StatusCode, Value) {
    let (status, text) = text(router, request).await;
    let value = serde_json::from_str(&text);
    (status, value.unwrap_or_else(|error| panic!("{error}: {text}")))
}

pub(crate) async fn get(router: &Router, path: &str) -> (StatusCode, Value) {
    json_of(router, request(Method::GET, path, None)).await
}

pub(crate) async fn delete(router: &Router, path: &str) -> (StatusCode, Value) {
    json_of(router, request(Method::DELETE, path, None)).await
}

pub(crate) async fn post(router: &Router, path: &str, body: Value) -> (StatusCode, Value) {
    json_of(router, request(Method::POST, path, Some(&body))).await
}

/// The body of an answer that must be good.
pub(crate) async fn good(router: &Router, path: &str, body: Value) -> Value {
    let (status, answer) = post(router, path, body).await;
    assert_eq!(status, StatusCode::OK, "{answer}");
    answer
}

/// The error object of an answer that must be an error.
pub(crate) async fn bad(router: &Router, path: &str, body: Value, expected: u16) -> Value {
    let (status, answer) = post(router, path, body.clone()).await;
    assert_eq!(status.as_u16(), expected, "{body}: {answer}");
    error_of(&answer)
}

/// The error object of a body.
pub(crate) fn error_of(body: &Value) -> Value {
    let error = &body["error"];
    let keys: Vec<&str> = error.as_object().unwrap().keys().map(String::as_str).collect();
    for key in ["message", "type", "param", "code"] {
        assert!(keys.contains(&key), "{body}");
    }
    assert!(!error["message"].as_str().unwrap().is_empty());
    error.clone()
}

/// The events of a stream. Each must be whole, and the last `[DONE]`.
pub(crate) async fn stream(router: &Router, path: &str, mut body: Value) -> Vec<Value> {
    body["stream"] = json!(true);
    let (status, text) = text(router, request(Method::POST, path, Some(&body))).await;
    assert_eq!(status, StatusCode::OK, "{text}");
    events(&text)
}

pub(crate) fn events(text: &str) -> Vec<Value> {
    assert!(text.ends_with("\n\n"), "{text}");
    let lines = text.split("\n\n").filter(|block| !block.is_empty() && !block.starts_with(':'));
    let mut data: Vec<&str> =
        lines.map(|line| line.strip_prefix("data: ").unwrap_or_else(|| panic!("{line}"))).collect();
    assert_eq!(data.pop(), Some("[DONE]"));
    data.into_iter().map(|data| serde_json::from_str(data).unwrap()).collect()
}

/// A chat of one message.
pub(crate) fn chat(content: &str, more: Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": content}],
        "temperature": 0, "max_tokens": 5});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

pub(crate) const CHAT: &str = "/v1/chat/completions";
pub(crate) const TEXT: &str = "/v1/completions";

/// A server on a port of its own, which ends when it is told to.
pub(crate) struct Bound {
    pub(crate) address: SocketAddr,
    pub(crate) engine: Engine,
    pub(crate) end: oneshot::Sender<()>,
    pub(crate) served: tokio::task::JoinHandle<anyhow::Result<()>>,
}

pub(crate) async fn bound(options: EngineOptions, settings: Settings) -> Bound {
    let listener = listen("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = listener.local_addr().unwrap();
    let engine = engine(options);
    let loaded = std::future::ready(Ok(engine.clone()));
    let (end, ended) = oneshot::channel();
    let until = async move {
        let _ = ended.await;
    };
    let served = tokio::spawn(serve(listener, loaded, settings, until));
    Bound { address, engine, end, served }
}

/// The status and the text of the answer to a GET over a connection of its own.
pub(crate) fn ask(address: SocketAddr, path: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let status = text.split(' ').nth(1).and_then(|status| status.parse().ok());
    (status.unwrap_or_else(|| panic!("{text}")), text)
}

/// Sends a chat, whose answer is not read yet.
pub(crate) fn send(address: SocketAddr, body: &Value) -> TcpStream {
    let body = body.to_string();
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    write!(
        stream,
        "POST {CHAT} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    )
    .unwrap();
    stream
}

/// Waits until the engine has nothing to do.
pub(crate) async fn idle(engine: &Engine) {
    let begun = Instant::now();
    loop {
        let load = engine.load();
        if load.waiting + load.prefilling + load.running == 0 {
            return;
        }
        assert!(begun.elapsed() < Duration::from_secs(30), "{load:?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
