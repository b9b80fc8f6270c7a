//! `/v1/completions`.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use serde_json::{Map, Value};

use super::generate::{self, Answers, Head};
use crate::app::App;
use crate::error::{ErrorBody, Result};
use crate::generation::{Event, Generation};
use crate::protocol::answer::{
    Completion, CompletionChoice, CompletionLogprobs, Usage, finish_reason,
};
use crate::protocol::common::Prepared;
use crate::protocol::completion::{CompletionRequest, prepare};
use crate::protocol::fields::Object;
use crate::protocol::logprobs;
use crate::sse::Chunks;

/// Goes on with a text.
#[utoipa::path(
    post,
    path = "/v1/completions",
    tag = "OpenAI",
    request_body = CompletionRequest,
    responses(
        (status = 200, content(
            (Completion = "application/json"),
            (Completion = "text/event-stream"),
        ), description = "The answer; with `stream`, events of the same form and `[DONE]`"),
        (status = "4XX", body = ErrorBody, description = "What is wrong with the request"),
        (status = "5XX", body = ErrorBody, description = "The server cannot answer"),
    )
)]
pub(crate) async fn create(State(app): State<Arc<App>>, object: Object) -> Result<Response> {
    generate::answer::<Answer>(app, object).await
}

/// What a completion's events show.
struct Answer {
    head: Head,
    /// What each choice's text begins with.
    echo: Vec<String>,
    /// Where each choice's next token begins, in characters.
    offsets: Vec<usize>,
}

impl Answers for Answer {
    const PREFIX: &'static str = "cmpl";
    type More = Option<Vec<String>>;
    type Choice = CompletionChoice;
    type Body = Completion;

    fn prepare(app: &App, object: Map<String, Value>) -> Result<(Prepared, Self::More)> {
        prepare(app, object)
    }

    fn begin(head: Head, generation: &Generation, echo: Self::More) -> Self {
        let (count, choices) = (generation.count(), generation.choices());
        let echo = echo.unwrap_or_default();
        let begin = |choice: usize| echo.get(choice / choices).cloned().unwrap_or_default();
        Self { head, echo: (0..count).map(begin).collect(), offsets: vec![0; count] }
    }

    fn empty(index: usize) -> CompletionChoice {
        CompletionChoice { index, text: String::new(), logprobs: None, finish_reason: None }
    }

    fn add(choices: &mut [CompletionChoice], chunk: Completion) {
        for piece in chunk.choices {
            let own = &mut choices[piece.index];
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

    fn whole(self, choices: Vec<CompletionChoice>, usage: Usage) -> Completion {
        self.completion(choices, Some(usage))
    }
}

impl Answer {
    fn completion(&self, choices: Vec<CompletionChoice>, usage: Option<Usage>) -> Completion {
        Completion {
            id: self.head.id.clone(),
            object: "text_completion",
            created: self.head.created,
            model: self.head.model.clone(),
            choices,
            usage,
        }
    }
}

impl Chunks for Answer {
    type Chunk = Completion;

    fn chunks(&mut self, choice: usize, event: Event) -> Vec<Completion> {
        let mut own = Self::empty(choice);
        match event {
            Event::Started => own.text = std::mem::take(&mut self.echo[choice]),
            Event::Token { token, text, logprobs } => {
                own.text = text;
                own.logprobs = token.zip(logprobs).map(|(token, logprobs)| {
                    let mut lists = CompletionLogprobs::default();
                    let offset = &mut self.offsets[choice];
                    logprobs::add_to_completion(
                        &self.head.app,
                        &mut lists,
                        offset,
                        token,
                        &logprobs,
                    );
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
