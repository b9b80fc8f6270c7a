//! Errors, each an object in OpenAI's form.

use std::time::{Duration, Instant};

use axum::body::Body;
use axum::http::{Method, Request};
use kv_models::EngineOptions;
use kv_serve::{Settings, router};
use serde_json::{Value, json};

use super::support::{
    CHAT, TEXT, bad, body, chat, engine, error_of, get, idle, json_of, post, request, server,
    settings, shared, text,
};
use tower::ServiceExt;

#[tokio::test]
async fn each_field_that_is_not_honoured_is_refused_by_name() {
    let server = server();
    for field in [
        "audio",
        "functions",
        "function_call",
        "metadata",
        "modalities",
        "prediction",
        "reasoning_effort",
        "service_tier",
        "store",
        "verbosity",
        "web_search_options",
        "best_of",
        "suffix",
        "prompt_cache_key",
        "safety_identifier",
        "min_tokens",
        "anything",
    ] {
        for path in [CHAT, TEXT] {
            let mut body = chat("x", json!({}));
            if path == TEXT {
                body = json!({"prompt": "x"});
            }
            body[field] = json!(1);
            let error = bad(&server, path, body, 400).await;
            assert_eq!(
                (&error["param"], &error["code"]),
                (&json!(field), &json!("unsupported_parameter"))
            );
        }
    }
    for (path, body, field) in [
        (TEXT, json!({"prompt": "x", "messages": []}), "messages"),
        (CHAT, chat("x", json!({"prompt": "x"})), "prompt"),
        (CHAT, chat("x", json!({"stream": true, "stream_options": {"x": 1}})), "stream_options.x"),
        (CHAT, chat("x", json!({"response_format": {"type": "xml"}})), "response_format"),
        (CHAT, chat("x", json!({"kv": {"policy": "snapkv", "x": null}})), "kv.x"),
        (CHAT, json!({"messages": [{"role": "user", "content": "x", "x": 1}]}), "messages[0].x"),
        (CHAT, json!({"messages": [{"role": "poet", "content": "x"}]}), "messages[0].role"),
    ] {
        let error = bad(&server, path, body, 400).await;
        let param = error["param"].as_str().unwrap();
        assert!(param.starts_with(field), "{error}");
    }
}

#[tokio::test]
async fn values_out_of_range_name_their_field() {
    let server = server();
    for (field, value) in [
        ("temperature", json!(-1)),
        ("temperature", json!(2.5)),
        ("temperature", json!("hot")),
        ("top_p", json!(0)),
        ("top_p", json!(1.5)),
        ("top_k", json!(-2)),
        ("min_p", json!(2)),
        ("repetition_penalty", json!(0)),
        ("repetition_penalty", json!(5e-324)),
        ("frequency_penalty", json!(3)),
        ("presence_penalty", json!(-3)),
        ("n", json!(0)),
        ("n", json!(100)),
        ("n", json!(-1)),
        ("max_tokens", json!(0)),
        ("max_tokens", json!(1_000_000)),
        ("max_tokens", json!(-5)),
        ("max_completion_tokens", json!(0)),
        ("max_completion_tokens", json!(1_000_000)),
        ("max_completion_tokens", json!(-5)),
        ("stop", json!([""])),
        ("stop", json!(vec!["x"; 50])),
        ("top_logprobs", json!(3)),
        ("stream_options", json!({"include_usage": true})),
        ("model", json!("gpt-4")),
        ("messages", json!([])),
    ] {
        let mut body = chat("x", json!({}));
        if field == "max_completion_tokens" {
            body["max_tokens"].take();
        }
        body[field] = value;
        let expected = if field == "model" { 404 } else { 400 };
        let error = bad(&server, CHAT, body, expected).await;
        assert_eq!(error["param"], field, "{error}");
    }
    for (bias, param) in [
        (json!({"x": 1}), "logit_bias.x"),
        (json!({"5000": 1}), "logit_bias.5000"),
        (json!({"5": 101}), "logit_bias.5"),
    ] {
        let error = bad(&server, CHAT, chat("x", json!({"logit_bias": bias})), 400).await;
        assert_eq!(error["param"], param);
    }
    for (field, value, part) in [
        ("top_logprobs", json!(3), "needs `logprobs: true`"),
        ("stream_options", json!({"include_usage": true}), "needs `stream: true`"),
        ("tool_choice", json!("auto"), "needs `tools`"),
        ("tool_choice", json!(3), "`none`, `auto`, `required`"),
        ("stop", json!(3), "a text or a list of texts"),
        ("max_tokens", json!(-1), "expected a whole number of at least 0"),
    ] {
        let mut body = chat("x", json!({}));
        body[field] = value;
        let error = bad(&server, CHAT, body, 400).await;
        let message = error["message"].as_str().unwrap();
        assert!(error["param"] == field && message.contains(part), "{error}");
    }
    let error = bad(&server, TEXT, json!({"prompt": [-1]}), 400).await;
    let message = error["message"].as_str().unwrap();
    assert!(error["param"] == "prompt" && message.contains("a list of token numbers"), "{error}");
    let call = json!({"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}});
    let mut body = chat("x", json!({}));
    body["messages"][0]["tool_calls"] = json!([call]);
    let error = bad(&server, CHAT, body, 400).await;
    assert_eq!(error["param"], "messages[0].tool_calls");
    let both = json!({"max_tokens": 3, "max_completion_tokens": 4});
    let error = bad(&server, CHAT, chat("x", both), 400).await;
    assert_eq!(error["param"], "max_completion_tokens");
    let logprobs = json!({"logprobs": true, "top_logprobs": 21});
    assert_eq!(bad(&server, CHAT, chat("x", logprobs), 400).await["param"], "top_logprobs");
}

#[tokio::test]
async fn policies_and_budgets_are_checked() {
    let server = server();
    for (kv, param, part) in [
        (json!({"policy": "snapvk"}), "kv.policy", "did you mean `snapkv`"),
        (json!({"policy": 1}), "kv.policy", "name"),
        (json!({"budget": 0}), "kv.budget", "at least one token"),
        (json!({"budget": -0.5}), "kv.budget", ""),
        (json!({"budget": 1.5}), "kv.budget", "at most 1"),
        (json!({"budget": "all"}), "kv.budget", ""),
        (json!({"windows": 3}), "kv.windows", "did you mean `window`"),
        (json!({"budgt": 3}), "kv.budgt", "did you mean `budget`"),
        (json!({"policy": "duo-attention", "alpha": "/etc/passwd"}), "kv.policy", "operator"),
        (json!({"policy": "double-sparsity", "channels": "/x"}), "kv.channels", "operator"),
        (json!({"context": 5}), "kv.context", "name"),
        (json!({"context": "a", "budget": 0.5}), "kv.budget", "context"),
        (json!("snapkv"), "kv", ""),
        (json!({"window": 0}), "kv.window", "at least 1"),
        (json!({"layers": "foo"}), "kv.layers", "`uniform`"),
        (
            json!({"policy": "combine", "prefill": {"policy": "snapkw"}}),
            "kv.prefill.policy",
            "snapkv",
        ),
    ] {
        let error = bad(&server, CHAT, chat("x", json!({"kv": kv})), 400).await;
        let message = error["message"].as_str().unwrap();
        assert!(error["param"] == param && message.contains(part), "{kv}: {error}");
    }
    let error = bad(&server, CHAT, chat("x", json!({"kv": {"context": "none"}})), 404).await;
    assert_eq!(error["code"], "context_not_found");
}

#[tokio::test]
async fn prompts_that_do_not_fit() {
    let server = server();
    let long = "The sea was calm. ".repeat(600);
    let error = bad(&server, CHAT, chat(&long, json!({})), 400).await;
    assert_eq!(
        (&error["code"], &error["param"]),
        (&json!("context_length_exceeded"), &json!("messages"))
    );
    let error = bad(&server, TEXT, json!({"prompt": long}), 400).await;
    assert_eq!(error["param"], "prompt");
    let most = "The sea was calm. ".repeat(280);
    let error = bad(&server, CHAT, chat(&most, json!({"max_tokens": 1000})), 400).await;
    assert_eq!(
        (&error["code"], &error["param"]),
        (&json!("context_length_exceeded"), &json!("max_tokens"))
    );
}

/// The tokens of such a text take seconds.
#[tokio::test]
async fn texts_whose_bytes_show_that_they_do_not_fit_are_refused_at_once() {
    let server = router(shared(), Settings { max_body: 32 << 20, ..settings() });
    let long = "The sea was calm that day. ".repeat((16 << 20) / 27);
    for (path, body, param) in [
        (CHAT, chat(&long, json!({})), "messages"),
        (TEXT, json!({"prompt": ["x", long]}), "prompt"),
        ("/v1/kv/contexts", json!({"name": "long", "text": long}), "text"),
    ] {
        let begun = Instant::now();
        let error = bad(&server, path, body, 400).await;
        assert_eq!(
            (&error["code"], &error["param"]),
            (&json!("context_length_exceeded"), &json!(param))
        );
        let message = error["message"].as_str().unwrap();
        assert!(message.contains("bytes") && message.contains("2048 positions"), "{message}");
        assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
    }
}

/// A request that announces a body of so many bytes, and sends none of them.
fn announced(bytes: u64) -> Request<Body> {
    let builder = Request::builder().method(Method::POST).uri(CHAT);
    let builder = builder.header("content-type", "application/json");
    let never = futures_util::stream::pending::<Result<&'static str, std::io::Error>>();
    builder.header("content-length", bytes).body(Body::from_stream(never)).unwrap()
}

#[tokio::test]
async fn bodies_take_no_more_memory_than_they_may() {
    let most = 1 << 20;
    let settings = Settings { max_body: most, body_bytes: most, ..settings() };
    let server = router(shared(), settings);
    let (status, answer) = json_of(&server, announced(most as u64 + 1)).await;
    assert_eq!((status.as_u16(), &error_of(&answer)["code"]), (413, &json!("request_too_large")));
    let slow = tokio::spawn(server.clone().oneshot(announced(most as u64)));
    // It has taken all the room once it waits for its body.
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(status_of(&server).await, 503);
    slow.abort();
    assert!(slow.await.unwrap_err().is_cancelled());
    assert_eq!(status_of(&server).await, 200);
}

/// The status of a good request's answer.
async fn status_of(server: &axum::Router) -> u16 {
    let (status, answer) = post(server, CHAT, chat("x", json!({"max_tokens": 1}))).await;
    if status.as_u16() != 200 {
        assert_eq!(error_of(&answer)["code"], "unavailable");
    }
    status.as_u16()
}

#[tokio::test]
async fn long_names_are_refused_at_once_and_quoted_in_part() {
    let server = router(shared(), Settings { max_body: 32 << 20, ..settings() });
    let long = "x".repeat(15 << 20);
    let mut field = chat("x", json!({}));
    field[long.as_str()] = json!(1);
    for (path, body) in [
        (CHAT, chat("x", json!({"kv": {"policy": long}}))),
        ("/v1/kv/contexts", json!({"name": "a", "text": "x", "kv": {"policy": long}})),
        (CHAT, field),
        (CHAT, chat("x", json!({"model": long}))),
        (CHAT, chat("x", json!({"kv": {"context": long}}))),
    ] {
        let begun = Instant::now();
        let (status, answer) = post(&server, path, body).await;
        assert!(status.is_client_error(), "{status}");
        assert!(answer.to_string().len() < 8 << 10, "{}", answer.to_string().len());
        assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
    }
}

#[tokio::test]
async fn bodies_that_are_no_requests() {
    let server = server();
    let raw = |kind: &str, body: &str| {
        let builder =
            Request::builder().method(Method::POST).uri(CHAT).header("content-type", kind);
        builder.body(Body::from(body.to_string())).unwrap()
    };
    for body in ["", "{", "[]", "3", "null", "{\"messages\": [}", "\u{0}"] {
        let (status, answer) = json_of(&server, raw("application/json", body)).await;
        assert_eq!(status.as_u16(), 400, "{body}: {answer}");
        error_of(&answer);
    }
    let good = chat("x", json!({})).to_string();
    for kind in ["text/plain", "application/x-www-form-urlencoded", ""] {
        let (status, answer) = json_of(&server, raw(kind, &good)).await;
        assert_eq!(status.as_u16(), 415);
        error_of(&answer);
    }
    let (status, _) = text(&server, raw("Application/JSON; charset=utf-8", &good)).await;
    assert_eq!(status.as_u16(), 200);
    let huge = chat(&"x".repeat(2 << 20), json!({})).to_string();
    let (status, answer) = json_of(&server, raw("application/json", &huge)).await;
    assert_eq!((status.as_u16(), &error_of(&answer)["code"]), (413, &json!("request_too_large")));
    let message = answer["error"]["message"].as_str().unwrap();
    assert!(message.contains(&settings().max_body.to_string()), "{message}");
    // Depth beyond what a parser takes is an error, not the end of the process.
    let deep = format!("{{\"messages\": {}{}}}", "[".repeat(100_000), "]".repeat(100_000));
    let (status, _) = json_of(&server, raw("application/json", &deep)).await;
    assert_eq!(status.as_u16(), 400);
}

#[tokio::test]
async fn paths_and_methods_that_there_are_not() {
    let server = server();
    for path in ["/v1", "/v2/models", "/v1/chat", "/nothing", "/page/other.js", "/v1/embeddings"] {
        let (status, answer) = get(&server, path).await;
        assert_eq!((status.as_u16(), &error_of(&answer)["code"]), (404, &json!("unknown_url")));
    }
    for (method, path) in [
        (Method::GET, CHAT),
        (Method::PUT, TEXT),
        (Method::DELETE, "/v1/models"),
        (Method::POST, "/health"),
        (Method::PATCH, "/v1/kv/contexts"),
        (Method::POST, "/"),
    ] {
        let response = server.clone().oneshot(request(method, path, None)).await.unwrap();
        assert_eq!(response.status().as_u16(), 405, "{path}");
        assert!(response.headers().contains_key("allow"), "{path}");
        let answer: Value = serde_json::from_str(&body(response).await).unwrap();
        error_of(&answer);
    }
}

#[tokio::test]
async fn a_request_takes_no_longer_than_it_may() {
    let request_timeout = Duration::from_millis(30);
    let server = router(shared(), Settings { request_timeout, ..settings() });
    let more = json!({"max_tokens": 1000, "ignore_eos": true});
    let error = bad(&server, CHAT, chat("The sea", more.clone()), 408).await;
    assert_eq!(error["code"], "timeout");
    // In a stream, the error is an event.
    let mut body = chat("The sea", more);
    body["stream"] = json!(true);
    let (status, text) = text(&server, request(Method::POST, CHAT, Some(&body))).await;
    if status.as_u16() == 200 {
        let events = super::support::events(&text);
        assert_eq!(error_of(events.last().unwrap())["code"], "timeout");
    } else {
        assert_eq!(status.as_u16(), 408);
    }
}

/// An answer that nobody reads is made no longer than any other.
#[tokio::test(flavor = "multi_thread")]
async fn a_deadline_needs_no_reader() {
    let engine = engine(EngineOptions::default());
    let request_timeout = Duration::from_millis(200);
    let server = router(engine.clone(), Settings { request_timeout, ..settings() });
    let more = json!({"max_tokens": 1024, "ignore_eos": true, "stream": true, "n": 8});
    let asked = request(Method::POST, CHAT, Some(&chat("The sea", more)));
    let unread = server.oneshot(asked).await.unwrap();
    assert_eq!(unread.status().as_u16(), 200);
    // Loads are published from time to time: until then there is nothing to be idle after.
    while engine.load().totals.submitted < 8 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    idle(&engine).await;
    let totals = engine.load().totals;
    assert_eq!((totals.cancelled, totals.ended), (8, 0), "{totals:?}");
    let events = super::support::events(&body(unread).await);
    assert_eq!(error_of(events.last().unwrap())["code"], "timeout");
}
