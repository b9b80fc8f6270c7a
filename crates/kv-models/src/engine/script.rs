//! How the engines of several ranks do the same.
//!
//! All ranks run the same engine on their parts of the model, since sums need every rank. Choices
//! that depend on something that the first rank alone has (commands, clocks, listeners, changes of
//! logits) are made by the first rank and followed by the others, in the order in which they come.
//! All else follows from them.

use std::sync::Arc;
use std::time::Duration;

use kv_parallel::{Meeting, ParallelError};
use kv_policies::Policy;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::job::{Job, JobError, JobId, LogitsShaper};
use super::worker::{Command, Submitted};
use crate::{ModelError, Request, Sampling};

/// How long a rank that has failed waits for the others to fail, too.
const FAILING: Duration = Duration::from_secs(5);

/// Who makes an engine's choices.
#[derive(Debug, Clone)]
pub(super) enum Script {
    /// The engine has no others.
    Alone,
    /// This engine, for all ranks.
    Leads(Arc<Meeting>),
    /// The first rank's engine.
    Follows(Arc<Meeting>),
}

impl Script {
    /// The part of an engine whose process has these connections.
    pub(super) fn of(meeting: Option<&Arc<Meeting>>, is_first: bool) -> Self {
        match (meeting, is_first) {
            (None, _) => Self::Alone,
            (Some(meeting), true) => Self::Leads(Arc::clone(meeting)),
            (Some(meeting), false) => Self::Follows(Arc::clone(meeting)),
        }
    }

    /// Whether another rank makes the choices.
    pub(super) fn follows(&self) -> bool {
        matches!(self, Self::Follows(_))
    }

    /// Whether all ranks say yes.
    ///
    /// # Errors
    /// [`ParallelError::RankLeft`].
    pub(super) fn agree(&self, own: bool) -> Result<bool, ParallelError> {
        match self {
            Self::Alone => Ok(own),
            Self::Leads(meeting) | Self::Follows(meeting) => meeting.agree(own),
        }
    }

    /// The least number of all ranks.
    ///
    /// # Errors
    /// [`ParallelError::RankLeft`].
    pub(super) fn least(&self, own: usize) -> Result<usize, ParallelError> {
        match self {
            Self::Alone => Ok(own),
            Self::Leads(meeting) | Self::Follows(meeting) => {
                let all = meeting.gather(&(own as u64).to_le_bytes())?;
                let numbers = all.iter().filter_map(|bytes| bytes.as_slice().try_into().ok());
                let least = numbers.map(u64::from_le_bytes).min().unwrap_or(0);
                Ok(usize::try_from(least).unwrap_or(own))
            }
        }
    }

    /// What came of something that all ranks tried. Where it failed on all of them, which goes on
    /// as where it succeeded on all, each has its own error.
    ///
    /// # Errors
    /// [`ParallelError::Uneven`] where it failed on some ranks alone, [`ParallelError::RankLeft`].
    pub(super) fn alike<T, E>(
        &self,
        own: Result<T, E>,
        action: &'static str,
    ) -> Result<Result<T, E>, ParallelError> {
        match self.agree(own.is_ok())? || self.agree(own.is_err())? {
            true => Ok(own),
            false => Err(ParallelError::Uneven { action }),
        }
    }

    /// An error, where all ranks have one in this place, so that all go on. A rank that fails alone
    /// ends the group, since the others may wait for its part of a sum.
    ///
    /// # Errors
    /// [`ParallelError::Uneven`], [`ParallelError::RankLeft`].
    pub(super) fn failed<E: std::fmt::Display>(
        &self,
        error: E,
        action: &'static str,
    ) -> Result<E, ParallelError> {
        let (Self::Leads(meeting) | Self::Follows(meeting)) = self else { return Ok(error) };
        match meeting.fail_together(FAILING) {
            Ok(true) => Ok(error),
            failed => {
                tracing::error!("{action}: {error}");
                failed?;
                Err(ParallelError::Uneven { action })
            }
        }
    }

    /// The first rank's choice.
    ///
    /// # Errors
    /// [`ParallelError::RankLeft`] where the first rank has done its work, and on the first rank
    /// where another one has left.
    pub(super) fn choose<T: Serialize + DeserializeOwned>(
        &self,
        own: impl FnOnce() -> T,
    ) -> Result<T, ParallelError> {
        let failed = |error: serde_json::Error| ParallelError::Process {
            action: "telling ranks what to do".into(),
            reason: error.to_string(),
        };
        match self {
            Self::Alone => Ok(own()),
            Self::Leads(meeting) => {
                let choice = own();
                meeting.command(&serde_json::to_vec(&choice).map_err(failed)?)?;
                Ok(choice)
            }
            Self::Follows(meeting) => {
                let world = kv_parallel::Collective::shard(&**meeting).world();
                let left = ParallelError::RankLeft { rank: 0, world };
                serde_json::from_slice(&meeting.next_command().ok_or(left)?).map_err(failed)
            }
        }
    }
}

/// What the first rank does between two steps.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Turn {
    /// The commands that it took.
    pub(super) commands: Vec<Told>,
    /// Whether all of its handles are gone.
    pub(super) is_over: bool,
}

/// A job, as the other ranks run it.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct ToldJob {
    id: u64,
    tokens: Vec<u32>,
    new_tokens: usize,
    sampling: Sampling,
    policy: serde_json::Value,
    context: Option<String>,
    logprobs: Option<usize>,
    is_shaped: bool,
}

impl ToldJob {
    fn of(Submitted { id, job, .. }: &Submitted) -> Self {
        Self {
            id: id.0,
            tokens: job.request.tokens.clone(),
            new_tokens: job.request.new_tokens,
            sampling: job.request.sampling,
            policy: job.policy.config(),
            context: job.context.clone(),
            logprobs: job.logprobs,
            is_shaped: job.shaper.is_some(),
        }
    }

    fn submitted(self) -> Result<Submitted, JobError> {
        let Self { id, tokens, new_tokens, sampling, policy, context, logprobs, is_shaped } = self;
        let request = Request { sampling, ..Request::greedy(tokens, new_tokens) };
        let shaper = is_shaped.then(|| Box::new(Elsewhere) as Box<dyn LogitsShaper>);
        let job = Job { request, policy: build(&policy)?, context, logprobs, shaper };
        Ok(Submitted { id: JobId(id), job: Box::new(job), updates: Box::new(|_| true) })
    }
}

fn build(policy: &serde_json::Value) -> Result<Arc<dyn Policy>, JobError> {
    Ok(kv_policies::build(policy).map_err(ModelError::from)?)
}

/// A command, as the other ranks obey it: without listeners.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Told {
    Submit(Vec<ToldJob>),
    Cancel(u64),
    Compress { id: u64, name: String, tokens: Vec<u32>, policy: serde_json::Value },
    Forget(String),
    Save(String),
    ShutDown,
}

impl Told {
    /// A command for the other ranks; `None` for questions that the first rank answers alone.
    pub(super) fn of(command: &Command) -> Option<Self> {
        Some(match command {
            Command::Submit(jobs) => Self::Submit(jobs.iter().map(ToldJob::of).collect()),
            Command::Cancel(id) => Self::Cancel(id.0),
            Command::Compress { id, name, tokens, policy, .. } => Self::Compress {
                id: id.0,
                name: name.clone(),
                tokens: tokens.clone(),
                policy: policy.config(),
            },
            Command::Forget { name, .. } => Self::Forget(name.clone()),
            Command::Save { name, .. } => Self::Save(name.clone()),
            Command::ShutDown { .. } => Self::ShutDown,
            Command::Picture { .. } | Command::Contexts(_) => return None,
        })
    }

    /// The command on another rank, where nobody listens.
    pub(super) fn command(self) -> Result<Command, JobError> {
        // Whoever would receive the answer is not here.
        fn unheard<T>() -> std::sync::mpsc::Sender<T> {
            std::sync::mpsc::channel().0
        }
        Ok(match self {
            Self::Submit(jobs) => Command::Submit(
                jobs.into_iter().map(ToldJob::submitted).collect::<Result<_, JobError>>()?,
            ),
            Self::Cancel(id) => Command::Cancel(JobId(id)),
            Self::Compress { id, name, tokens, policy } => {
                let (id, policy) = (JobId(id), build(&policy)?);
                Command::Compress { id, name, tokens, policy, reply: unheard() }
            }
            Self::Forget(name) => Command::Forget { name, reply: unheard() },
            Self::Save(name) => Command::Save { name, reply: unheard() },
            // The first rank says when.
            Self::ShutDown => Command::ShutDown { patience: Duration::ZERO, reply: unheard() },
        })
    }
}

/// Stands for changes of logits that the first rank makes: the other ranks only know that there are
/// some.
struct Elsewhere;

impl LogitsShaper for Elsewhere {
    fn shape(&mut self, _logits: &mut [f32]) -> Result<(), String> {
        Ok(())
    }

    fn accept(&mut self, _token: u32) -> Result<bool, String> {
        Ok(false)
    }
}
