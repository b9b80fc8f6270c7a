//! Batched generation: sampling, stop strings, streaming, cancellation.

use std::ops::ControlFlow;
use std::sync::Arc;

use kv_policies::Policy;

use crate::{Model, Result, Sampling, Session, TextStream};

/// One prompt of a batch.
#[derive(Debug, Clone)]
pub struct Request {
    /// The prompt's tokens.
    pub tokens: Vec<u32>,
    /// At most this many new tokens.
    pub new_tokens: usize,
    /// How to choose them; its seed also serves policies that draw.
    pub sampling: Sampling,
    /// Texts at which to stop; they are not part of the output.
    pub stop: Vec<String>,
    /// Whether the model's end-of-sequence tokens stop.
    pub stop_at_end: bool,
}

impl Request {
    /// Greedy, without stop strings.
    pub fn greedy(tokens: Vec<u32>, new_tokens: usize) -> Self {
        let sampling = Sampling::greedy();
        Self { tokens, new_tokens, sampling, stop: Vec::new(), stop_at_end: true }
    }
}

/// Why a sequence ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// The requested number of tokens, or the model's last position.
    Length,
    /// An end-of-sequence token.
    End,
    /// A stop string.
    Stop,
    /// The caller cancelled.
    Cancelled,
}

/// A token as it is generated.
#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    /// Which request.
    pub request: usize,
    /// The token.
    pub token: u32,
    /// Text that became complete with it (never half a character); `None` without a tokenizer.
    pub text: Option<String>,
}

/// One request's result.
#[derive(Debug, Clone, PartialEq)]
pub struct Generated {
    /// New tokens, without the end-of-sequence token.
    pub tokens: Vec<u32>,
    /// Their text, cut at the stop string; `None` without a tokenizer.
    pub text: Option<String>,
    /// Why it ended.
    pub finish: Finish,
}

struct Running {
    stream: Option<TextStream>,
    result: Generated,
    done: bool,
}

/// Generates for a batch of requests under one policy. `on_token` sees every token and may break
/// off, which ends all sequences with [`Finish::Cancelled`].
///
/// Each request gets the tokens that it would get alone.
///
/// # Errors
/// [`crate::ModelError`]; no token of a failed step is emitted.
pub fn generate(
    model: &Model,
    policy: Arc<dyn Policy>,
    requests: &[Request],
    mut on_token: impl FnMut(&Event) -> ControlFlow<()>,
) -> Result<Vec<Generated>> {
    let prompts: Vec<Vec<u32>> = requests.iter().map(|request| request.tokens.clone()).collect();
    let seeds: Vec<u64> = requests.iter().map(|request| request.sampling.seed).collect();
    let most = requests.iter().map(|request| request.new_tokens).max().unwrap_or_default();
    let mut running = requests
        .iter()
        .map(|request| {
            let text = model.tokenizer().map(|_| String::new());
            let result = Generated { tokens: Vec::new(), text, finish: Finish::Length };
            let stream = model.tokenizer().map(|tokenizer| tokenizer.stream(true));
            Ok(Running { stream, result, done: request.new_tokens == 0 })
        })
        .collect::<Result<Vec<_>>>()?;
    let samplings: Vec<Sampling> = requests.iter().map(|request| request.sampling).collect();
    samplings.iter().try_for_each(Sampling::validate)?;
    let mut decoder =
        Session::start(model, policy, &prompts, &seeds, most)?.decoder(&samplings)?.ahead();
    while running.iter().any(|sequence| !sequence.done) {
        let tokens = decoder.next_tokens()?;
        for (index, (sequence, token)) in running.iter_mut().zip(tokens).enumerate() {
            if sequence.done {
                // Its row goes on with any token; nothing of it is seen.
                continue;
            }
            let event = sequence.take(model, &requests[index], index, token)?;
            if let Some(event) = event
                && on_token(&event).is_break()
            {
                let open = running.iter_mut().filter(|sequence| !sequence.done);
                open.for_each(|sequence| sequence.result.finish = Finish::Cancelled);
                return finish(running);
            }
        }
        for (row, sequence) in running.iter_mut().enumerate() {
            // A step that ran ahead has drawn another token already.
            sequence.done |= !decoder.session().has_position(row) && !decoder.is_ahead();
            if sequence.done {
                decoder.end(row)?;
            }
        }
    }
    finish(running)
}

fn finish(running: Vec<Running>) -> Result<Vec<Generated>> {
    running
        .into_iter()
        .map(|mut sequence| {
            if sequence.result.finish != Finish::Stop
                && let (Some(stream), Some(text)) =
                    (&mut sequence.stream, &mut sequence.result.text)
            {
                text.push_str(&stream.finish()?.unwrap_or_default());
            }
            Ok(sequence.result)
        })
        .collect()
}

impl Running {
    /// Records a token; `None` if it ended the sequence without being part of it.
    fn take(
        &mut self,
        model: &Model,
        request: &Request,
        index: usize,
        token: u32,
    ) -> Result<Option<Event>> {
        if request.stop_at_end && model.config().eos_token_ids.contains(&token) {
            self.result.finish = Finish::End;
            self.done = true;
            return Ok(None);
        }
        self.result.tokens.push(token);
        self.done = self.result.tokens.len() == request.new_tokens;
        let mut text = None;
        if let (Some(stream), Some(whole)) = (&mut self.stream, &mut self.result.text) {
            let piece = stream.push(token)?.unwrap_or_default();
            whole.push_str(&piece);
            let stop = request.stop.iter().filter(|stop| !stop.is_empty());
            if let Some(at) = stop.filter_map(|stop| whole.find(stop.as_str())).min() {
                let before = whole.len() - piece.len();
                text = Some(whole[before.min(at)..at].to_string());
                whole.truncate(at);
                self.result.finish = Finish::Stop;
                self.done = true;
            } else {
                text = Some(piece);
            }
        }
        Ok(Some(Event { request: index, token, text }))
    }
}
