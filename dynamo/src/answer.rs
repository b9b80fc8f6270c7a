//! A job's updates as Dynamo's stream of an answer.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use dynamo_backend_common::{
    AsyncEngineContext, CompletionUsage, DynamoError, LLMEngineOutput, LLMEngineOutputExt,
    PromptTokensDetails, TopLogprob, usage,
};
use futures_util::Stream;
use kv_models::{Ended, Engine, Finish, Job, JobId, Started, TokenLogprobs, Update};
use serde_json::json;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::time::Instant;

use crate::error;

/// A job that is cancelled where nobody reads its answer any more.
#[derive(Debug)]
struct Running {
    engine: Engine,
    job: JobId,
    has_ended: bool,
}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.has_ended {
            self.engine.cancel(self.job);
        }
    }
}

/// An answer on its way.
#[derive(Debug)]
pub(crate) struct Answer {
    running: Running,
    updates: UnboundedReceiver<Update>,
    context: Arc<dyn AsyncEngineContext>,
    /// Tokens behind which the answer ends.
    ends: HashSet<u32>,
    deadline: Instant,
    patience: Duration,
    /// Tokens of the prompt, and how many of them had keys and values already.
    prompt: (usize, usize),
    /// Tokens that were told.
    tokens: usize,
}

impl Answer {
    /// Submits a job, whose answer ends behind one of the tokens `ends`, and with `patience`.
    ///
    /// # Errors
    /// What the engine refuses the job for.
    pub(crate) fn submit(
        engine: &Engine,
        job: Job,
        ends: HashSet<u32>,
        context: Arc<dyn AsyncEngineContext>,
        begun: Instant,
        patience: Duration,
    ) -> Result<Self, DynamoError> {
        let prompt = (job.request.tokens.len(), 0);
        // Not bounded: a callback must not block, and a job has few more updates than new tokens,
        // whose number is.
        let (sender, updates) = unbounded_channel();
        let last = ends.clone();
        let tell = move |update: Update| {
            // Cancelled here, the job does not go on while the answer's reader is on its way.
            let is_last = matches!(&update, Update::Token { token: Some(token), .. }
                if last.contains(token));
            sender.send(update).is_ok() && !is_last
        };
        let job = engine.submit(job, tell).map_err(error::of_job)?;
        let running = Running { engine: engine.clone(), job, has_ended: false };
        let deadline = begun + patience;
        Ok(Self { running, updates, context, ends, deadline, patience, prompt, tokens: 0 })
    }

    /// The answer's chunks. The last one, or an error, ends it.
    pub(crate) fn chunks(mut self) -> impl Stream<Item = Result<LLMEngineOutput, DynamoError>> {
        async_stream::stream! {
            loop {
                let (chunk, is_last) = self.next().await;
                if let Some(chunk) = chunk {
                    yield chunk;
                }
                if is_last {
                    return;
                }
            }
        }
    }

    /// What comes next, and whether it is the last.
    async fn next(&mut self) -> (Option<Result<LLMEngineOutput, DynamoError>>, bool) {
        let update = tokio::select! {
            biased;
            () = self.context.stopped() => {
                return (Some(Ok(self.ended(LLMEngineOutput::cancelled()))), true);
            }
            () = tokio::time::sleep_until(self.deadline) => {
                let patience = humantime::format_duration(self.patience);
                let message = format!("the request took longer than {patience}");
                return (Some(Err(error::too_slow(message))), true);
            }
            update = self.updates.recv() => update,
        };
        match update {
            Some(Update::Started(Started { prompt_tokens, cached_tokens, .. })) => {
                self.prompt = (prompt_tokens, cached_tokens);
                (None, false)
            }
            // Texts are the front end's work.
            Some(Update::Token { token: None, .. }) => (None, false),
            Some(Update::Token { token: Some(token), logprobs, .. }) => {
                self.tokens += 1;
                let chunk = chunk(token, logprobs);
                let is_last = self.ends.contains(&token);
                if !is_last {
                    return (Some(Ok(chunk)), false);
                }
                let last = LLMEngineOutput { finish_reason: stop(), ..chunk };
                (Some(Ok(self.ended(last))), true)
            }
            Some(Update::Ended(ended)) => {
                self.running.has_ended = true;
                (Some(self.finished(&ended)), true)
            }
            Some(Update::Failed(failure)) => {
                self.running.has_ended = true;
                tracing::warn!(request = self.context.id(), "failed: {failure}");
                (Some(Err(error::of_job(failure))), true)
            }
            None => (Some(Err(error::shut_down("the engine has ended"))), true),
        }
    }

    /// The last chunk of a job that has ended by itself.
    fn finished(&self, ended: &Ended) -> Result<LLMEngineOutput, DynamoError> {
        let last = match ended.finish {
            Finish::Length => LLMEngineOutput::length(),
            Finish::End | Finish::Stop => LLMEngineOutput::stop(),
            // Nobody but a worker that shuts down cancels a job whose answer is read.
            Finish::Cancelled => return Err(error::shut_down("the worker is shutting down")),
        };
        let held = &ended.held;
        let kept = json!({
            "kv_tokens_kept": held.tokens,
            "kv_bytes": held.live_bytes,
            "kv_host_bytes": held.host_bytes,
            "kv_full_bytes": held.full_bytes,
        });
        Ok(LLMEngineOutput { engine_data: Some(kept), ..self.ended(last) })
    }

    fn ended(&self, last: LLMEngineOutput) -> LLMEngineOutput {
        last.with_usage(self.usage())
    }

    fn usage(&self) -> CompletionUsage {
        let (prompt, cached) = self.prompt;
        let [prompt, cached, new] = [prompt, cached, self.tokens].map(number);
        let mut usage = usage(prompt, new);
        if cached > 0 {
            usage.prompt_tokens_details = Some(PromptTokensDetails {
                cached_tokens: Some(cached),
                ..PromptTokensDetails::default()
            });
        }
        usage
    }
}

fn stop() -> Option<dynamo_backend_common::FinishReason> {
    LLMEngineOutput::stop().finish_reason
}

fn number(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

/// A token, with its log-probabilities where there are any.
fn chunk(token: u32, logprobs: Option<TokenLogprobs>) -> LLMEngineOutput {
    let mut chunk = dynamo_backend_common::chunk::token(token);
    if let Some(TokenLogprobs { logprob, top }) = logprobs {
        chunk.log_probs = Some(vec![f64::from(logprob)]);
        let top = top.into_iter().zip(1..).map(|((token_id, logprob), rank)| TopLogprob {
            rank,
            token_id,
            // The front end fills in the texts.
            token: None,
            logprob: f64::from(logprob),
            bytes: None,
        });
        chunk.top_logprobs = Some(vec![top.collect()]);
    }
    chunk
}
