//! A request's jobs in the engine, as one sequence of events.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use axum::http::HeaderName;
use kv_models::{Ended, Finish, Job, JobId, Started, TokenLogprobs, Update};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::task::JoinSet;

use crate::app::App;
use crate::error::{ApiError, Result};
use crate::protocol::answer::Usage;

/// The header with a request's name.
pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// The header with the numbers of a request's jobs. `/v1/kv/requests` names jobs by these numbers.
pub(crate) const JOBS: HeaderName = HeaderName::from_static("x-kv-jobs");

/// What happens to a choice.
#[derive(Debug)]
pub(crate) enum Event {
    /// Its prompt is compressed.
    Started,
    /// It has another token, or text that was held back.
    Token { token: Option<u32>, text: String, logprobs: Option<TokenLogprobs> },
    /// It has ended.
    Ended(Finish),
}

/// A request's jobs. Dropping it cancels those that have not ended.
pub(crate) struct Generation {
    pub(crate) app: Arc<App>,
    /// The request's name in the API.
    pub(crate) id: String,
    updates: UnboundedReceiver<(usize, Update)>,
    jobs: Vec<JobId>,
    /// Choices that have not ended.
    open: BTreeSet<usize>,
    /// Choices of each prompt.
    choices: usize,
    usage: Usage,
    begun: Instant,
    /// When each choice's last token came.
    last: Vec<Option<Instant>>,
    /// Tokens of each choice's prompt.
    prompts: Vec<usize>,
    /// Cancels the jobs at the request's deadline, whether anybody reads its answer or not.
    deadline: JoinSet<()>,
}

impl Generation {
    /// Submits the jobs of a request that began at `begun`, `choices` for each prompt.
    ///
    /// # Errors
    /// The first error; no job is submitted then.
    pub(crate) fn submit(
        app: &Arc<App>,
        id: String,
        jobs: Vec<Job>,
        choices: usize,
        begun: Instant,
    ) -> Result<Self> {
        if app.is_draining() {
            return Err(ApiError::unavailable("the server is shutting down"));
        }
        // Not bounded: a callback must not block, and a job has at most as many updates as new
        // tokens, whose number is.
        let (sender, updates) = unbounded_channel();
        let count = jobs.len();
        let mut generation = Self {
            app: Arc::clone(app),
            id,
            updates,
            jobs: Vec::new(),
            open: (0..count).collect(),
            choices,
            usage: Usage::default(),
            begun,
            last: vec![None; count],
            prompts: vec![0; count],
            deadline: JoinSet::new(),
        };
        let jobs = jobs.into_iter().enumerate().map(|(choice, job)| {
            let sender = sender.clone();
            (job, move |update| sender.send((choice, update)).is_ok())
        });
        generation.jobs = app.engine.submit_all(jobs.collect())?;
        for &job in &generation.jobs {
            app.requests().insert(job, generation.id.clone());
        }
        let (engine, jobs) = (app.engine.clone(), generation.jobs.clone());
        let deadline = begun + app.settings.request_timeout;
        generation.deadline.spawn(async move {
            tokio::time::sleep_until(deadline.into()).await;
            jobs.into_iter().for_each(|job| engine.cancel(job));
        });
        Ok(generation)
    }

    /// The number of choices.
    pub(crate) fn count(&self) -> usize {
        self.jobs.len()
    }

    /// Choices of each prompt.
    pub(crate) fn choices(&self) -> usize {
        self.choices
    }

    /// The headers of the answer: the request's name, as the log has it, and the engine's numbers
    /// of the jobs, with commas between them.
    pub(crate) fn headers(&self) -> [(HeaderName, String); 2] {
        let numbers: Vec<String> = self.jobs.iter().map(|job| job.0.to_string()).collect();
        [(REQUEST_ID, self.id.clone()), (JOBS, numbers.join(","))]
    }

    /// The next event and its choice; `None` once all have ended.
    ///
    /// # Errors
    /// The error of a job, which ends the request, and the request's timeout.
    pub(crate) async fn next(&mut self) -> Result<Option<(usize, Event)>> {
        if self.open.is_empty() {
            return Ok(None);
        }
        let patience = self.app.settings.request_timeout;
        let update = tokio::time::timeout_at((self.begun + patience).into(), self.updates.recv());
        let Ok(update) = update.await else { return Err(ApiError::too_slow(patience)) };
        let Some((choice, update)) = update else {
            return Err(ApiError::internal("the engine has stopped"));
        };
        let event = match update {
            Update::Started(started) => self.started(choice, &started),
            Update::Token { token, text, logprobs } => {
                self.timed(choice);
                Event::Token { token, text, logprobs }
            }
            Update::Ended(ended) => self.ended(choice, &ended)?,
            Update::Failed(error) => {
                let error = ApiError::from(error);
                match error.is_fault() {
                    true => tracing::warn!("{}: {error}", self.id),
                    false => tracing::info!("{}: {error}", self.id),
                }
                return Err(error);
            }
        };
        Ok(Some((choice, event)))
    }

    fn started(&mut self, choice: usize, started: &Started) -> Event {
        self.prompts[choice] = started.prompt_tokens;
        // A prompt counts once, however many choices it has.
        if choice.is_multiple_of(self.choices) {
            self.usage.prompt_tokens += started.prompt_tokens;
            self.usage.prompt_tokens_details.cached_tokens += started.cached_tokens;
        }
        Event::Started
    }

    fn timed(&mut self, choice: usize) {
        let now = Instant::now();
        match self.last[choice].replace(now) {
            None => self.app.metrics.first_token(now - self.begun),
            Some(last) => self.app.metrics.next_token(now - last),
        }
    }

    fn ended(&mut self, choice: usize, ended: &Ended) -> Result<Event> {
        self.open.remove(&choice);
        self.app.requests().remove(&self.jobs[choice]);
        if ended.finish == Finish::Cancelled {
            // Nobody but the server cancels a job whose request is here.
            let patience = self.app.settings.request_timeout;
            if self.begun.elapsed() >= patience {
                return Err(ApiError::too_slow(patience));
            }
            return Err(ApiError::unavailable("the server is shutting down"));
        }
        self.usage.completion_tokens += ended.tokens;
        self.usage.kv_tokens_kept += ended.held.tokens;
        self.usage.kv_bytes += ended.held.live_bytes;
        self.usage.kv_host_bytes += ended.held.host_bytes;
        self.usage.kv_full_bytes += ended.held.full_bytes;
        let seen = self.prompts[choice] + ended.tokens;
        self.app.metrics.ended(self.begun.elapsed(), seen, ended.held.tokens);
        if self.open.is_empty() {
            let Usage { prompt_tokens, completion_tokens, .. } = self.usage;
            let seconds = self.begun.elapsed().as_secs_f32();
            tracing::info!(
                "{}: {completion_tokens} tokens behind {prompt_tokens} in {seconds:.3} s",
                self.id
            );
        }
        Ok(Event::Ended(ended.finish))
    }

    /// What the request took so far.
    pub(crate) fn usage(&self) -> Usage {
        let total_tokens = self.usage.prompt_tokens + self.usage.completion_tokens;
        Usage { total_tokens, ..self.usage }
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        let mut requests = self.app.requests();
        for (choice, &job) in self.jobs.iter().enumerate() {
            if self.open.contains(&choice) {
                // A job in the queue has no updates by which it would learn of it.
                self.app.engine.cancel(job);
            }
            requests.remove(&job);
        }
    }
}
