//! Dynamo's conformance kit.

use dynamo_backend_common::LLMEngine;
use dynamo_backend_common::testing::run_conformance;

use crate::support::engine;

#[tokio::test]
async fn the_engine_conforms() {
    for policy in ["snapkv", "full", "h2o"] {
        let options = format!("--policy {policy} --budget 0.5");
        run_conformance(|| engine(&options)).await.unwrap_or_else(|error| {
            panic!("{policy}: {error}");
        });
    }
}

#[tokio::test]
async fn what_is_registered_is_the_engines() {
    let engine = engine("--name own --rows 3 --cache-bytes 1MiB");
    let config = engine.start(1).await.unwrap();
    let llm = config.llm.unwrap();
    assert_eq!(config.model, "own");
    assert_eq!((llm.context_length, llm.max_num_seqs), (Some(2048), Some(3)));
    // Keys and values of 4 layers, 2 heads and 32 elements in f32 are 2 KiB a token.
    assert_eq!((llm.kv_cache_block_size, llm.total_kv_blocks), (None, Some(512 / 16)));
    assert!(engine.kv_event_sources().await.unwrap().is_empty());
    let probe = engine.health_check_payload().await.unwrap().unwrap();
    assert_eq!(probe["stop_conditions"]["max_tokens"], 1);
    engine.cleanup().await.unwrap();
    assert!(engine.health_check_payload().await.is_err());
}
