//! Engines, requests and answers.

use std::sync::Arc;

use clap::Parser;
use dynamo_backend_common::testing::mock_context;
use dynamo_backend_common::{
    AsyncEngineContext, DynamoError, GenerateContext, LLMEngine, LLMEngineOutput,
    PreprocessedRequest,
};
use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use kv_dynamo::{Args, KvEngine};
use kv_parallel::Ranks;
use serde_json::{Value, json};

/// Files for the front end.
pub(crate) const CARD: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/card");

/// An engine of the embedded model on the CPU, with more options, that has not started.
pub(crate) fn engine(options: &str) -> KvEngine {
    let line = ["kv-dynamo", "needle-1m", "--device", "cpu", "--card", CARD];
    let args = Args::try_parse_from(line.into_iter().chain(options.split_whitespace())).unwrap();
    KvEngine::new(args, Ranks::alone()).unwrap().0
}

/// An engine that has started.
pub(crate) async fn started(options: &str) -> KvEngine {
    let engine = engine(options);
    engine.start(1).await.unwrap();
    engine
}

/// A request as it comes from the front end, greedy, with more of its fields.
pub(crate) fn request(fields: Value) -> PreprocessedRequest {
    let mut whole = json!({
        "model": "needle-1m",
        "token_ids": PROMPT.as_slice(),
        "stop_conditions": {"max_tokens": 12, "ignore_eos": true},
        "sampling_options": {"temperature": 0.0},
    });
    for (name, value) in fields.as_object().unwrap() {
        match (whole.get_mut(name).and_then(Value::as_object_mut), value.as_object()) {
            (Some(own), Some(more)) => own.extend(more.clone()),
            _ => whole[name] = value.clone(),
        }
    }
    serde_json::from_value(whole).unwrap()
}

/// A prompt that is longer than small budgets.
pub(crate) const PROMPT: [u32; 64] = {
    let mut tokens = [0; 64];
    let mut i = 0;
    while i < tokens.len() {
        tokens[i] = 100 + (i as u32 * 37) % 800;
        i += 1;
    }
    tokens
};

pub(crate) type Chunks = BoxStream<'static, Result<LLMEngineOutput, DynamoError>>;

/// Begins with an answer.
pub(crate) async fn ask(engine: &KvEngine, fields: Value) -> Result<Chunks, DynamoError> {
    ask_within(engine, fields, mock_context()).await
}

/// Begins with an answer in a context that may be stopped.
pub(crate) async fn ask_within(
    engine: &KvEngine,
    fields: Value,
    context: Arc<dyn AsyncEngineContext>,
) -> Result<Chunks, DynamoError> {
    engine.generate(request(fields), GenerateContext::new(context, None)).await
}

/// An answer that came to its end.
pub(crate) struct Whole {
    pub(crate) tokens: Vec<u32>,
    pub(crate) chunks: Vec<LLMEngineOutput>,
    /// Why it ended.
    pub(crate) finish: String,
    pub(crate) last: LLMEngineOutput,
}

/// Reads an answer to its end.
pub(crate) async fn read(chunks: Chunks) -> Result<Whole, DynamoError> {
    let chunks: Vec<_> = chunks.collect().await;
    let chunks = chunks.into_iter().collect::<Result<Vec<_>, _>>()?;
    let last = chunks.last().unwrap().clone();
    let finish = last.finish_reason.as_ref().unwrap().to_string();
    let tokens = chunks.iter().flat_map(|chunk| chunk.token_ids.clone()).collect();
    Ok(Whole { tokens, chunks, finish, last })
}

/// A whole answer.
pub(crate) async fn answer(engine: &KvEngine, fields: Value) -> Whole {
    read(ask(engine, fields).await.unwrap()).await.unwrap()
}
