//! Answers as server-sent events.

use std::collections::VecDeque;
use std::convert::Infallible;

use axum::response::sse::{self, KeepAlive, Sse};
use axum::response::{AppendHeaders, IntoResponse, Response};
use futures_util::stream;
use serde::Serialize;

use crate::error::{ApiError, Result};
use crate::generation::{Event, Generation};
use crate::protocol::answer::Usage;

/// Makes a stream's events.
pub(crate) trait Chunks: Send + 'static {
    /// The body of an event.
    type Chunk: Serialize;

    /// What an event of a choice shows; nothing for some.
    fn chunks(&mut self, choice: usize, event: Event) -> Vec<Self::Chunk>;

    /// The last event's body, with the usage.
    fn usage(&self, usage: Usage) -> Self::Chunk;
}

/// A stream as it goes.
struct Going<C> {
    generation: Generation,
    chunks: C,
    include_usage: bool,
    ready: VecDeque<sse::Event>,
    ended: bool,
}

/// Streams a request's events. Waits for the first one, so that an error before it has a status of
/// its own.
///
/// # Errors
/// The request's error, where it comes before any event.
pub(crate) async fn answer<C: Chunks>(
    mut generation: Generation,
    mut chunks: C,
    include_usage: bool,
) -> Result<Response> {
    let mut ready = VecDeque::new();
    if let Some((choice, event)) = generation.next().await? {
        ready.extend(chunks.chunks(choice, event).iter().map(event_of));
    }
    let headers = AppendHeaders(generation.headers());
    let going = Going { generation, chunks, include_usage, ready, ended: false };
    let events = stream::unfold(going, |mut going| async move {
        loop {
            if let Some(event) = going.ready.pop_front() {
                return Some((Ok::<_, Infallible>(event), going));
            }
            if going.ended {
                return None;
            }
            going.advance().await;
        }
    });
    Ok((headers, Sse::new(events).keep_alive(KeepAlive::default())).into_response())
}

impl<C: Chunks> Going<C> {
    /// Waits for the next event.
    async fn advance(&mut self) {
        match self.generation.next().await {
            Ok(Some((choice, event))) => {
                self.ready.extend(self.chunks.chunks(choice, event).iter().map(event_of));
            }
            Ok(None) => {
                if self.include_usage {
                    self.ready.push_back(event_of(&self.chunks.usage(self.generation.usage())));
                }
                self.end();
            }
            Err(error) => {
                self.ready.push_back(event_of(&error.body()));
                self.end();
            }
        }
    }

    fn end(&mut self) {
        self.ready.push_back(sse::Event::default().data("[DONE]"));
        self.ended = true;
    }
}

fn event_of(body: &impl Serialize) -> sse::Event {
    let event = sse::Event::default().json_data(body);
    event.unwrap_or_else(|error| {
        let error = ApiError::internal(error.to_string()).body();
        sse::Event::default().data(serde_json::to_string(&error).unwrap_or_default())
    })
}
