//! A compressed prompt that several waiting jobs have, such as the choices of one request.
//!
//! The first of these jobs computes the prompt. The others begin with copies of it.

use serde_json::Value;

use super::job::Job;
use crate::Session;

/// A compressed prompt, for jobs that wait.
pub(super) struct Repeated<'a> {
    prompt: Prompt,
    session: Session<'a>,
}

/// By which jobs have one compressed prompt.
struct Prompt {
    tokens: Vec<u32>,
    /// Policies may size a cache by the tokens to come.
    new_tokens: usize,
    policy: Value,
    /// Of policies that draw.
    seed: Option<u64>,
}

impl Prompt {
    fn of(job: &Job) -> Self {
        Self {
            tokens: job.request.tokens.clone(),
            new_tokens: job.request.new_tokens,
            policy: job.policy.config(),
            seed: seed_of(job),
        }
    }

    /// Whether a job has this prompt. The cheap comparisons come first: queues are long.
    fn is_of(&self, job: &Job) -> bool {
        job.context.is_none()
            && self.new_tokens == job.request.new_tokens
            && self.seed == seed_of(job)
            && self.tokens == job.request.tokens
            && self.policy == job.policy.config()
    }
}

/// The seed of a job whose policy draws; `None` under other policies.
fn seed_of(job: &Job) -> Option<u64> {
    job.policy.capabilities().draws.then_some(job.request.sampling.seed)
}

impl<'a> Repeated<'a> {
    /// A copy of a job's compressed prompt, if some of the waiting jobs have this prompt, too.
    pub(super) fn of<'j>(
        job: &Job,
        session: &Session<'a>,
        mut waiting: impl Iterator<Item = &'j Job>,
    ) -> Option<Self> {
        let prompt = job.context.is_none().then(|| Prompt::of(job))?;
        let is_repeated = waiting.any(|other| prompt.is_of(other));
        is_repeated.then(|| Self { prompt, session: session.fork() })
    }

    /// Whether a job has this prompt.
    pub(super) fn serves(&self, job: &Job) -> bool {
        self.prompt.is_of(job)
    }

    /// A copy for a job.
    pub(super) fn session(&self) -> Session<'a> {
        self.session.fork()
    }

    /// The session itself, for the last job.
    pub(super) fn into_session(self) -> Session<'a> {
        self.session
    }
}
