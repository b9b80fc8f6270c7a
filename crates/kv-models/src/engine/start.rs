//! Prompts on their way into a batch: prefilled a few layers at a time, compressed, and joined.

use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use kv_core::MemoryReport;
use kv_parallel::ParallelError;
use kv_policies::{LayerContext, Policy};

use super::context::{ContextInfo, KeptContext};
use super::group::held_in;
use super::job::{Job, JobError, JobId, Started, Update};
use super::places::Place;
use super::prefixes::Prefixes;
use super::row::{Decision, Failed, Row, Updates};
use super::script::Script;
use crate::llama::PromptPrefix;
use crate::rope::trained_context;
use crate::{Decoder, Finish, Model, ModelError, Prefilling, Session};

/// What waits for its prompt to be compressed.
pub(super) enum Waiting {
    /// A job.
    Job {
        /// Its number.
        id: JobId,
        /// The job.
        job: Box<Job>,
        /// What it is told.
        updates: Updates,
        /// When it was submitted.
        since: Instant,
        /// The place that it will take, unless that depends on a context.
        place: Option<Place>,
    },
    /// A document under a name.
    Context {
        /// The number by which the compression can be cancelled.
        id: JobId,
        /// The name.
        name: String,
        /// The document.
        tokens: Vec<u32>,
        /// How it is compressed.
        policy: Arc<dyn Policy>,
        /// Takes the result.
        reply: Sender<Result<ContextInfo, JobError>>,
    },
}

impl Waiting {
    /// Fails what waits.
    pub(super) fn fail(self, error: JobError) {
        match self {
            Self::Job { mut updates, .. } => drop(updates(Update::Failed(error))),
            Self::Context { reply, .. } => drop(reply.send(Err(error))),
        }
    }

    /// Tokens that are to be computed.
    pub(super) fn length(&self) -> usize {
        match self {
            Self::Job { job, .. } => job.request.tokens.len(),
            Self::Context { tokens, .. } => tokens.len(),
        }
    }

    /// The place that a job's sequence will take; `None` for documents. `context` is the job's
    /// context.
    pub(super) fn place_in(&self, model: &Model, context: Option<KeptContext>) -> Option<Place> {
        let Self::Job { job, .. } = self else { return None };
        let (config, request, policy) = (model.config(), &job.request, &*job.policy);
        let heads = config.num_kv_heads;
        let tokens = request.tokens.len();
        if let Some(KeptContext { tokens: seen, slots, weights }) = context {
            let room = room_of(model, seen + tokens, request.new_tokens);
            return Some(Place::Arena { weights, slots: heads * (slots + tokens + room) });
        }
        Some(match most_kept(policy, config.num_layers, tokens) {
            Some(most) => {
                let slots = heads * (most + room_of(model, tokens, request.new_tokens));
                Place::Arena { weights: policy.capabilities().weights, slots }
            }
            None => {
                Place::Own { policy: Arc::new(policy.config()), kept: policy.least_kept(tokens) }
            }
        })
    }
}

/// The most slots that a head of any of `layers` layers keeps of a prompt of so many tokens. `None`
/// for policies whose jobs join no arena.
pub(super) fn most_kept(policy: &dyn Policy, layers: usize, tokens: usize) -> Option<usize> {
    let capabilities = policy.capabilities();
    if capabilities.changes_decode || capabilities.renumbers {
        return None;
    }
    let kept = |index| policy.most_kept(LayerContext { index, count: layers }, tokens);
    Some((0..layers).map(kept).max().unwrap_or(tokens))
}

/// Free slots that each head needs behind `seen` tokens: one for each new token that the model has
/// a position for, and one more, since a step begins before the host has seen the last token.
pub(super) fn room_of(model: &Model, seen: usize, new_tokens: usize) -> usize {
    new_tokens.min((model.config().max_positions + 1).saturating_sub(seen))
}

/// A prompt on its way.
pub(super) struct Starting<'a> {
    pub(super) waiting: Waiting,
    begun: Instant,
    stage: Stage<'a>,
    /// Tokens whose keys and values were there already.
    pub(super) cached: usize,
    /// Tokens that were computed, once for each layer.
    pub(super) computed: usize,
    /// The place that its sequence will take.
    pub(super) place: Option<Place>,
}

enum Stage<'a> {
    /// Its layers are computed. Boxed, as it is by far the largest.
    Prefill(Box<Prefilling<'a>>),
    /// A question is appended to a copy of a compressed context. The number counts the question's
    /// tokens that are appended already.
    Question(Box<Session<'a>>, usize),
    /// Nothing is left to compute: another job had the prompt, too.
    Copy(Box<Session<'a>>),
}

/// Tokens of a question that are appended at a time.
const PIECE: usize = 64;

/// A job that can join a batch.
pub(super) struct Ready<'a> {
    /// The sequence, which has drawn its first token.
    pub(super) one: Decoder<'a>,
    /// The job.
    pub(super) row: Row,
    /// Free slots that it needs in every head.
    pub(super) room: usize,
}

impl<'a> Starting<'a> {
    /// Begins with the prompt of a job or a context, behind a prefix that other prompts had.
    pub(super) fn prefill(
        model: &'a Model,
        waiting: Waiting,
        prefixes: &mut Prefixes,
    ) -> Result<Self, Failed<Waiting>> {
        let (tokens, policy, seed, new_tokens) = match &waiting {
            Waiting::Job { job, .. } => {
                let request = &job.request;
                (&request.tokens, &job.policy, request.sampling.seed, request.new_tokens)
            }
            Waiting::Context { tokens, policy, .. } => (tokens, policy, 0, 0),
        };
        // Frequencies of some models depend on the whole prompt's length.
        let keeps = prefixes.serve(&**policy) && trained_context(model.config()).is_none();
        let (config, dtype) = (model.config(), model.llama().dtype());
        let shape = (config.num_layers, config.num_kv_heads, config.head_dim);
        let whole = MemoryReport::full(tokens.len(), shape.0, shape.1, shape.2, dtype);
        let shared = keeps.then(|| prefixes.find(tokens, &**policy)).flatten();
        let cached = shared.as_ref().map_or(0, |shared| shared.tokens);
        let settings = (seed, new_tokens);
        let (policy, tokens) = (policy.clone(), tokens.clone());
        match Session::begin_behind(model, policy, tokens, settings, shared.as_ref()) {
            Ok(run) => {
                let kept = keeps && whole <= prefixes.limit();
                let run = if kept { run.keep_whole() } else { run };
                let stage = Stage::Prefill(Box::new(run));
                Ok(Self { waiting, begun: Instant::now(), stage, cached, computed: 0, place: None })
            }
            Err(error) => Err(Box::new((error.into(), waiting))),
        }
    }

    /// The prompt's whole keys and values, once its layers are computed.
    pub(super) fn take_prefix(&mut self) -> Option<PromptPrefix> {
        match &mut self.stage {
            Stage::Prefill(run) => run.take_prefix(),
            Stage::Question(..) | Stage::Copy(_) => None,
        }
    }

    /// Begins behind a copy of a compressed context.
    pub(super) fn question(session: Session<'a>, waiting: Waiting) -> Self {
        let stage = Stage::Question(Box::new(session), 0);
        Self { waiting, begun: Instant::now(), stage, cached: 0, computed: 0, place: None }
    }

    /// Begins with a copy of the compressed prompt of another job.
    pub(super) fn copy(session: Session<'a>, waiting: Waiting) -> Self {
        let (stage, cached) = (Stage::Copy(Box::new(session)), waiting.length());
        Self { waiting, begun: Instant::now(), stage, cached, computed: 0, place: None }
    }

    /// Tokens of the prompt or of the question.
    pub(super) fn length(&self) -> usize {
        self.waiting.length()
    }

    /// Tokens of which [`Self::layer`] computes a layer. A piece of a question goes through all
    /// layers at once, which counts as that many more tokens.
    pub(super) fn tokens(&self, layers: usize) -> usize {
        match (&self.stage, &self.waiting) {
            (Stage::Question(..), _) => PIECE * layers,
            (Stage::Prefill(_), waiting) => waiting.length() - self.cached,
            // As good as nothing; each call of [`Self::layer`] counts.
            (Stage::Copy(_), _) => 1,
        }
    }

    /// Goes through the next layer, or appends the next piece of a question, if there is any;
    /// returns whether more are left.
    pub(super) fn layer(&mut self) -> Result<bool, JobError> {
        match (&mut self.stage, &self.waiting) {
            (Stage::Prefill(run), _) => Ok(run.layer()?),
            (Stage::Question(session, done), Waiting::Job { job, .. }) => {
                let left = &job.request.tokens[*done..];
                let piece = &left[..left.len().min(PIECE)];
                session.append_to_last(&[piece])?;
                *done += piece.len();
                Ok(*done < job.request.tokens.len())
            }
            // A context is compressed from its own tokens.
            (Stage::Copy(_), _) | (Stage::Question(..), Waiting::Context { .. }) => Ok(false),
        }
    }

    /// The compressed prompt.
    pub(super) fn finish(self) -> Result<(Waiting, Session<'a>, Duration), Failed<Waiting>> {
        let Self { waiting, begun, stage, .. } = self;
        let session = match stage {
            Stage::Question(session, _) | Stage::Copy(session) => *session,
            Stage::Prefill(run) => match run.finish().map(|mut sessions| sessions.pop()) {
                Ok(Some(session)) => session,
                Ok(None) => return Err(Box::new((ModelError::EmptyPrompt.into(), waiting))),
                Err(error) => return Err(Box::new((error.into(), waiting))),
            },
        };
        Ok((waiting, session, begun.elapsed()))
    }
}

/// A job behind its compressed prompt.
pub(super) enum Opened<'a> {
    /// It can join a batch.
    Ready(Box<Ready<'a>>),
    /// It has ended, or has failed (`None`).
    Ended(Option<Finish>),
}

/// Tells a job that its prompt is compressed, and draws its first token. `history` has the tokens
/// that a repetition penalty counts.
pub(super) fn open<'a>(
    (model, script): (&'a Model, &Script),
    (id, mut job, updates): (JobId, Box<Job>, Updates),
    session: Session<'a>,
    mut started: Started,
    history: &[u32],
) -> Result<Opened<'a>, ParallelError> {
    started.held = held_in(&session, 0);
    let policy = session.policy().config();
    let mut row = Row::new(model, id, &job.request, policy, started.prompt_tokens, updates);
    if !row.tell(Update::Started(started)) {
        row.cancel();
    }
    Ok(match first_token((model, script), &mut row, &mut job, session, history)? {
        Ok(Some(one)) => {
            let seen = one.session().cache().seen.first().copied().unwrap_or_default();
            let room = room_of(model, seen, job.request.new_tokens);
            Opened::Ready(Box::new(Ready { one, row, room }))
        }
        Ok(None) => Opened::Ended(row.end(started.held)),
        Err(error) => {
            row.tell(Update::Failed(error));
            Opened::Ended(None)
        }
    })
}

fn first_token<'a>(
    (model, script): (&'a Model, &Script),
    row: &mut Row,
    job: &mut Job,
    session: Session<'a>,
    history: &[u32],
) -> Result<Result<Option<Decoder<'a>>, JobError>, ParallelError> {
    if script.choose(|| row.has_ended())? {
        row.cancel();
        return Ok(Ok(None));
    }
    let drawn = || {
        let device = model.llama().device();
        row.shape_by(job.logprobs, job.shaper.take(), job.request.sampling, history, &device)?;
        let mut one = session.decoder(&[Row::device_sampling(job.request.sampling)])?;
        let drawn = one.draws()?.first().copied().flatten();
        Ok::<_, JobError>((one, drawn))
    };
    let (mut one, drawn) = match drawn() {
        Ok(drawn) => drawn,
        Err(error) => return Ok(Err(script.failed(error, "draw a first token")?)),
    };
    let has_position = one.session().has_position(0);
    let decision = script.choose(|| row.take(model, drawn, || one.row_logits(0), has_position))?;
    if script.follows() {
        row.follow(decision);
    }
    Ok(match decision {
        Decision::Drawn => Ok(Some(one)),
        Decision::Replaced(token) => {
            one.replace_token(0, token).map(|()| Some(one)).map_err(JobError::from)
        }
        Decision::Ended => Ok(None),
    })
}
