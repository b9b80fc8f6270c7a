//! What the operator decides: keys, origins, policies, a queue, readiness.

use axum::body::Body;
use axum::http::{Method, Request};
use kv_core::Budget;
use kv_models::EngineOptions;
use kv_serve::{Policies, Settings, router};
use serde_json::{Value, json};
use tower::ServiceExt;

use super::support::{
    CHAT, bad, body, chat, engine, error_of, get, good, json_of, post, request, server, settings,
    shared, text, try_engine,
};

#[tokio::test]
async fn keys_guard_the_api() {
    let api_keys = vec!["first-key".to_string(), "second".to_string()];
    let server = router(shared(), Settings { api_keys, ..settings() });
    let with = |key: Option<&str>, path: &str| {
        let mut builder = Request::builder().uri(path);
        if let Some(key) = key {
            builder = builder.header("authorization", key);
        }
        builder.body(Body::empty()).unwrap()
    };
    for key in
        [None, Some("Bearer wrong"), Some("Bearer first-ke"), Some("Basic first-key"), Some("")]
    {
        for path in ["/v1/models", "/v1/kv/requests", "/v1/kv/contexts", "/v1/kv/policies"] {
            let (status, answer) = json_of(&server, with(key, path)).await;
            assert_eq!(status.as_u16(), 401, "{key:?} {path}");
            assert_eq!(error_of(&answer)["code"], "invalid_api_key");
        }
    }
    let (status, _) = post(&server, CHAT, chat("x", json!({}))).await;
    assert_eq!(status.as_u16(), 401);
    for key in ["Bearer first-key", "bearer second"] {
        let (status, _) = json_of(&server, with(Some(key), "/v1/models")).await;
        assert_eq!(status.as_u16(), 200);
    }
    // What probes, scrapers and browsers ask first is open.
    for path in ["/health", "/ready", "/metrics", "/", "/openapi.json"] {
        let (status, _) = text(&server, with(None, path)).await;
        assert_eq!(status.as_u16(), 200, "{path}");
    }
}

#[tokio::test]
async fn pages_of_other_origins_are_shut_out_unless_named() {
    let from = |method: Method| {
        Request::builder()
            .method(method)
            .uri("/v1/models")
            .header("origin", "https://example.org")
            .header("access-control-request-method", "POST")
            .header("access-control-request-headers", "authorization,x-stainless-lang")
            .body(Body::empty())
            .unwrap()
    };
    let allowed = async |router: &axum::Router, method: Method| {
        let response = router.clone().oneshot(from(method)).await.unwrap();
        let header = response.headers().get("access-control-allow-origin");
        header.map(|value| value.to_str().unwrap().to_string())
    };
    assert_eq!(allowed(&server(), Method::GET).await, None);
    let with =
        |origin: &str| router(shared(), Settings { cors: vec![origin.to_string()], ..settings() });
    let named = with("https://example.org");
    assert_eq!(allowed(&named, Method::GET).await.as_deref(), Some("https://example.org"));
    assert_eq!(allowed(&named, Method::OPTIONS).await.as_deref(), Some("https://example.org"));
    assert_eq!(allowed(&with("https://other.org"), Method::GET).await, None);
    assert_eq!(allowed(&with("*"), Method::GET).await.as_deref(), Some("*"));
    // Clients send headers of their own, and read some of the answer's.
    let preflight = named.clone().oneshot(from(Method::OPTIONS)).await.unwrap();
    let headers = &preflight.headers()["access-control-allow-headers"];
    assert_eq!(headers, "authorization,x-stainless-lang");
    let answer = named.oneshot(from(Method::GET)).await.unwrap();
    assert_eq!(
        answer.headers()["access-control-expose-headers"],
        "x-kv-jobs,x-request-id,retry-after"
    );
}

#[tokio::test]
async fn policies_may_be_few_and_a_name_another() {
    let policies = Policies::new("knorm", Budget::Tokens(32), &["full".into()]).unwrap();
    let name = Some("mine".to_string());
    let server = router(shared(), Settings { policies, name, ..settings() });
    let answer = good(&server, CHAT, chat("The sea was calm.", json!({"model": "mine"}))).await;
    assert_eq!(answer["model"], "mine");
    good(&server, CHAT, chat("x", json!({"kv": {"policy": "full"}}))).await;
    let error = bad(&server, CHAT, chat("x", json!({"kv": {"policy": "h2o"}})), 400).await;
    assert!(error["message"].as_str().unwrap().contains("full, knorm"), "{error}");
    let (_, policies) = get(&server, "/v1/kv/policies").await;
    assert_eq!(policies["policies"].as_array().unwrap().len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_queue_says_when_to_come_again() {
    let engine = engine(EngineOptions { rows: 1, queue: 1, ..EngineOptions::default() });
    let server = router(engine, settings());
    let long = chat("The sea", json!({"max_tokens": 600, "ignore_eos": true}));
    let asked: Vec<_> = (0..6)
        .map(|_| {
            let (server, body) = (server.clone(), long.clone());
            tokio::spawn(async move {
                let asked = request(Method::POST, CHAT, Some(&body));
                let response = server.oneshot(asked).await.unwrap();
                let after = response.headers().get("retry-after").cloned();
                (response.status().as_u16(), after, body_of(response).await)
            })
        })
        .collect();
    let mut counts = (0, 0);
    for one in asked {
        let (status, after, answer) = one.await.unwrap();
        match status {
            200 => counts.0 += 1,
            429 => {
                counts.1 += 1;
                assert_eq!(after.unwrap(), "1");
                assert_eq!(error_of(&answer)["code"], "queue_full");
            }
            other => panic!("{other}: {answer}"),
        }
    }
    assert!(counts.0 >= 1 && counts.1 >= 1, "{counts:?}");
}

/// Choices for which even an empty queue has no place can never be served: coming again is of no
/// use.
#[tokio::test]
async fn more_choices_than_may_wait_are_an_error() {
    let engine = engine(EngineOptions { queue: 2, ..EngineOptions::default() });
    let server = router(engine, settings());
    for body in [chat("x", json!({"n": 3})), chat("x", json!({"n": 8}))] {
        let error = bad(&server, CHAT, body, 400).await;
        assert_eq!(error["param"], "n");
        assert!(error["message"].as_str().unwrap().contains("expected 1 to 2"), "{error}");
    }
    let answer = good(&server, CHAT, chat("x", json!({"n": 2}))).await;
    assert_eq!(answer["choices"].as_array().unwrap().len(), 2);
}

async fn body_of(response: axum::http::Response<Body>) -> Value {
    serde_json::from_str(&body(response).await).unwrap()
}

#[tokio::test]
async fn a_cache_that_is_too_small_says_so() {
    let small = |bytes| EngineOptions { bytes, ..EngineOptions::default() };
    let refused = try_engine(small(4096)).unwrap_err().to_string();
    assert!(refused.contains("4096 bytes in 2 parts, one token takes 2080"), "{refused}");
    let server = router(engine(small(8192)), settings());
    let error = bad(&server, CHAT, chat("The sea was calm.", json!({})), 400).await;
    assert_eq!(error["code"], "cache_too_small");
    // The number that is told is the largest one.
    let server = router(engine(small(400 * 2080)), settings());
    let ask =
        |new: usize| chat("The sea was calm.", json!({"max_tokens": new, "ignore_eos": true}));
    let error = bad(&server, CHAT, ask(500), 400).await;
    let message = error["message"].as_str().unwrap();
    let most = message.split("at most ").nth(1).and_then(|rest| rest.split(' ').next());
    let most: usize = most.and_then(|most| most.parse().ok()).unwrap_or_else(|| panic!("{error}"));
    assert_eq!(bad(&server, CHAT, ask(most + 1), 400).await["code"], "cache_too_small");
    good(&server, CHAT, ask(most)).await;
    let server = router(engine(small(8192)), settings());
    // h2o's steps change slots. Its budget alone tells, before the prompt is computed.
    let h2o = json!({"max_tokens": 1, "kv": {"policy": "h2o", "budget": 0.9}});
    let error = bad(&server, CHAT, chat(&"The sea was calm. ".repeat(20), h2o), 400).await;
    assert_eq!(error["code"], "cache_too_small");
    assert!(error["message"].as_str().unwrap().contains("fewer than"), "{error}");
}

/// The server's number of new tokens is less where the cache is small.
#[tokio::test]
async fn requests_that_name_no_number_fit_into_small_caches() {
    let engine = engine(EngineOptions { bytes: 400_000, ..EngineOptions::default() });
    let server = router(engine, Settings { max_tokens: 2000, ..settings() });
    // Null is no number.
    let more = json!({"max_tokens": null, "ignore_eos": true, "kv": {"policy": "full"}});
    let answer = good(&server, CHAT, chat("The sea was calm.", more)).await;
    let tokens = answer["usage"]["completion_tokens"].as_u64().unwrap();
    assert!((50..2000).contains(&tokens), "{tokens}");
}

#[tokio::test]
async fn health_is_told() {
    let server = server();
    for path in ["/health", "/ready"] {
        let (status, answer) = get(&server, path).await;
        assert_eq!((status.as_u16(), &answer["status"]), (200, &json!("ok")));
    }
}

#[tokio::test]
async fn requests_keep_no_more_than_the_operator_lets_them() {
    let policies = Policies::new("snapkv", Budget::Ratio(0.5), &[]).unwrap();
    let policies = policies.at_most(Some(Budget::Ratio(0.25)));
    let server = router(shared(), Settings { policies, ..settings() });
    let ask =
        |kv: Value| chat(&"The sea was calm. ".repeat(20), json!({"max_tokens": 2, "kv": kv}));
    let few = json!({"policy": "h2o", "budget": 32});
    // The default keeps half.
    for kv in [json!({}), json!({"budget": 0.25}), json!({"window": 8}), few] {
        good(&server, CHAT, ask(kv)).await;
    }
    for (kv, param) in [
        (json!({"budget": 0.6}), "kv.budget"),
        (json!({"policy": "full"}), "kv.policy"),
        (json!({"policy": "quest"}), "kv.policy"),
        // How much it keeps depends on layers.
        (json!({"policy": "psaw", "free": true}), "kv.policy"),
    ] {
        let error = bad(&server, CHAT, ask(kv), 400).await;
        assert_eq!(error["param"], param);
        assert!(error["message"].as_str().unwrap().contains("lets requests keep"), "{error}");
    }
    let new = json!({"name": "all", "text": "The sea was calm.", "kv": {"policy": "full"}});
    assert_eq!(bad(&server, "/v1/kv/contexts", new, 400).await["param"], "kv.policy");
}
