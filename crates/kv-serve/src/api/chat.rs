//! `/v1/chat/completions`.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use serde_json::{Map, Value};

use super::generate::{self, Answers, Head};
use crate::app::App;
use crate::error::{ErrorBody, Result};
use crate::generation::{Event, Generation};
use crate::protocol::answer::{
    ChatChoice, ChatChunk, ChatCompletion, ChatDelta, ChatLogprobs, Delta, Said, Usage,
    finish_reason,
};
use crate::protocol::chat::{ChatRequest, prepare};
use crate::protocol::common::Prepared;
use crate::protocol::fields::Object;
use crate::protocol::logprobs;
use crate::protocol::tools::{ToolReader, Tools};
use crate::sse::Chunks;

/// Goes on with a conversation.
#[utoipa::path(
    post,
    path = "/v1/chat/completions",
    tag = "OpenAI",
    request_body = ChatRequest,
    responses(
        (status = 200, content(
            (ChatCompletion = "application/json"),
            (ChatChunk = "text/event-stream"),
        ), description = "The answer; with `stream`, events of `ChatChunk` and `[DONE]`"),
        (status = "4XX", body = ErrorBody, description = "What is wrong with the request"),
        (status = "5XX", body = ErrorBody, description = "The server cannot answer"),
    )
)]
pub(crate) async fn create(State(app): State<Arc<App>>, object: Object) -> Result<Response> {
    generate::answer::<Answer>(app, object).await
}

/// What a chat's events show.
struct Answer {
    head: Head,
    /// What reads each choice's calls of tools.
    readers: Vec<Option<ToolReader>>,
}

impl Answers for Answer {
    const PREFIX: &'static str = "chatcmpl";
    type More = Option<Tools>;
    type Choice = ChatChoice;
    type Body = ChatCompletion;

    fn prepare(app: &App, object: Map<String, Value>) -> Result<(Prepared, Self::More)> {
        prepare(app, object)
    }

    fn begin(head: Head, generation: &Generation, tools: Self::More) -> Self {
        let reader = tools.as_ref().map(Tools::reader);
        Self { head, readers: vec![reader; generation.count()] }
    }

    fn empty(index: usize) -> ChatChoice {
        let message = Said { role: "assistant", content: None, tool_calls: Vec::new() };
        ChatChoice { index, message, logprobs: None, finish_reason: "stop" }
    }

    fn add(choices: &mut [ChatChoice], chunk: ChatChunk) {
        for delta in chunk.choices {
            let own = &mut choices[delta.index];
            if let Some(text) = delta.delta.content {
                own.message.content.get_or_insert_default().push_str(&text);
            }
            own.message.tool_calls.extend(delta.delta.tool_calls);
            if let Some(more) = delta.logprobs {
                own.logprobs.get_or_insert_default().content.extend(more.content);
            }
            own.finish_reason = delta.finish_reason.unwrap_or(own.finish_reason);
        }
    }

    fn whole(self, mut choices: Vec<ChatChoice>, usage: Usage) -> ChatCompletion {
        for own in &mut choices {
            let message = &mut own.message;
            let is_silent = message.content.as_deref().is_none_or(str::is_empty);
            message.content = match (is_silent, message.tool_calls.is_empty()) {
                (true, false) => None,
                _ => Some(message.content.take().unwrap_or_default()),
            };
            // A call's index is of streams alone.
            message.tool_calls.iter_mut().for_each(|call| call.index = None);
        }
        let Head { id, created, model, .. } = self.head;
        ChatCompletion { id, object: "chat.completion", created, model, choices, usage }
    }
}

impl Answer {
    fn chunk(&self, choices: Vec<ChatDelta>, usage: Option<Usage>) -> ChatChunk {
        ChatChunk {
            id: self.head.id.clone(),
            object: "chat.completion.chunk",
            created: self.head.created,
            model: self.head.model.clone(),
            choices,
            usage,
        }
    }

    fn delta(&self, index: usize, delta: Delta, logprobs: Option<ChatLogprobs>) -> ChatChunk {
        self.chunk(vec![ChatDelta { index, delta, logprobs, finish_reason: None }], None)
    }

    /// The end of a choice: what was held back, calls of tools, and the reason.
    fn end(&mut self, index: usize, mut reason: &'static str) -> Vec<ChatChunk> {
        let mut chunks = Vec::new();
        if let Some(reader) = self.readers[index].take() {
            let (rest, mut tool_calls) = reader.finish();
            if !rest.is_empty() {
                let delta = Delta { content: Some(rest), ..Delta::default() };
                chunks.push(self.delta(index, delta, None));
            }
            if !tool_calls.is_empty() {
                reason = "tool_calls";
                for (place, call) in tool_calls.iter_mut().enumerate() {
                    call.index = Some(place);
                }
                let delta = Delta { tool_calls, ..Delta::default() };
                chunks.push(self.delta(index, delta, None));
            }
        }
        let (delta, finish_reason) = (Delta::default(), Some(reason));
        chunks.push(
            self.chunk(vec![ChatDelta { index, delta, logprobs: None, finish_reason }], None),
        );
        chunks
    }
}

impl Chunks for Answer {
    type Chunk = ChatChunk;

    fn chunks(&mut self, choice: usize, event: Event) -> Vec<ChatChunk> {
        match event {
            Event::Started => {
                let (role, content) = (Some("assistant"), Some(String::new()));
                vec![self.delta(choice, Delta { role, content, ..Delta::default() }, None)]
            }
            Event::Token { token, text, logprobs } => {
                let reader = self.readers[choice].as_mut();
                let text = reader.map_or(text.clone(), |reader| reader.push(&text));
                let logprobs = token.zip(logprobs).map(|(token, own)| ChatLogprobs {
                    content: vec![logprobs::of_chat(&self.head.app, token, &own)],
                });
                if text.is_empty() && logprobs.is_none() {
                    return Vec::new();
                }
                let delta = Delta { content: Some(text), ..Delta::default() };
                vec![self.delta(choice, delta, logprobs)]
            }
            Event::Ended(finish) => self.end(choice, finish_reason(finish)),
        }
    }

    fn usage(&self, usage: Usage) -> ChatChunk {
        self.chunk(Vec::new(), Some(usage))
    }
}
