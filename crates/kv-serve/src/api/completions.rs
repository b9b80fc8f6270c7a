//! `/v1/completions`.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};

use super::blocking;
use crate::app::{App, now};
use crate::error::{ErrorBody, Result};
use crate::generation::{Event, Generation};
use crate::protocol::answer::{
    Completion, CompletionChoice, CompletionLogprobs, Usage, finish_reason,
};
use crate::protocol::completion::{CompletionRequest, prepare};
use crate::protocol::fields::Object;
use crate::protocol::logprobs;
use crate::sse::{self, Chunks};

/// Goes on with a text.
#[utoipa::path(
    post,
    path = "/v1/completions",
    tag = "OpenAI",
    request_body = CompletionRequest,
    responses(
        (status = 200, body = Completion, description =
            "The answer; with `stream`, events of the same form and `[DONE]`"),
        (status = "4XX", body = ErrorBody, description = "What is wrong with the request"),
        (status = "5XX", body = ErrorBody, description = "The server cannot answer"),
    )
)]
pub(crate) async fn create(
    State(app): State<Arc<App>>,
    Object(object): Object,
) -> Result<Response> {
    let own = Arc::clone(&app);
    let prepared = blocking(move || prepare(&own, object)).await?;
    let id = format!("cmpl-{:016x}", rand::random::<u64>());
    let jobs = prepared.jobs;
    let generation = Generation::submit(&app, id, jobs.jobs, jobs.choices)?;
    let answer = Answer::new(&generation, prepared.echo);
    if jobs.stream {
        return sse::answer(generation, answer, jobs.include_usage).await;
    }
    whole(generation, answer).await
}

/// The answer in one piece.
async fn whole(mut generation: Generation, mut answer: Answer) -> Result<Response> {
    let mut choices: Vec<CompletionChoice> = (0..generation.count()).map(empty).collect();
    while let Some((choice, event)) = generation.next().await? {
        let pieces = answer.chunks(choice, event).into_iter().flat_map(|chunk| chunk.choices);
        for piece in pieces {
            let own = &mut choices[choice];
            own.text += &piece.text;
            if let Some(more) = piece.logprobs {
                let lists = own.logprobs.get_or_insert_default();
                lists.tokens.extend(more.tokens);
                lists.token_logprobs.extend(more.token_logprobs);
                lists.top_logprobs.extend(more.top_logprobs);
                lists.text_offset.extend(more.text_offset);
            }
            own.finish_reason = piece.finish_reason.or(own.finish_reason);
        }
    }
    let usage = Some(generation.usage());
    let body = answer.completion(choices, usage);
    Ok(([(sse::JOBS, generation.job_numbers())], Json(body)).into_response())
}

fn empty(index: usize) -> CompletionChoice {
    CompletionChoice { index, text: String::new(), logprobs: None, finish_reason: None }
}

/// What a completion's events show.
struct Answer {
    app: Arc<App>,
    id: String,
    created: u64,
    model: String,
    /// What each choice's text begins with.
    echo: Vec<String>,
    /// Where each choice's next token begins, in characters.
    offsets: Vec<usize>,
}

impl Answer {
    fn new(generation: &Generation, echo: Option<Vec<String>>) -> Self {
        let (count, choices) = (generation.count(), generation.choices());
        let echo = echo.unwrap_or_default();
        let begin = |choice: usize| echo.get(choice / choices).cloned().unwrap_or_default();
        Self {
            app: Arc::clone(&generation.app),
            id: generation.id.clone(),
            created: now(),
            model: generation.app.name.clone(),
            echo: (0..count).map(begin).collect(),
            offsets: vec![0; count],
        }
    }

    fn completion(&self, choices: Vec<CompletionChoice>, usage: Option<Usage>) -> Completion {
        Completion {
            id: self.id.clone(),
            object: "text_completion",
            created: self.created,
            model: self.model.clone(),
            choices,
            usage,
        }
    }
}

impl Chunks for Answer {
    type Chunk = Completion;

    fn chunks(&mut self, choice: usize, event: Event) -> Vec<Completion> {
        let mut own = empty(choice);
        match event {
            Event::Started => own.text = std::mem::take(&mut self.echo[choice]),
            Event::Token { token, text, logprobs } => {
                own.text = text;
                own.logprobs = token.zip(logprobs).map(|(token, logprobs)| {
                    let mut lists = CompletionLogprobs::default();
                    let offset = &mut self.offsets[choice];
                    logprobs::add_to_completion(&self.app, &mut lists, offset, token, &logprobs);
                    lists
                });
            }
            Event::Ended(finish) => own.finish_reason = Some(finish_reason(finish)),
        }
        if own.text.is_empty() && own.logprobs.is_none() && own.finish_reason.is_none() {
            return Vec::new();
        }
        vec![self.completion(vec![own], None)]
    }

    fn usage(&self, usage: Usage) -> Completion {
        self.completion(Vec::new(), Some(usage))
    }
}
