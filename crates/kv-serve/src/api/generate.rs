//! What answers of chats and of completions have in common.

use std::sync::Arc;
use std::time::Instant;

use axum::Json;
use axum::response::{AppendHeaders, IntoResponse, Response};
use serde::Serialize;
use serde_json::{Map, Value};

use super::reading;
use crate::app::{App, now};
use crate::error::Result;
use crate::generation::Generation;
use crate::protocol::answer::Usage;
use crate::protocol::common::Prepared;
use crate::protocol::fields::Object;
use crate::sse::{self, Chunks};

/// What all bodies of an answer begin with.
pub(crate) struct Head {
    pub(crate) app: Arc<App>,
    pub(crate) id: String,
    /// Seconds of Unix time.
    pub(crate) created: u64,
    pub(crate) model: String,
}

/// Makes the answers of one route.
pub(crate) trait Answers: Chunks + Sized {
    /// What the names of the route's requests begin with.
    const PREFIX: &'static str;
    /// What [`Self::prepare`] knows besides jobs.
    type More: Send + 'static;
    /// A choice of a whole answer.
    type Choice;
    /// A whole answer.
    type Body: Serialize;

    /// Reads a body and makes its jobs.
    ///
    /// # Errors
    /// The field that is wrong.
    fn prepare(app: &App, object: Map<String, Value>) -> Result<(Prepared, Self::More)>;

    /// Begins with a request's answer.
    fn begin(head: Head, generation: &Generation, more: Self::More) -> Self;

    /// A choice of which nothing is known yet.
    fn empty(index: usize) -> Self::Choice;

    /// Adds what a chunk shows to the choices.
    fn add(choices: &mut [Self::Choice], chunk: Self::Chunk);

    /// The whole answer.
    fn whole(self, choices: Vec<Self::Choice>, usage: Usage) -> Self::Body;
}

/// Answers a request, whole or as a stream.
///
/// # Errors
/// What is wrong with the request, and what happens to its jobs before the answer begins.
pub(crate) async fn answer<A: Answers>(
    app: Arc<App>,
    Object { fields, room }: Object,
) -> Result<Response> {
    let begun = Instant::now();
    let own = Arc::clone(&app);
    let prepare = move || {
        let _room = room;
        A::prepare(&own, fields)
    };
    let (prepared, more) = reading(&app, begun, prepare).await?;
    let id = format!("{}-{:016x}", A::PREFIX, rand::random::<u64>());
    let (created, model) = (now(), app.name.clone());
    let head = Head { app: Arc::clone(&app), id: id.clone(), created, model };
    let Prepared { jobs, choices, stream, include_usage } = prepared;
    let generation = Generation::submit(&app, id, jobs, choices, begun)?;
    let answer = A::begin(head, &generation, more);
    if stream {
        return sse::answer(generation, answer, include_usage).await;
    }
    whole(generation, answer).await
}

/// The answer in one piece.
async fn whole<A: Answers>(mut generation: Generation, mut answer: A) -> Result<Response> {
    let mut choices: Vec<A::Choice> = (0..generation.count()).map(A::empty).collect();
    while let Some((choice, event)) = generation.next().await? {
        for chunk in answer.chunks(choice, event) {
            A::add(&mut choices, chunk);
        }
    }
    let body = answer.whole(choices, generation.usage());
    Ok((AppendHeaders(generation.headers()), Json(body)).into_response())
}
