//! Requests to an engine, and the updates that it sends for them.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use kv_policies::Policy;

use crate::{Finish, ModelError, Request};

/// The number of a job, unique within its engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct JobId(pub u64);

/// A request to an engine.
pub struct Job {
    /// The prompt, the number of new tokens, sampling and stops. Its question is empty: a job asks
    /// about a compressed context by [`Self::context`].
    pub request: Request,
    /// How the prompt is compressed and decoded. Ignored behind a context, which has its own.
    pub policy: Arc<dyn Policy>,
    /// The name of a compressed context ([`crate::Engine::compress`]) that the prompt continues.
    pub context: Option<String>,
    /// How many of the likeliest tokens to report beside each drawn one; `None` for no
    /// log-probabilities at all.
    pub logprobs: Option<usize>,
    /// Changes logits before each draw.
    pub shaper: Option<Box<dyn LogitsShaper>>,
}

impl Job {
    /// A job without a context, log-probabilities or changes of logits.
    pub fn new(request: Request, policy: Arc<dyn Policy>) -> Self {
        Self { request, policy, context: None, logprobs: None, shaper: None }
    }
}

impl fmt::Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Job")
            .field("tokens", &self.request.tokens.len())
            .field("new_tokens", &self.request.new_tokens)
            .field("policy", &self.policy.name())
            .field("context", &self.context)
            .finish_non_exhaustive()
    }
}

/// Changes a sequence's logits on the host before a token is drawn: a grammar, a bias, a penalty.
///
/// Rows with a shaper make their batch wait for the host in every step.
pub trait LogitsShaper: Send {
    /// Changes the logits of the next token, `[vocabulary]`. −∞ forbids a token.
    ///
    /// # Errors
    /// A reason that fails the job, such as a grammar without a next token.
    fn shape(&mut self, logits: &mut [f32]) -> Result<(), String>;

    /// Takes the token that was drawn. Returns whether the text is complete, which ends the job
    /// with [`Finish::Stop`] behind this token.
    ///
    /// # Errors
    /// A reason that fails the job.
    fn accept(&mut self, token: u32) -> Result<bool, String>;
}

/// The log-probability of a token and of the likeliest others, by the model's own distribution:
/// before temperature, restrictions and shapers.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenLogprobs {
    /// The natural logarithm of the drawn token's probability.
    pub logprob: f32,
    /// The likeliest tokens, the likeliest first.
    pub top: Vec<(u32, f32)>,
}

/// The slots that a job's cache holds.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Held {
    /// Slots of a head, the mean over layers and heads.
    pub tokens: f64,
    /// Bytes of the keys, values, positions and weights of these slots, and of the policy's state,
    /// such as sketches and scores.
    pub live_bytes: usize,
    /// Bytes of these and of the room for tokens to come.
    pub bytes: usize,
    /// Bytes of keys and values that the policy keeps in host memory.
    pub host_bytes: usize,
    /// Bytes of keys, values and positions that a full cache needs for all tokens so far.
    pub full_bytes: usize,
}

/// A job whose prompt is compressed and that begins to decode.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Started {
    /// Tokens of the prompt; behind a context, the context's tokens too.
    pub prompt_tokens: usize,
    /// Tokens of the prompt whose keys and values were there already: a shared prefix or a context.
    pub cached_tokens: usize,
    /// The time in the queue.
    pub waited: Duration,
    /// The time from the queue to the compressed prompt.
    pub prefill: Duration,
    /// The compressed prompt.
    pub held: Held,
}

/// A job that has ended.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Ended {
    /// Why.
    pub finish: Finish,
    /// New tokens, without the end-of-sequence token.
    pub tokens: usize,
    /// The cache in the end.
    pub held: Held,
}

/// What an engine tells of a job, in this order: [`Self::Started`], any number of
/// [`Self::Token`], [`Self::Ended`]. [`Self::Failed`] may come instead of any of them, and is
/// then the last.
#[derive(Debug)]
pub enum Update {
    /// The prompt is compressed.
    Started(Started),
    /// A token was drawn. Jobs with log-probabilities learn of a token once its text can be shown
    /// as a whole, and never of a token that a stop string took.
    Token {
        /// The token; `None` for text alone: a part of a token's text, or text that was held back
        /// and is shown at the end.
        token: Option<u32>,
        /// Text that no later token can take back; it may be empty.
        text: String,
        /// Where the job asked for them.
        logprobs: Option<TokenLogprobs>,
    },
    /// The job has ended.
    Ended(Ended),
    /// The job has failed.
    Failed(JobError),
}

/// Why a job is refused or fails.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JobError {
    /// The queue has no place for so many more jobs.
    #[error("{waiting} jobs are waiting, of at most {most}; try again later")]
    QueueFull {
        /// Jobs in the queue.
        waiting: usize,
        /// Places in the queue.
        most: usize,
    },
    /// The job would take more memory than a group of jobs has.
    #[error(
        "{needed} bytes of cache are needed under policy `{policy}`, of {limit} that a group has; \
         {fits}"
    )]
    TooLarge {
        /// The policy.
        policy: String,
        /// Bytes that the job needs.
        needed: usize,
        /// Bytes that a group has.
        limit: usize,
        /// What would fit.
        fits: String,
    },
    /// A job on a context needs more memory than a group of jobs has: for a copy of the context,
    /// for the question and for the new tokens.
    #[error(
        "context `{name}` and what is asked of it need {needed} bytes of cache, of {limit} that a \
         group has; {fits}"
    )]
    ContextTooLarge {
        /// The context.
        name: String,
        /// Bytes that a job on it needs.
        needed: usize,
        /// Bytes that a group has.
        limit: usize,
        /// What would fit.
        fits: String,
    },
    /// A context for which contexts have no room.
    #[error(
        "context `{name}` needs {needed} bytes, and contexts have {limit}, of which {taken} are \
         taken; give a smaller budget, delete a context, or let the operator give contexts more"
    )]
    ContextsFull {
        /// The context.
        name: String,
        /// Bytes that it needs.
        needed: usize,
        /// Bytes that other contexts have.
        taken: usize,
        /// Bytes of all contexts.
        limit: usize,
    },
    /// Work that took more time than it was given.
    #[error("it took longer than {patience:?}, and was given up")]
    TooSlow {
        /// The time that it was given.
        patience: Duration,
    },
    /// Something that this rank could do and another one could not.
    #[error("another rank could not {action}: its log says why")]
    OtherRank {
        /// What it was to do.
        action: String,
    },
    /// No context of this name.
    #[error("no context `{name}`{known}")]
    UnknownContext {
        /// The name.
        name: String,
        /// `; known: ...`, or empty.
        known: String,
    },
    /// A context of this name is there already.
    #[error("there is a context `{name}` already; delete it first")]
    ContextExists {
        /// The name.
        name: String,
    },
    /// An engine that was given more memory than its device has left beside the model.
    #[error(
        "{needed} bytes are meant for caches, prefixes and contexts, and {device} has {free} left \
         beside the model; give fewer bytes"
    )]
    NoMemory {
        /// Bytes that the engine was given.
        needed: usize,
        /// Bytes that are free.
        free: usize,
        /// The device.
        device: String,
    },
    /// An engine whose parts hold no token.
    #[error(
        "a part of the cache holds no token: {bytes} bytes in {groups} parts, one token takes \
         {token}; give more bytes, or fewer parts"
    )]
    NoRoom {
        /// Bytes of all parts.
        bytes: usize,
        /// The parts.
        groups: usize,
        /// Bytes of a token.
        token: usize,
    },
    /// A name that a context cannot have.
    #[error(
        "`{name}` names no context: expected 1 to 64 letters, digits, `.`, `_` and `-`, the \
         first of them no `.`"
    )]
    ContextName {
        /// The name.
        name: String,
    },
    /// A policy whose decode steps do more than append and attend to all slots.
    #[error(
        "policy `{policy}` acts in decode steps, too; contexts need one that acts on the document \
         alone, such as `snapkv`, or `keydiff` with `\"decode\": false`"
    )]
    ContextPolicy {
        /// The policy.
        policy: String,
    },
    /// A file of a context's name that the engine did not write, or that was changed since.
    #[error(
        "`{path}` is there already, and is not what this engine saved; move it away, or choose \
         another name"
    )]
    ForeignFile {
        /// The file.
        path: PathBuf,
    },
    /// The file of a saved context has changed: its SHA-256 is not the one that was saved with it.
    #[error(
        "`{path}` is damaged: its SHA-256 is not the one of the context that was saved; delete it, \
         and compress the document anew"
    )]
    DamagedFile {
        /// The file.
        path: PathBuf,
    },
    /// The engine has no folder to save contexts to.
    #[error(
        "contexts cannot be saved: the engine was started without a folder for them \
         (`--contexts` of kv-serve)"
    )]
    NoContextFolder,
    /// The model or the policy refused.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A [`LogitsShaper`] gave a reason.
    #[error("{reason}")]
    Shaper {
        /// The reason.
        reason: String,
    },
    /// A decode step of the job's batch has failed.
    #[error("a decode step has failed, and all jobs that decoded together: {reason}")]
    StepFailed {
        /// Why.
        reason: String,
    },
    /// The engine is shutting down.
    #[error("the engine is shutting down")]
    ShuttingDown,
    /// The engine's thread has ended.
    #[error("the engine has stopped: {reason}")]
    Stopped {
        /// Why.
        reason: String,
    },
}
