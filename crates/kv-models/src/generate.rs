//! Batched generation: sampling, stop strings, streaming, cancellation.

use std::ops::ControlFlow;
use std::sync::Arc;

use kv_core::MemoryReport;
use kv_policies::Policy;

use crate::{Decoder, Model, ModelError, Result, Sampling, Session, TextOutput, Tokenizer};

/// One prompt of a batch.
#[derive(Debug, Clone)]
pub struct Request {
    /// The prompt's tokens.
    pub tokens: Vec<u32>,
    /// Tokens that follow the prompt once it is compressed, such as a question about a document.
    /// All requests of a batch have equally many.
    pub question: Vec<u32>,
    /// At most this many new tokens, and at most as many as the model has positions for. Models
    /// with a sliding window refuse more than fit into it.
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
        let (question, stop) = (Vec::new(), Vec::new());
        Self { tokens, question, new_tokens, sampling, stop, stop_at_end: true }
    }

    /// Tokens that follow the prompt: the question, and the new tokens.
    pub fn room(&self) -> usize {
        self.question.len().saturating_add(self.new_tokens)
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

/// An event of a request: a token, or the rest of its text.
#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    /// Which request.
    pub request: usize,
    /// The token; `None` where the sequence has ended and text that was held back follows.
    pub token: Option<u32>,
    /// Text that no later token can take back (never half a character, never the beginning of a
    /// stop string that may follow); `None` without a tokenizer.
    pub text: Option<String>,
}

/// One request's result.
#[derive(Debug, Clone, PartialEq)]
pub struct Generated {
    /// New tokens, without the end-of-sequence token.
    pub tokens: Vec<u32>,
    /// Their text, cut at the stop string; a character cut by the last token ends as `U+FFFD`.
    /// `None` without a tokenizer.
    pub text: Option<String>,
    /// Why it ended.
    pub finish: Finish,
}

/// The results of a batch of requests.
#[derive(Debug, Clone, PartialEq)]
pub struct GeneratedBatch {
    /// The requests' results.
    pub outputs: Vec<Generated>,
    /// The memory of the caches once the prompts are compressed.
    pub compressed: MemoryReport,
    /// Each sequence's part of it: bytes of its live keys and values, and an equal share of
    /// metadata and of states of policies.
    pub kept_bytes: Vec<usize>,
    /// The memory of the caches in the end.
    pub ended: MemoryReport,
    /// Each sequence's part of it.
    pub ended_bytes: Vec<usize>,
}

/// A request whose tokens are being generated.
#[derive(Debug)]
pub(crate) struct Running {
    new_tokens: usize,
    stop_at_end: bool,
    pub(crate) tokens: Vec<u32>,
    output: Option<TextOutput>,
    /// `None` while it goes on.
    pub(crate) finish: Option<Finish>,
}

/// Generates for a batch of requests under one policy. `on_event` sees every token, and
/// the text that was held back where a sequence ends. It may break off, which ends all open
/// sequences with [`Finish::Cancelled`].
///
/// Each request gets the tokens that it would get alone.
///
/// ```
/// use std::ops::ControlFlow;
///
/// use kv_models::{Model, Request, generate};
///
/// let model = Model::load("needle-1m", &kv_core::select_device("cpu".parse()?)?, None)?;
/// let policy = kv_policies::build_named("streaming-llm", "16".parse()?)?;
/// let prompts = ["The boat lay upon the sand.", "The sea was calm that day, and"];
/// let requests = prompts.map(|prompt| Request::greedy(model.encode(prompt).unwrap(), 3));
/// let mut seen = 0;
/// let outputs = generate(&model, policy, &requests, |_event| {
///     seen += 1;
///     ControlFlow::Continue(())
/// })?;
/// assert_eq!(outputs.len(), 2);
/// assert!(seen >= 2);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`crate::ModelError`]; no token of a failed step is emitted.
pub fn generate(
    model: &Model,
    policy: Arc<dyn Policy>,
    requests: &[Request],
    on_event: impl FnMut(&Event) -> ControlFlow<()>,
) -> Result<Vec<Generated>> {
    let prompts: Vec<Vec<u32>> = requests.iter().map(|request| request.tokens.clone()).collect();
    let seeds: Vec<u64> = requests.iter().map(|request| request.sampling.seed).collect();
    let new_tokens: Vec<usize> = requests.iter().map(Request::room).collect();
    requests.iter().try_for_each(|request| request.sampling.validate())?;
    check_questions(requests)?;
    let started = Session::start_rows(model, &[policy], &prompts, &seeds, &new_tokens)?.pop();
    Ok(generate_from(started.ok_or(ModelError::EmptyPrompt)?, requests, on_event)?.outputs)
}

/// Generates for requests whose prompts a session has prefilled and compressed, in their order:
/// [`generate`] behind [`Session::start_rows`].
///
/// # Errors
/// The errors of [`generate`]; [`ModelError::UnequalPrompts`] for another number of requests than
/// sequences, and for questions of different lengths.
pub fn generate_from(
    session: Session<'_>,
    requests: &[Request],
    mut on_event: impl FnMut(&Event) -> ControlFlow<()>,
) -> Result<GeneratedBatch> {
    let model = session.model();
    let samplings: Vec<Sampling> = requests.iter().map(|request| request.sampling).collect();
    let mut running: Vec<Running> = requests.iter().map(|r| Running::new(model, r)).collect();
    check_questions(requests)?;
    let questions: Vec<&[u32]> = requests.iter().map(|request| &request.question[..]).collect();
    let compressed = session.memory();
    let kept_bytes = session.live_bytes();
    let mut decoder = session.decoder(&samplings)?.overlapped();
    decoder.append_question(&questions)?;
    for (row, sequence) in running.iter().enumerate() {
        if sequence.finish.is_some() {
            decoder.end(row)?;
        }
    }
    while running.iter().any(|sequence| sequence.finish.is_none()) {
        for (row, token) in decoder.next_tokens()?.into_iter().enumerate() {
            let sequence = &mut running[row];
            if sequence.finish.is_some() {
                // Its row goes on with arbitrary tokens, which nobody sees.
                continue;
            }
            let mut events = Vec::from_iter(sequence.take(model, row, token)?);
            // A step that ran ahead has drawn another token already.
            if !decoder.session().has_position(row) && !decoder.has_step_in_flight() {
                sequence.finish.get_or_insert(Finish::Length);
            }
            if sequence.finish.is_some() {
                decoder.end(row)?;
                events.extend(sequence.rest(row)?);
            }
            if events.iter().any(|event| on_event(event).is_break()) {
                return batch(running, (compressed, kept_bytes), &decoder);
            }
        }
    }
    batch(running, (compressed, kept_bytes), &decoder)
}

/// Refuses questions of different lengths.
fn check_questions(requests: &[Request]) -> Result<()> {
    let expected = requests.first().map_or(0, |request| request.question.len());
    match requests.iter().map(|request| request.question.len()).find(|own| *own != expected) {
        Some(actual) => Err(ModelError::UnequalPrompts { expected, actual }),
        None => Ok(()),
    }
}

/// The results as they stand.
fn batch(
    running: Vec<Running>,
    (compressed, kept_bytes): (MemoryReport, Vec<usize>),
    decoder: &Decoder<'_>,
) -> Result<GeneratedBatch> {
    let outputs = running.into_iter().map(Running::result).collect::<Result<_>>()?;
    let session = decoder.session();
    let (ended, ended_bytes) = (session.memory(), session.live_bytes());
    Ok(GeneratedBatch { outputs, compressed, kept_bytes, ended, ended_bytes })
}

impl Running {
    pub(crate) fn new(model: &Model, request: &Request) -> Self {
        let output =
            |tokenizer: &Tokenizer| TextOutput::new(tokenizer.stream(true), request.stop.clone());
        Self {
            new_tokens: request.new_tokens,
            stop_at_end: request.stop_at_end,
            tokens: Vec::new(),
            output: model.tokenizer().map(output),
            finish: (request.new_tokens == 0).then_some(Finish::Length),
        }
    }

    /// Records a token; `None` if it ended the sequence without being part of it.
    pub(crate) fn take(&mut self, model: &Model, row: usize, token: u32) -> Result<Option<Event>> {
        if self.stop_at_end && model.config().eos_token_ids.contains(&token) {
            self.finish = Some(Finish::End);
            return Ok(None);
        }
        self.tokens.push(token);
        let text = self.output.as_mut().map(|output| output.push(token)).transpose()?;
        if self.is_stopped() {
            self.finish = Some(Finish::Stop);
        } else if self.tokens.len() == self.new_tokens {
            self.finish = Some(Finish::Length);
        }
        Ok(Some(Event { request: row, token: Some(token), text }))
    }

    /// Bytes of text that have been shown; none without a tokenizer.
    pub(crate) fn shown(&self) -> usize {
        self.output.as_ref().map_or(0, TextOutput::shown)
    }

    /// [`TextOutput::end_of_last`]; 0 without a tokenizer.
    pub(crate) fn end_of_last(&self) -> Result<Option<usize>> {
        self.output.as_ref().map_or(Ok(Some(0)), TextOutput::end_of_last)
    }

    /// Whether a stop string has ended the text.
    pub(crate) fn is_stopped(&self) -> bool {
        self.output.as_ref().is_some_and(TextOutput::is_stopped)
    }

    /// The text that was held back, where the sequence has ended.
    pub(crate) fn rest(&mut self, row: usize) -> Result<Option<Event>> {
        let text = self.output.as_mut().map(TextOutput::finish).transpose()?;
        let text = text.filter(|text| !text.is_empty());
        Ok(text.map(|text| Event { request: row, token: None, text: Some(text) }))
    }

    /// The result. A sequence that could have gone on was cancelled.
    fn result(mut self) -> Result<Generated> {
        if let Some(output) = &mut self.output {
            output.finish()?;
        }
        Ok(Generated {
            tokens: self.tokens,
            text: self.output.map(TextOutput::into_text),
            finish: self.finish.unwrap_or(Finish::Cancelled),
        })
    }
}
