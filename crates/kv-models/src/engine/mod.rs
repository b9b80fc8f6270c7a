//! An engine: a model on a thread of its own that serves many requests at once.
//!
//! * [`job`]: requests to an engine, and the updates that it sends for them.
//! * [`load`]: counts and gauges of an engine, for metrics.
//! * [`worker`]: the thread that owns the device, and the order of its work.
//! * [`start`]: prompts on their way into a batch; [`group`]: batches that decode; [`row`]: a job
//!   within a batch.
//! * [`pace`]: how much of a prompt is computed between two decode steps.
//! * [`prefixes`]: prompts that are kept for prompts that begin alike.
//! * [`repeated`]: a prompt that several waiting jobs have.
//! * [`script`]: how the engines of several ranks do the same.
//! * [`context`]: documents that are compressed once, for many requests.

mod conditions;
mod context;
mod group;
mod job;
mod load;
mod pace;
mod places;
mod prefixes;
mod repeated;
mod row;
mod script;
mod start;
mod worker;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use burn::tensor::DType;
use kv_parallel::{Meeting, ParallelError};
use kv_policies::Policy;

use crate::{ChatTemplate, Model, ModelConfig, ModelError, Result, Tokenizer};

pub use context::ContextInfo;
pub use job::{Ended, Held, Job, JobError, JobId, LogitsShaper, Started, TokenLogprobs, Update};
pub use load::{JobLoad, Load, Picture, Totals};
use start::most_kept;
use worker::{Command, Submitted, Worker};

/// How an engine runs.
#[derive(Debug, Clone)]
pub struct EngineOptions {
    /// The most jobs of a group that decode at once.
    pub rows: usize,
    /// The most jobs that wait.
    pub queue: usize,
    /// Bytes that caches of jobs may take together.
    pub bytes: usize,
    /// Into how many equal parts these bytes are divided. A part serves one group of jobs that
    /// decode together: all jobs under policies whose steps only append, or all jobs under one
    /// other configuration.
    pub groups: usize,
    /// The share of the time that prompts may take while other jobs decode, 0 to 0.95: more lets
    /// prompts start earlier, less lets tokens come more evenly. Whatever it is, one layer of a
    /// prompt is computed between two decode steps.
    pub prefill_share: f64,
    /// Bytes that whole keys and values of prompts may take, which are kept for prompts that begin
    /// alike; 0 keeps none.
    pub prefix_bytes: usize,
    /// Bytes that compressed contexts may take together.
    pub context_bytes: usize,
    /// Where contexts are saved; `None` to refuse saving. Each of several ranks has a folder of its
    /// own within it.
    pub contexts: Option<PathBuf>,
    /// The connections to the engines of other ranks, which have the other parts of the model.
    pub meeting: Option<Arc<Meeting>>,
}

impl EngineOptions {
    /// The most jobs of all groups that decode at once.
    pub fn all_rows(&self) -> usize {
        self.rows.saturating_mul(self.groups.max(1))
    }
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            rows: 16,
            queue: 256,
            bytes: 4 << 30,
            groups: 2,
            prefill_share: 0.5,
            prefix_bytes: 0,
            context_bytes: 1 << 30,
            contexts: None,
            meeting: None,
        }
    }
}

/// What is known of an engine's model without the engine's thread.
#[derive(Debug)]
pub struct ModelCard {
    /// The model's name.
    pub name: String,
    /// Its configuration.
    pub config: ModelConfig,
    /// Its tokenizer.
    pub tokenizer: Option<Tokenizer>,
    /// Its chat template; a reason for one that does not parse.
    pub chat: Option<std::result::Result<ChatTemplate, String>>,
    /// The dtype of keys and values.
    pub dtype: DType,
    /// The device.
    pub device: String,
}

/// A model on a thread of its own. Handles are cheap to copy and may be sent to any thread; the
/// last one dropped ends the thread.
#[derive(Debug, Clone)]
pub struct Engine {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    card: ModelCard,
    options: EngineOptions,
    commands: Mutex<Sender<Command>>,
    next: AtomicU64,
    state: Arc<State>,
}

/// What the engine's thread tells its handles.
#[derive(Debug, Default)]
struct State {
    /// Jobs that were submitted and have not begun.
    waiting: AtomicUsize,
    /// Slots that a head of a job can have in an arena.
    most_slots: AtomicUsize,
    /// The tokens of each context.
    contexts: Mutex<BTreeMap<String, usize>>,
    /// Jobs that found no place in the queue.
    turned_away: AtomicU64,
    /// Whether the thread takes no more commands.
    is_closed: AtomicBool,
    load: Mutex<Load>,
    /// When the thread last began a turn: some layers of a prompt and a step.
    turn: Mutex<Option<Instant>>,
}

impl State {
    fn note_contexts(&self, contexts: BTreeMap<String, usize>) {
        *self.contexts.lock().unwrap_or_else(PoisonError::into_inner) = contexts;
    }

    fn note_turn(&self) {
        *self.turn.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }
}

impl Engine {
    /// Starts a thread, which loads the model by `load` and then serves jobs. Returns once the
    /// model is loaded. Of several ranks, the first one calls this, and the others
    /// [`Self::follow`].
    ///
    /// # Errors
    /// The error of `load`, and of contexts that the ranks have not all loaded.
    pub fn start(
        load: impl FnOnce() -> Result<Model> + Send + 'static,
        options: EngineOptions,
    ) -> std::result::Result<Self, JobError> {
        let (commands, received) = channel();
        let (loaded, loading) = channel();
        let state = Arc::new(State::default());
        let (own_options, own_state) = (options.clone(), Arc::clone(&state));
        let meeting = options.meeting.clone();
        let spawned = thread::Builder::new().name("engine".into()).spawn(move || {
            let model = match load() {
                Ok(model) => model,
                Err(error) => {
                    let _ = loaded.send(Err(error.into()));
                    return;
                }
            };
            let worker = match Worker::new(&model, own_options, Arc::clone(&own_state)) {
                Ok(worker) => worker,
                Err(error) => {
                    let _ = loaded.send(Err(error));
                    return;
                }
            };
            let _ = loaded.send(Ok(ModelCard::new(&model)));
            let ended = catch_unwind(AssertUnwindSafe(|| worker.run(&received)));
            own_state.is_closed.store(true, Ordering::Release);
            let reason = match ended {
                Ok(Ok(())) => return,
                Ok(Err(error)) => format!("the engine has ended: {error}"),
                Err(_) => "the engine has panicked, and takes no more jobs".into(),
            };
            tracing::error!("{reason}");
            if let Some(meeting) = meeting {
                meeting.abandon(&reason);
            }
        });
        let stopped = |reason: String| JobError::Stopped { reason };
        spawned.map_err(|error| stopped(error.to_string()))?;
        let card = loading.recv().map_err(|_| stopped("the thread panicked".into()))??;
        let (commands, next) = (Mutex::new(commands), AtomicU64::new(1));
        Ok(Self { shared: Arc::new(Shared { card, options, commands, next, state }) })
    }

    /// Runs the engine of a rank other than the first one. It computes its part of every job of the
    /// first rank's engine. `options` must be the first rank's, except for `meeting`. Returns once
    /// the first rank has ended.
    ///
    /// # Errors
    /// The errors of [`Self::start`], and [`JobError::Model`] where this rank computes other tokens
    /// than the first one.
    pub fn follow(
        load: impl FnOnce() -> Result<Model>,
        options: EngineOptions,
    ) -> std::result::Result<(), JobError> {
        let model = load()?;
        let (_unused, commands) = channel();
        match Worker::new(&model, options, Arc::default())?.run(&commands) {
            Ok(()) | Err(ParallelError::RankLeft { rank: 0, .. }) => Ok(()),
            Err(error) => Err(ModelError::from(error).into()),
        }
    }

    /// The model.
    pub fn card(&self) -> &ModelCard {
        &self.shared.card
    }

    /// The engine's options.
    pub fn options(&self) -> &EngineOptions {
        &self.shared.options
    }

    /// How many new tokens a job may ask for at most behind a prompt of so many tokens, without
    /// being too large for the engine. `None` for policies whose steps change slots: more new
    /// tokens need not make their jobs larger.
    pub fn room_behind(&self, tokens: usize, policy: &dyn Policy) -> Option<usize> {
        let count = self.shared.card.config.num_layers;
        let kept = most_kept(policy, count, tokens)?;
        Some(self.shared.state.most_slots.load(Ordering::Acquire).saturating_sub(kept))
    }

    /// Queues a job. `updates` is called on the engine's thread, and must not block; once it
    /// returns `false`, the job is cancelled.
    ///
    /// # Errors
    /// [`JobError::QueueFull`], [`JobError::Stopped`], and [`JobError::Model`] for prompts and
    /// settings that the model cannot take. Later errors come as [`Update::Failed`].
    pub fn submit(
        &self,
        job: Job,
        updates: impl FnMut(Update) -> bool + Send + 'static,
    ) -> std::result::Result<JobId, JobError> {
        let ids = self.submit_all(vec![(job, updates)])?;
        ids.first().copied().ok_or_else(stopped)
    }

    /// Queues jobs together: all of them or none. Jobs that have one prompt and one policy, such as
    /// the choices of a request, compute it once, unless the policy draws from different seeds.
    ///
    /// # Errors
    /// The errors of [`Self::submit`].
    pub fn submit_all(
        &self,
        jobs: Vec<(Job, impl FnMut(Update) -> bool + Send + 'static)>,
    ) -> std::result::Result<Vec<JobId>, JobError> {
        jobs.iter().try_for_each(|(job, _)| self.shared.card.check(job))?;
        let submitted = jobs.into_iter().map(|(job, updates)| Submitted {
            id: self.next_id(),
            job: Box::new(job),
            updates: Box::new(updates),
        });
        let submitted: Vec<Submitted> = submitted.collect();
        let ids: Vec<JobId> = submitted.iter().map(|own| own.id).collect();
        self.enter(ids.len())?;
        self.send(Command::Submit(submitted)).inspect_err(|_| self.leave(ids.len()))?;
        Ok(ids)
    }

    /// Takes places in the queue.
    fn enter(&self, places: usize) -> std::result::Result<(), JobError> {
        let most = self.shared.options.queue;
        let waiting = self.shared.state.waiting.fetch_add(places, Ordering::AcqRel);
        if waiting + places > most {
            self.leave(places);
            let turned_away = &self.shared.state.turned_away;
            turned_away.fetch_add(places as u64, Ordering::Relaxed);
            return Err(JobError::QueueFull { waiting, most });
        }
        Ok(())
    }

    /// Gives places in the queue back.
    fn leave(&self, places: usize) {
        self.shared.state.waiting.fetch_sub(places, Ordering::AcqRel);
    }

    /// Cancels a job: it ends with [`crate::Finish::Cancelled`] before the next step. Jobs that
    /// have ended are ignored.
    pub fn cancel(&self, id: JobId) {
        let _ = self.send(Command::Cancel(id));
    }

    /// What the engine was doing behind its last step.
    pub fn load(&self) -> Load {
        let state = &self.shared.state;
        let mut load = state.load.lock().unwrap_or_else(PoisonError::into_inner).clone();
        load.waiting = state.waiting.load(Ordering::Acquire);
        load.totals.refused += state.turned_away.load(Ordering::Relaxed);
        load
    }

    /// What each head of a job that decodes holds, or held in the end for the 32 jobs that ended
    /// last; `None` for other jobs.
    ///
    /// # Errors
    /// [`JobError::Stopped`].
    pub fn picture(&self, id: JobId) -> std::result::Result<Option<Picture>, JobError> {
        self.ask(|reply| Command::Picture { id, reply })
    }

    /// Prefills and compresses a document under a name, for jobs that continue it.
    ///
    /// # Errors
    /// [`JobError`]: a name that is taken, a document that does not fit.
    pub fn compress(
        &self,
        name: &str,
        tokens: Vec<u32>,
        policy: Arc<dyn Policy>,
    ) -> std::result::Result<ContextInfo, JobError> {
        self.compress_within(name, tokens, policy, Duration::MAX)
    }

    /// [`Self::compress`], given up after so much time.
    ///
    /// # Errors
    /// The errors of [`Self::compress`], and [`JobError::TooSlow`].
    pub fn compress_within(
        &self,
        name: &str,
        tokens: Vec<u32>,
        policy: Arc<dyn Policy>,
        patience: Duration,
    ) -> std::result::Result<ContextInfo, JobError> {
        self.enter(1)?;
        let (reply, answer) = channel();
        let (id, name) = (self.next_id(), name.to_string());
        let sent = self.send(Command::Compress { id, name, tokens, policy, reply });
        sent.inspect_err(|_| self.leave(1))?;
        match answer.recv_timeout(patience) {
            Ok(answer) => answer,
            Err(RecvTimeoutError::Disconnected) => Err(stopped()),
            Err(RecvTimeoutError::Timeout) => {
                self.cancel(id);
                Err(JobError::TooSlow { patience })
            }
        }
    }

    fn next_id(&self) -> JobId {
        JobId(self.shared.next.fetch_add(1, Ordering::Relaxed))
    }

    /// The contexts, by name.
    ///
    /// # Errors
    /// [`JobError::Stopped`].
    pub fn contexts(&self) -> std::result::Result<Vec<ContextInfo>, JobError> {
        self.ask(Command::Contexts)
    }

    /// The tokens of a context's document; `None` where there is no context of this name. Does not
    /// wait for the engine.
    pub fn context_tokens(&self, name: &str) -> Option<usize> {
        let contexts = self.shared.state.contexts.lock();
        contexts.unwrap_or_else(PoisonError::into_inner).get(name).copied()
    }

    /// Drops a context, and its file. Jobs that have started on it go on.
    ///
    /// # Errors
    /// [`JobError::UnknownContext`], [`JobError::ForeignFile`] for files that others have changed,
    /// and [`JobError::Model`] where a file cannot be removed.
    pub fn forget(&self, name: &str) -> std::result::Result<(), JobError> {
        let name = name.to_string();
        self.ask(|reply| Command::Forget { name, reply })?
    }

    /// Saves a context to the engine's folder of contexts, from where later engines load it.
    ///
    /// # Errors
    /// [`JobError::UnknownContext`], [`JobError::ForeignFile`] for files that others have written,
    /// and [`JobError::Model`] where a file cannot be written. Files that were saved before stay as
    /// they are then.
    pub fn save(&self, name: &str) -> std::result::Result<PathBuf, JobError> {
        let name = name.to_string();
        self.ask(|reply| Command::Save { name, reply })?
    }

    /// Refuses new jobs and waits for the others to end, at most `patience`; then cancels what is
    /// left. Returns the number of jobs that were cancelled.
    ///
    /// # Errors
    /// [`JobError::Stopped`].
    pub fn shut_down(&self, patience: Duration) -> std::result::Result<usize, JobError> {
        self.ask(|reply| Command::ShutDown { patience, reply })
    }

    /// Whether the engine takes jobs: not after it has been shut down, and not after a failure that
    /// ended its thread.
    pub fn is_open(&self) -> bool {
        !self.shared.state.is_closed.load(Ordering::Acquire)
    }

    /// The time since the engine's thread last began a turn. It begins one at least every second,
    /// unless a layer of a long prompt takes longer, or a device or another rank does not answer.
    pub fn since_turn(&self) -> Duration {
        let turn = self.shared.state.turn.lock().unwrap_or_else(PoisonError::into_inner);
        turn.map(|turn| turn.elapsed()).unwrap_or_default()
    }

    fn send(&self, command: Command) -> std::result::Result<(), JobError> {
        if self.shared.state.is_closed.load(Ordering::Acquire) {
            return Err(stopped());
        }
        let commands = self.shared.commands.lock().unwrap_or_else(PoisonError::into_inner);
        commands.send(command).map_err(|_| stopped())
    }

    fn ask<T>(
        &self,
        command: impl FnOnce(Sender<T>) -> Command,
    ) -> std::result::Result<T, JobError> {
        let (reply, answer) = channel();
        self.send(command(reply))?;
        answer.recv().map_err(|_| stopped())
    }
}

fn stopped() -> JobError {
    JobError::Stopped { reason: "its thread has ended".into() }
}

impl ModelCard {
    fn new(model: &Model) -> Self {
        let chat = match model.chat_template() {
            Ok(chat) => Some(Ok(chat.clone())),
            Err(ModelError::ChatTemplate { reason }) => Some(Err(reason)),
            Err(_) => None,
        };
        Self {
            name: model.name().to_string(),
            config: model.config().clone(),
            tokenizer: model.tokenizer().cloned(),
            chat,
            dtype: model.llama().dtype(),
            device: kv_core::device_name(&model.llama().device()).to_string(),
        }
    }

    /// Checks a job's prompt and settings.
    fn check(&self, job: &Job) -> Result<()> {
        let request = &job.request;
        request.sampling.validate()?;
        if request.tokens.is_empty() {
            return Err(ModelError::EmptyPrompt);
        }
        if !request.question.is_empty() {
            let actual = request.question.len();
            return Err(ModelError::UnequalPrompts { expected: 0, actual });
        }
        self.config.check_length(request.tokens.len())?;
        let vocabulary = self.config.vocab_size;
        match request.tokens.iter().find(|&&token| token as usize >= vocabulary) {
            Some(&token) => Err(ModelError::TokenOutOfRange { token, vocabulary }),
            None => Ok(()),
        }
    }
}
