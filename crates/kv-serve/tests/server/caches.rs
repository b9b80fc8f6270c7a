//! The routes about caches: policies, contexts, live requests, metrics.

use std::time::{Duration, Instant};

use axum::http::{Method, StatusCode};
use kv_models::EngineOptions;
use kv_serve::router;
use serde_json::{Value, json};

use super::support::{
    CHAT, NUMBER, TEXT, bad, chat, delete, engine, error_of, get, good, json_of, post, question,
    request, server, settings, text,
};

#[tokio::test]
async fn a_request_chooses_its_policy() {
    let server = server();
    let take = async |kv: Value| {
        let answer = good(&server, CHAT, chat(&question(), json!({"kv": kv}))).await;
        answer["usage"].clone()
    };
    let full = take(json!({"policy": "full"})).await;
    let half = take(json!({})).await;
    let few = take(json!({"budget": 64})).await;
    let h2o = take(json!({"policy": "h2o", "budget": 64, "sinks": 2})).await;
    let kept = |usage: &Value| usage["kv_tokens_kept"].as_f64().unwrap();
    let total = full["total_tokens"].as_f64().unwrap();
    assert!((kept(&full) - total).abs() <= 1.0, "{full}");
    assert!(kept(&half) < 0.6 * total && kept(&few) < 80.0 && kept(&h2o) <= 80.0);
    assert_eq!(full["kv_full_bytes"], half["kv_full_bytes"]);
    let (_, policies) = get(&server, "/v1/kv/policies").await;
    assert_eq!(policies["default"]["policy"], "snapkv");
    assert!(policies["policies"].as_array().unwrap().len() > 20);
}

#[tokio::test]
async fn a_context_is_compressed_once_for_many_questions() {
    let folder = tempfile::tempdir().unwrap();
    let options =
        EngineOptions { contexts: Some(folder.path().into()), ..EngineOptions::default() };
    let server = router(engine(options.clone()), settings());
    let (document, asked) = question().split_at(question().find("Question").unwrap()).into_owned();
    let cache = json!({"policy": "keydiff", "decode": false, "budget": 0.7});
    let body = json!({"name": "story", "text": document, "kv": cache});
    let (status, context) = post(&server, "/v1/kv/contexts", body.clone()).await;
    assert_eq!(status.as_u16(), 201, "{context}");
    assert_eq!((&context["name"], &context["saved"]), (&json!("story"), &json!(false)));
    assert!(context["kv_bytes"].as_u64() < context["kv_full_bytes"].as_u64(), "{context}");
    for _ in 0..2 {
        let answer = good(&server, CHAT, chat(&asked, json!({"kv": {"context": "story"}}))).await;
        assert_eq!(
            answer["choices"][0]["message"]["content"].as_str().unwrap().len(),
            NUMBER.len()
        );
        let usage = &answer["usage"];
        assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], context["tokens"], "{usage}");
    }
    let error = bad(&server, "/v1/kv/contexts", body, 409).await;
    assert_eq!(error["code"], "context_exists");
    let (_, list) = get(&server, "/v1/kv/contexts").await;
    assert_eq!(list["data"].as_array().unwrap().len(), 1);

    let (status, saved) = post(&server, "/v1/kv/contexts/story/save", json!({})).await;
    assert_eq!((status.as_u16(), &saved["saved"]), (200, &json!(true)), "{saved}");
    // Another engine finds it.
    let other = router(engine(options), settings());
    let (_, found) = get(&other, "/v1/kv/contexts/story").await;
    assert_eq!((&found["tokens"], &found["saved"]), (&context["tokens"], &json!(true)));
    let answer = good(&other, CHAT, chat(&asked, json!({"kv": {"context": "story"}}))).await;
    let here = good(&server, CHAT, chat(&asked, json!({"kv": {"context": "story"}}))).await;
    assert_eq!(answer["choices"][0]["message"], here["choices"][0]["message"]);

    let (_, gone) = delete(&server, "/v1/kv/contexts/story").await;
    assert_eq!(gone["deleted"], true);
    let (status, _) = get(&server, "/v1/kv/contexts/story").await;
    assert_eq!(status.as_u16(), 404);
    let (status, _) = delete(&server, "/v1/kv/contexts/story").await;
    assert_eq!(status.as_u16(), 404);
}

/// `split_at` of a text that lives no longer than the statement.
trait IntoOwned {
    fn into_owned(self) -> (String, String);
}

impl IntoOwned for (&str, &str) {
    fn into_owned(self) -> (String, String) {
        (self.0.into(), self.1.into())
    }
}

#[tokio::test]
async fn contexts_that_cannot_be() {
    let server = server();
    let path = "/v1/kv/contexts";
    for (body, param) in [
        (json!({"text": "x"}), "name"),
        (json!({"name": "", "text": "x"}), "name"),
        (json!({"name": "../x", "text": "x"}), "name"),
        (json!({"name": "a/b", "text": "x"}), "name"),
        (json!({"name": "a", "text": "x", "tokens": [1]}), "text"),
        (json!({"name": "a"}), "text"),
        (json!({"name": "a", "text": ""}), "text"),
        (json!({"name": "a", "tokens": [5000]}), "tokens"),
        (json!({"name": "a", "text": "The sea. ".repeat(2000)}), "text"),
        (json!({"name": "a", "text": "x", "kv": {"policy": "h20"}}), "kv.policy"),
        (json!({"name": "a", "text": "x", "pinned": true}), "pinned"),
    ] {
        let error = bad(&server, path, body.clone(), 400).await;
        assert_eq!(error["param"], param, "{body}: {error}");
    }
    // This server has no folder.
    let (status, _) = post(&server, path, json!({"name": "b", "text": "The sea was calm."})).await;
    assert_eq!(status.as_u16(), 201);
    let error = bad(&server, "/v1/kv/contexts/b/save", json!({}), 400).await;
    assert_eq!(error["param"], "name");
    bad(&server, "/v1/kv/contexts/none/save", json!({}), 404).await;
    delete(&server, "/v1/kv/contexts/b").await;
}

#[tokio::test]
async fn files_of_others_are_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let contexts = Some(folder.path().to_path_buf());
    let server = router(engine(EngineOptions { contexts, ..EngineOptions::default() }), settings());
    let path = |name: &str| folder.path().join(name);
    let foreign = ["a.json", "b.cache", "c.half", "c.cache-half"];
    for name in foreign {
        std::fs::write(path(name), "{}").unwrap();
    }
    for name in ["a", "b", "c"] {
        let body = json!({"name": name, "text": "The sea was calm that day."});
        let (status, answer) = post(&server, "/v1/kv/contexts", body).await;
        assert_eq!(status.as_u16(), 201, "{answer}");
    }
    let refused = |(status, answer): (StatusCode, Value), file: &str| {
        assert_eq!(status.as_u16(), 409, "{answer}");
        let error = error_of(&answer);
        assert_eq!(error["code"], "context_file_exists");
        assert!(error["message"].as_str().unwrap().contains(file), "{error}");
    };
    let save =
        async |name: &str| post(&server, &format!("/v1/kv/contexts/{name}/save"), json!({})).await;
    refused(save("a").await, "a.json");
    refused(save("b").await, "b.cache");
    for _ in 0..2 {
        assert_eq!(save("c").await.0.as_u16(), 200);
    }
    for name in foreign {
        assert_eq!(std::fs::read_to_string(path(name)).unwrap(), "{}", "{name}");
    }
    // A context that was never saved has no file to delete.
    delete(&server, "/v1/kv/contexts/a").await;
    assert!(path("a.json").exists());
    // Files that were changed behind the server's back are not its own any more.
    std::fs::write(path("c.json"), "mine now").unwrap();
    refused(save("c").await, "c.json");
    refused(delete(&server, "/v1/kv/contexts/c").await, "c.json");
    assert_eq!(std::fs::read_to_string(path("c.json")).unwrap(), "mine now");
    std::fs::remove_file(path("c.json")).unwrap();
    assert_eq!(delete(&server, "/v1/kv/contexts/c").await.0.as_u16(), 200);
    assert!(!path("c.cache").exists());
}

#[tokio::test]
async fn contexts_without_room_are_refused_before_they_are_computed() {
    let engine = engine(EngineOptions { context_bytes: 100_000, ..EngineOptions::default() });
    let server = router(engine.clone(), settings());
    let text = question();
    let create = async |name: &str, cache: Value| {
        let body = json!({"name": name, "text": text, "kv": cache});
        post(&server, "/v1/kv/contexts", body).await
    };
    let keydiff = |budget: Value| json!({"policy": "keydiff", "decode": false, "budget": budget});
    for cache in [json!({"policy": "full"}), keydiff(json!(0.9))] {
        let (status, answer) = create("large", cache).await;
        assert_eq!((status.as_u16(), &answer["error"]["code"]), (400, &json!("cache_too_small")));
        assert!(
            answer["error"]["message"].as_str().unwrap().contains("contexts have 100000"),
            "{answer}"
        );
    }
    let (status, answer) = create("small", keydiff(json!(32))).await;
    assert_eq!(status.as_u16(), 201, "{answer}");
    // The engine shows its counts a moment later.
    let begun = Instant::now();
    while engine.load().totals.prompt_tokens == 0 && begun.elapsed() < Duration::from_secs(10) {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let totals = engine.load().totals;
    assert_eq!(totals.prompt_tokens, answer["tokens"].as_u64().unwrap(), "{totals:?}");
}

#[tokio::test]
async fn new_tokens_fit_behind_a_context() {
    let server = router(engine(EngineOptions::default()), settings());
    let tokens: Vec<u32> = (0..2000).map(|at| 3 + at % 50).collect();
    let cache = json!({"policy": "keydiff", "decode": false, "budget": 64});
    let new = json!({"name": "long", "tokens": tokens, "kv": cache});
    assert_eq!(post(&server, "/v1/kv/contexts", new).await.0, StatusCode::CREATED);
    let ask = |more: Value| {
        let mut body = json!({"prompt": [7, 8, 9], "ignore_eos": true, "kv": {"context": "long"}});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let error = bad(&server, TEXT, ask(json!({"max_tokens": 46})), 400).await;
    assert_eq!(error["code"], "context_length_exceeded");
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("2000 tokens of the context, 3 of the prompt and 46"), "{message}");
    let answer = good(&server, TEXT, ask(json!({"max_tokens": 45}))).await;
    assert_eq!(answer["usage"]["completion_tokens"], 45);
    let whole = json!({"prompt": vec![5; 48], "kv": {"context": "long"}});
    let error = bad(&server, TEXT, whole, 400).await;
    let expected = (&json!("prompt"), &json!("context_length_exceeded"));
    assert_eq!((&error["param"], &error["code"]), expected);
    delete(&server, "/v1/kv/contexts/long").await;
    bad(&server, TEXT, ask(json!({"max_tokens": 46})), 404).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn running_requests_are_shown() {
    let engine = engine(EngineOptions::default());
    let server = router(engine, settings());
    let (_, live) = get(&server, "/v1/kv/requests").await;
    assert_eq!((&live["running"], &live["requests"]), (&json!(0), &json!([])));
    let body = chat(&question(), json!({"max_tokens": 700, "ignore_eos": true}));
    let asked = tokio::spawn({
        let server = server.clone();
        async move { good(&server, CHAT, body).await }
    });
    let mut seen = None;
    while !asked.is_finished() {
        let (_, live) = get(&server, "/v1/kv/requests").await;
        let first = live["requests"][0].clone();
        if let Some(job) = first["job"].as_u64().filter(|_| first["new_tokens"].as_u64() > Some(3))
        {
            let (status, picture) = get(&server, &format!("/v1/kv/requests/{job}")).await;
            if status.is_success() && picture["running"] == true {
                seen = Some((first, picture));
            }
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let answer = asked.await.unwrap();
    let (first, picture) = seen.expect("700 tokens take a while");
    assert_eq!((&first["id"], &first["policy"]["policy"]), (&answer["id"], &json!("snapkv")));
    assert!(first["kv_bytes"].as_u64() < first["kv_full_bytes"].as_u64());
    assert!(first["tokens_per_second"].as_f64().unwrap() > 0.0);
    let kept = picture["kept"].as_array().unwrap();
    assert_eq!((kept.len(), kept[0].as_array().unwrap().len()), (4, 2));
    let (_, last) = get(&server, &format!("/v1/kv/requests/{}", first["job"])).await;
    let tokens = &answer["usage"]["total_tokens"];
    assert_eq!((&last["running"], &last["tokens"]), (&json!(false), tokens));
    for path in ["/v1/kv/requests/999999", "/v1/kv/requests/x"] {
        let (status, answer) = get(&server, path).await;
        assert_eq!((status.as_u16(), &answer["error"]["code"]), (404, &json!("request_not_found")));
    }
}

#[tokio::test]
async fn metrics_count() {
    let engine = engine(EngineOptions::default());
    let server = router(engine, settings());
    good(&server, CHAT, chat(&question(), json!({}))).await;
    bad(&server, CHAT, json!({}), 400).await;
    // The engine shows its counts a moment after the last token.
    let mut metrics = String::new();
    for _ in 0..200 {
        metrics = text(&server, request(Method::GET, "/metrics", None)).await.1;
        if metrics.contains("kv_serve_new_tokens_total 5") {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let value = |name: &str| -> f64 {
        let line = metrics.lines().find(|line| line.starts_with(&format!("{name} ")));
        line.unwrap_or_else(|| panic!("{name}: {metrics}"))
            .rsplit(' ')
            .next()
            .unwrap()
            .parse()
            .unwrap()
    };
    assert_eq!(value("kv_serve_jobs_submitted_total"), 1.0);
    assert_eq!(value("kv_serve_new_tokens_total"), 5.0);
    assert_eq!(value("kv_serve_time_to_first_token_seconds_count"), 1.0);
    assert_eq!(value("kv_serve_inter_token_latency_seconds_count"), 4.0);
    assert_eq!(value("kv_serve_request_duration_seconds_count"), 1.0);
    assert!(value("kv_serve_kv_tokens_kept_total") < value("kv_serve_kv_tokens_seen_total"));
    for name in
        ["vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"]
    {
        assert_eq!(value(name), 0.0);
    }
    let options = EngineOptions::default();
    assert_eq!(value("kv_serve_rows_limit"), options.all_rows() as f64);
    assert_eq!(value("kv_serve_queue_limit"), options.queue as f64);
    // The arena stays for the next request.
    assert_eq!((value("kv_serve_kv_bytes"), value("kv_serve_kv_live_bytes")), (0.0, 0.0));
    assert!(value("kv_serve_kv_allocated_bytes") > 0.0);
    for name in ["replayed_steps", "launched_steps", "recordings", "jobs_refused", "jobs_cancelled"]
    {
        value(&format!("kv_serve_{name}_total"));
    }
    let answers = r#"kv_serve_http_responses_total{route="/v1/chat/completions",status="400"} 1"#;
    assert!(metrics.contains(answers) && metrics.ends_with("# EOF\n"), "{metrics}");
}

#[tokio::test]
async fn the_document_is_valid_and_lists_all_routes() {
    let server = server();
    let (_, text) = text(&server, request(Method::GET, "/openapi.json", None)).await;
    let document = oas3::from_json(&text).unwrap();
    let paths = document.paths.unwrap();
    for path in [
        "/v1/models",
        "/v1/models/{id}",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/kv/contexts",
        "/v1/kv/contexts/{name}",
        "/v1/kv/contexts/{name}/save",
        "/v1/kv/requests",
        "/v1/kv/requests/{job}",
        "/v1/kv/policies",
        "/health",
        "/ready",
        "/metrics",
    ] {
        assert!(paths.contains_key(path), "{path}");
    }
    let (_, document) = json_of(&server, request(Method::GET, "/openapi.json", None)).await;
    assert!(document["components"]["securitySchemes"]["key"].is_object());
    // Each reference leads somewhere.
    let mut values = vec![&document];
    while let Some(value) = values.pop() {
        if let Some(path) = value["$ref"].as_str() {
            assert!(document.pointer(&path[1..]).is_some(), "{path}");
        }
        values.extend(value.as_array().into_iter().flatten());
        values.extend(value.as_object().into_iter().flat_map(|object| object.values()));
    }
}
