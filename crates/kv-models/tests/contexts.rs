//! Contexts of an engine: documents that are compressed once, and asked about by many jobs.

use std::time::Duration;

use kv_models::{Engine, EngineOptions, JobError, Request, Update};
use kv_policies::build;
use serde_json::{Value, json};

use super::engine::{cpu, engine, job, run_job, small, submit};
use super::support::{embedded_in_f32, prompts, run_requests};

/// A context is compressed once; jobs on it append their questions, as `Request::question` does.
#[test]
fn contexts_are_compressed_once_and_survive_the_engine() {
    let tested = cpu();
    let folder = tempfile::tempdir().unwrap();
    let options = EngineOptions { contexts: Some(folder.path().into()), ..small() };
    let model = embedded_in_f32(&tested);
    let text = prompts(&model).concat();
    let (document, question) = (text[..150].to_vec(), text[150..165].to_vec());
    let policy = json!({"policy": "snapkv", "budget": 0.4});
    let expected = {
        let request = Request {
            question: question.clone(),
            stop_at_end: false,
            ..Request::greedy(document.clone(), 10)
        };
        run_requests(&model, &policy, &[request])[0].tokens.clone()
    };
    let ask = |engine: &Engine| {
        let mut job = job(&policy, &question, 10);
        job.context = Some("book".into());
        run_job(engine, job)
    };
    {
        let engine = engine(&tested.device, options.clone());
        let info = engine.compress("book", document.clone(), build(&policy).unwrap()).unwrap();
        assert_eq!((info.tokens, info.held.tokens), (150, 60.0));
        let told = ask(&engine);
        assert_eq!(told.tokens, expected);
        let started = told.started.unwrap();
        assert_eq!((started.prompt_tokens, started.cached_tokens), (165, 150));
        let again = engine.compress("book", document.clone(), build(&policy).unwrap());
        assert!(matches!(again, Err(JobError::ContextExists { .. })));
        let other = engine.compress("../book", document.clone(), build(&policy).unwrap());
        assert!(matches!(other, Err(JobError::ContextName { .. })));
        let h2o = build(&json!({"policy": "h2o", "budget": 0.4})).unwrap();
        let changing = engine.compress("other", document.clone(), h2o);
        assert!(matches!(changing, Err(JobError::ContextPolicy { .. })));
        engine.save("book").unwrap();
    }
    let engine = engine(&tested.device, options);
    assert!(engine.contexts().unwrap()[0].is_saved);
    assert_eq!(ask(&engine).tokens, expected);
    engine.forget("book").unwrap();
    assert!(engine.contexts().unwrap().is_empty());
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    let error = ask(&engine).failed.unwrap();
    assert!(matches!(error, JobError::UnknownContext { .. }), "{error}");
}

/// A saved context whose bytes have changed is not loaded, and its files stay.
#[test]
fn damaged_contexts_are_not_loaded() {
    let folder = tempfile::tempdir().unwrap();
    let options = EngineOptions { contexts: Some(folder.path().into()), ..small() };
    let document: Vec<u32> = (0..150).map(|at| 3 + at % 900).collect();
    let policy = || build(&json!({"policy": "snapkv", "budget": 0.4})).unwrap();
    let start = || engine(&cpu().device, options.clone());
    let first = start();
    first.compress("book", document.clone(), policy()).unwrap();
    first.save("book").unwrap();
    drop(first);
    assert_eq!(start().contexts().unwrap().len(), 1);
    let path = folder.path().join("book.cache");
    let mut bytes = std::fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&path, &bytes).unwrap();
    let again = start();
    assert!(again.contexts().unwrap().is_empty());
    again.compress("book", document, policy()).unwrap();
    let error = again.save("book").unwrap_err();
    assert!(matches!(error, JobError::ForeignFile { .. }), "{error}");
    assert_eq!(std::fs::read(&path).unwrap(), bytes);
}

/// A context of which no group has room for a copy is refused, before it is computed where its
/// budget shows it.
#[test]
fn contexts_that_no_group_has_room_for_are_refused() {
    let engine = engine(&cpu().device, EngineOptions { bytes: 200_000, groups: 1, ..small() });
    let document: Vec<u32> = (0..400).map(|at| 3 + at % 900).collect();
    let compress = |policy: Value| {
        engine.compress("book", document.clone(), build(&policy).unwrap()).map(|info| info.tokens)
    };
    for policy in [json!({"policy": "full"}), json!({"policy": "snapkv", "budget": 0.5})] {
        let error = compress(policy).unwrap_err();
        let JobError::ContextTooLarge { needed, limit, .. } = error else { panic!("{error}") };
        assert!(needed > limit && limit == 200_000, "{needed} {limit}");
    }
    assert_eq!(compress(json!({"policy": "snapkv", "budget": 40})).unwrap(), 400);
    let ask = |new_tokens| {
        let mut job = job(&json!({"policy": "full"}), &document[..4], new_tokens);
        job.context = Some("book".into());
        run_job(&engine, job)
    };
    assert_eq!(ask(10).tokens.len(), 10);
    let error = ask(200).failed.unwrap();
    assert!(matches!(&error, JobError::ContextTooLarge { fits, .. } if fits.contains("at most")));
    assert!(error.to_string().contains("context `book`"), "{error}");
}

#[test]
fn a_context_that_takes_too_long_is_given_up() {
    let engine = engine(&cpu().device, small());
    let policy = || build(&json!({"policy": "full"})).unwrap();
    let document: Vec<u32> = (0..1_900).map(|at| 3 + at % 900).collect();
    // Beside a job that decodes, a document takes several turns.
    let beside = job(&json!({"policy": "full"}), &document[..20], 1_500);
    let (decoding, updates) = submit(&engine, beside).unwrap();
    assert!(matches!(updates.recv().unwrap(), Update::Started(_)));
    let late = engine.compress_within("late", document.clone(), policy(), Duration::ZERO);
    assert!(matches!(late, Err(JobError::TooSlow { .. })), "{late:?}");
    // The name is free again, and the abandoned compression never appears among the contexts.
    let info = engine.compress("late", document, policy()).unwrap();
    assert_eq!(info.tokens, 1_900);
    assert_eq!(engine.contexts().unwrap().len(), 1);
    engine.cancel(decoding);
}
