//! Answers of an engine without a runtime around it.

use std::time::{Duration, Instant};

use dynamo_backend_common::testing::mock_context;
use dynamo_backend_common::{BackendError, DynamoError, ErrorType, LLMEngine};
use futures_util::StreamExt;
use kv_models::Model;
use serde_json::{Value, json};

use crate::support::{Whole, answer, ask, ask_within, read, started};

const INVALID: ErrorType = ErrorType::Backend(BackendError::InvalidArgument);
const SHUT_DOWN: ErrorType = ErrorType::Backend(BackendError::EngineShutdown);

fn kv(policy: &Value) -> Value {
    json!({"annotations": [format!("kv:{policy}")]})
}

fn kept(whole: &Whole) -> f64 {
    whole.last.engine_data.as_ref().unwrap()["kv_tokens_kept"].as_f64().unwrap()
}

#[tokio::test]
async fn requests_choose_their_policy() {
    let engine = started("--policy snapkv --budget 0.25 --least-budget 16").await;
    let own = answer(&engine, json!({})).await;
    let full = answer(&engine, kv(&json!({"policy": "full"}))).await;
    let again = answer(&engine, kv(&json!({"policy": "full"}))).await;
    let few = answer(&engine, kv(&json!({"budget": 8, "window": 4}))).await;
    assert_eq!((own.tokens.len(), full.tokens.len()), (12, 12));
    assert_eq!(full.tokens, again.tokens);
    assert!(kept(&few) < kept(&own) && kept(&own) < kept(&full), "{} {}", kept(&few), kept(&own));
    let usage = full.last.completion_usage.unwrap();
    assert_eq!((usage.prompt_tokens, usage.completion_tokens, usage.total_tokens), (64, 12, 76));
    assert_eq!((own.finish.as_str(), full.finish.as_str()), ("length", "length"));
}

#[tokio::test]
async fn stops_end_answers() {
    let engine = started("--policy full").await;
    let whole = answer(&engine, json!({})).await.tokens;
    let at = whole.iter().position(|token| *token != whole[0]).unwrap_or(1);
    for name in ["stop_token_ids", "stop_token_ids_hidden", "stop_token_ids_visible"] {
        let ended = answer(&engine, json!({"stop_conditions": {name: [whole[at]]}})).await;
        let first = whole.iter().position(|token| *token == whole[at]).unwrap();
        assert_eq!((ended.tokens.as_slice(), ended.finish.as_str()), (&whole[..=first], "stop"));
        let usage = ended.last.completion_usage.unwrap();
        assert_eq!(usage.completion_tokens as usize, ended.tokens.len(), "{name}");
    }
    let device = kv_core::select_device("cpu".parse().unwrap()).unwrap();
    let model = Model::load("needle-1m", &device, None).unwrap();
    let text = model.tokenizer().unwrap().decode(&whole[..4], false).unwrap();
    let stop: String = text.chars().rev().take(2).collect::<Vec<_>>().into_iter().rev().collect();
    let ended = answer(&engine, json!({"stop_conditions": {"stop": [stop]}})).await;
    assert_eq!(ended.finish, "stop");
    // Every token of the stop string is told: the front end cuts it off.
    assert!(ended.tokens.len() <= 4 && whole.starts_with(&ended.tokens), "{:?}", ended.tokens);
    let told = model.tokenizer().unwrap().decode(&ended.tokens, false).unwrap();
    assert!(told.contains(&stop), "{told:?} {stop:?}");
}

#[tokio::test]
async fn log_probabilities_come_with_tokens() {
    let engine = started("--policy full").await;
    let whole = answer(&engine, json!({"output_options": {"logprobs": 3}})).await;
    let plain = answer(&engine, json!({})).await;
    assert_eq!(whole.tokens, plain.tokens);
    let told = whole.chunks.iter().filter(|chunk| !chunk.token_ids.is_empty());
    for chunk in told {
        let (own, top) = (chunk.log_probs.as_ref().unwrap(), chunk.top_logprobs.as_ref().unwrap());
        assert_eq!((own.len(), top.len(), top[0].len()), (1, 1, 3));
        // The likeliest token is drawn.
        assert_eq!((top[0][0].token_id, top[0][0].rank), (chunk.token_ids[0], 1));
        assert!((top[0][0].logprob - own[0]).abs() < 1e-6);
    }
    assert!(plain.chunks.iter().all(|chunk| chunk.log_probs.is_none()));
}

#[tokio::test]
async fn texts_follow_what_they_must() {
    let engine = started("--policy full").await;
    let fields = json!({
        "sampling_options": {"guided_decoding": {"choice": ["yes", "no"]}},
        "stop_conditions": {"ignore_eos": false, "max_tokens": 8},
    });
    let whole = answer(&engine, fields).await;
    let device = kv_core::select_device("cpu".parse().unwrap()).unwrap();
    let model = Model::load("needle-1m", &device, None).unwrap();
    let text = model.tokenizer().unwrap().decode(&whole.tokens, true).unwrap();
    assert!(["yes", "no"].contains(&text.as_str()), "{text}");
    assert_eq!(whole.finish, "stop");
}

/// The error of a request that is refused before its answer begins.
async fn refused(engine: &impl LLMEngine, fields: Value) -> DynamoError {
    let context = dynamo_backend_common::GenerateContext::new(mock_context(), None);
    match engine.generate(crate::support::request(fields), context).await {
        Ok(_) => panic!("an answer"),
        Err(error) => error,
    }
}

#[tokio::test]
async fn what_is_wrong_is_named() {
    let engine = started("--allow-policy full").await;
    for (fields, part) in [
        (json!({"sampling_options": {"n": 2}}), "`n`"),
        (json!({"sampling_options": {"top_p": 1.5}}), "top_p"),
        (json!({"sampling_options": {"guided_decoding": {"regex": "("}}}), "regex"),
        (json!({"token_ids": vec![1; 2048]}), "2048"),
        (json!({"token_ids": []}), "prompt"),
        (json!({"token_ids": [5000]}), "5000"),
        (json!({"output_options": {"logprobs": 21}}), "logprobs"),
        (kv(&json!({"policy": "h2o"})), "h2o"),
        (kv(&json!({"policy": "full", "budgt": 3})), "kv.budgt"),
    ] {
        let error = refused(&engine, fields.clone()).await;
        assert_eq!(error.error_type(), INVALID, "{fields}: {error}");
        assert!(error.public_message().unwrap().contains(part), "{fields}: {error}");
    }
    let small = started("--policy full --cache-bytes 64KiB --groups 1").await;
    let error = read(ask(&small, json!({})).await.unwrap()).await.err().unwrap();
    assert_eq!(error.error_type(), INVALID, "{error}");
}

#[tokio::test]
async fn a_full_queue_is_another_workers_chance() {
    let engine = started("--rows 1 --queue 1").await;
    let long = json!({"stop_conditions": {"max_tokens": 1500}});
    let mut running = ask(&engine, long.clone()).await.unwrap();
    assert!(running.next().await.unwrap().is_ok());
    let waiting = ask(&engine, long.clone()).await.unwrap();
    let error = refused(&engine, long).await;
    assert_eq!(error.error_type(), ErrorType::WorkerOverloaded, "{error}");
    drop((running, waiting));
}

#[tokio::test]
async fn nobody_computes_what_nobody_reads() {
    let engine = started("--rows 1").await;
    let long = json!({"stop_conditions": {"max_tokens": 1900}});
    for how in ["dropped", "stopped", "killed"] {
        let context = mock_context();
        let mut chunks = ask_within(&engine, long.clone(), context.clone()).await.unwrap();
        assert!(chunks.next().await.unwrap().is_ok());
        match how {
            "dropped" => drop(chunks),
            how => {
                if how == "stopped" {
                    context.stop_generating()
                } else {
                    context.kill()
                }
                let rest = read(chunks).await.unwrap();
                assert_eq!(rest.finish, "cancelled");
            }
        }
        let begun = Instant::now();
        // There is one row.
        assert_eq!(answer(&engine, json!({})).await.tokens.len(), 12);
        assert!(begun.elapsed() < Duration::from_secs(5), "{how}: {:?}", begun.elapsed());
    }
}

#[tokio::test]
async fn answers_end_at_the_deadline() {
    let engine = started("--request-timeout 100ms").await;
    let chunks = ask(&engine, json!({"stop_conditions": {"max_tokens": 1900}})).await.unwrap();
    let error = read(chunks).await.err().unwrap();
    assert_eq!(error.error_type(), ErrorType::DeadlineExceeded, "{error}");
}

#[tokio::test]
async fn a_worker_that_ends_lets_answers_end() {
    let engine = started("--drain-timeout 20s").await;
    let chunks = ask(&engine, json!({"stop_conditions": {"max_tokens": 100}})).await.unwrap();
    let (ended, whole) = tokio::join!(engine.cleanup(), read(chunks));
    ended.unwrap();
    let whole = whole.unwrap();
    assert_eq!((whole.tokens.len(), whole.finish.as_str()), (100, "length"));
    assert_eq!(refused(&engine, json!({})).await.error_type(), SHUT_DOWN);

    let engine = started("--drain-timeout 50ms").await;
    let chunks = ask(&engine, json!({"stop_conditions": {"max_tokens": 1900}})).await.unwrap();
    let (ended, whole) = tokio::join!(engine.cleanup(), read(chunks));
    ended.unwrap();
    // The front end asks another worker for the rest.
    assert_eq!(whole.err().unwrap().error_type(), SHUT_DOWN);
}
