//! The thread that owns the device, and the order of its work.
//!
//! Between two decode steps of every group, the thread computes some layers of a prompt. Two
//! prompts share this time where the second one is much shorter than the first.
//!
//! Work on a prompt is cut between layers, not between tokens. Every policy then sees whole layers,
//! as it does alone, and only one layer's keys and values are whole at a time.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use kv_core::MemoryReport;
use kv_parallel::ParallelError;
use kv_policies::{Policy, SlotWeights};

use super::conditions::{check_alike, check_memory};
use super::context::{ContextInfo, Contexts, KeptContext};
use super::group::{Group, arena_slots};
use super::job::{Ended, Held, Job, JobError, JobId, Started, Update};
use super::load::{JobLoad, Load, Picture, Totals};
use super::pace::Pace;
use super::places::{Limits, Offer, Place};
use super::prefixes::Prefixes;
use super::repeated::Repeated;
use super::row::{Failed, Row, Updates};
use super::script::{Script, Told, Turn};
use super::start::{Opened, Ready, Starting, Waiting, open, room_of};
use super::{EngineOptions, State};
use crate::{Decoder, Finish, Model, ModelError};

/// How long a job may be overtaken by jobs that fit where it does not.
const OVERTAKEN: Duration = Duration::from_secs(5);
/// The most jobs that wait for a row behind their compressed prompts, which take memory of their
/// own.
const PARKED: usize = 2;
/// Prompts that share the time; and how many times shorter a prompt must be than the one that
/// it need not wait for. Prompts of similar lengths would only delay each other.
const STARTING: usize = 2;
const SHORTER: usize = 4;
/// How long a prompt is computed before the engine looks for commands, where nothing decodes.
const ALONE: Duration = Duration::from_millis(50);
/// How long an engine without work waits for a command.
const IDLE: Duration = Duration::from_secs(1);
/// How many jobs that have ended still have a picture: a short answer ends before anybody asks.
const PICTURES: usize = 32;
/// How often handles see a new load.
const PUBLISHED: Duration = Duration::from_millis(50);

/// What a handle asks of the thread.
pub(super) enum Command {
    Submit(Vec<Submitted>),
    Cancel(JobId),
    Picture {
        id: JobId,
        reply: Sender<Option<Picture>>,
    },
    Compress {
        id: JobId,
        name: String,
        tokens: Vec<u32>,
        policy: Arc<dyn Policy>,
        reply: Sender<Result<ContextInfo, JobError>>,
    },
    Contexts(Sender<Vec<ContextInfo>>),
    Forget {
        name: String,
        reply: Sender<Result<(), JobError>>,
    },
    Save {
        name: String,
        reply: Sender<Result<PathBuf, JobError>>,
    },
    ShutDown {
        patience: Duration,
        reply: Sender<usize>,
    },
}

impl Command {
    /// How many places in the queue it takes.
    fn places(&self) -> usize {
        match self {
            Self::Submit(jobs) => jobs.len(),
            Self::Compress { .. } => 1,
            _ => 0,
        }
    }
}

/// A job that was submitted.
pub(super) struct Submitted {
    pub(super) id: JobId,
    pub(super) job: Box<Job>,
    pub(super) updates: Updates,
}

/// The engine's thread.
pub(super) struct Worker<'a> {
    model: &'a Model,
    options: EngineOptions,
    state: Arc<State>,
    queue: VecDeque<Waiting>,
    /// Prompts whose layers are being computed, in the order in which they began. The second one is
    /// much shorter than the first.
    starting: Vec<Starting<'a>>,
    /// Jobs whose prompts are compressed and that found no free row yet, the oldest first.
    ready: Vec<Parked<'a>>,
    groups: Vec<Group<'a>>,
    /// The last pictures of jobs that have ended, the oldest first.
    pictures: VecDeque<(JobId, Picture)>,
    contexts: Contexts<'a>,
    prefixes: Prefixes,
    /// A compressed prompt that jobs in the queue have, too.
    repeated: Option<Repeated<'a>>,
    pace: Pace,
    totals: Totals,
    published: Instant,
    closing: Option<Closing>,
    script: Script,
}

/// A job that takes its place, and since when it waits for it: a place that was claimed for it may
/// turn out to be too small.
struct Parked<'a> {
    ready: Box<Ready<'a>>,
    place: Option<Place>,
    since: Instant,
}

struct Closing {
    until: Instant,
    replies: Vec<Sender<usize>>,
}

impl<'a> Worker<'a> {
    /// # Errors
    /// [`JobError::Model`] where the ranks have lost each other, [`JobError::NoMemory`],
    /// [`JobError::NoRoom`].
    pub(super) fn new(
        model: &'a Model,
        options: EngineOptions,
        state: Arc<State>,
    ) -> Result<Self, JobError> {
        check_memory(&model.llama().device(), &options)?;
        let shard = model.llama().ranks().shard();
        let script = Script::of(options.meeting.as_ref(), shard.is_first());
        let folder = options.contexts.clone().map(|folder| match shard.is_part() {
            true => folder.join(format!("rank-{}-of-{}", shard.rank(), shard.world())),
            false => folder,
        });
        check_alike(model, &options, &script)?;
        let mut contexts = Contexts::load(model, options.context_bytes, folder);
        let first = script.choose(|| contexts.documents()).map_err(ModelError::from)?;
        let own = contexts.documents();
        let mut shared = Vec::new();
        for (name, document) in first {
            // A folder that was restored in part may have other documents under these names.
            if script.agree(own.get(&name) == Some(&document)).map_err(ModelError::from)? {
                shared.push(name);
            }
        }
        contexts.keep_only(&shared);
        state.note_contexts(contexts.lengths());
        let heads = model.config().num_kv_heads.max(1);
        let most_slots = arena_slots(model, SlotWeights::NONE, &options) / heads;
        if most_slots == 0 {
            let (bytes, groups) = (options.bytes, options.groups.max(1));
            let config = model.config();
            let slot = 2 * config.head_dim * model.llama().dtype().size() + size_of::<i32>();
            let token = slot * heads * config.num_layers;
            return Err(JobError::NoRoom { bytes, groups, token });
        }
        state.most_slots.store(most_slots, Ordering::Release);
        let prefixes = Prefixes::new(options.prefix_bytes);
        let pace = Pace::new(options.prefill_share);
        Ok(Self {
            model,
            options,
            state,
            queue: VecDeque::new(),
            starting: Vec::new(),
            ready: Vec::new(),
            groups: Vec::new(),
            pictures: VecDeque::new(),
            contexts,
            prefixes,
            repeated: None,
            pace,
            totals: Totals::default(),
            published: Instant::now(),
            closing: None,
            script,
        })
    }

    /// Serves until all handles are gone, or until it is shut down.
    ///
    /// # Errors
    /// [`ParallelError`] where the ranks have lost each other.
    pub(super) fn run(mut self, commands: &Receiver<Command>) -> Result<(), ParallelError> {
        loop {
            self.state.note_turn();
            if !self.take_commands(commands)? {
                self.cancel_all();
                return Ok(());
            }
            self.admit()?;
            let began = Instant::now();
            let steps = self.groups.iter().any(|group| !group.is_idle());
            let prompts = self.prefill(steps)?;
            let prefilled = began.elapsed();
            self.join()?;
            let joined = began.elapsed();
            for group in &mut self.groups {
                if !group.is_idle() {
                    group.step(self.model, &self.script, &mut self.totals)?;
                }
            }
            if steps {
                self.pace.note(prompts, began.elapsed());
                tracing::debug!(
                    "a turn: {prefilled:?} for {prompts} tokens of layers, {:?} for rows that \
                     joined, {:?} for steps of {} rows",
                    joined - prefilled,
                    began.elapsed() - joined,
                    self.groups.iter().map(Group::running).sum::<usize>(),
                );
            }
            self.keep_pictures();
            self.groups.retain(|group| !group.is_over());
            self.publish();
            if self.closes()? {
                // Jobs that came in between are refused; whoever else asks hears that it has ended.
                while let Ok(command) = commands.try_recv() {
                    if command.places() > 0 {
                        self.obey(command)?;
                    }
                }
                return Ok(());
            }
        }
    }

    /// Whether there is nothing to do before the next command.
    fn is_idle(&self) -> bool {
        self.queue.is_empty()
            && self.starting.is_empty()
            && self.ready.is_empty()
            && self.groups.iter().all(Group::is_idle)
    }

    /// Takes all commands, and waits for one where there is nothing else to do. Returns `false`
    /// once all handles are gone.
    fn take_commands(&mut self, commands: &Receiver<Command>) -> Result<bool, ParallelError> {
        let (mut taken, mut is_over) = (Vec::new(), false);
        let waits = self.is_idle() && self.closing.is_none();
        if waits {
            self.publish_now();
        }
        let script = self.script.clone();
        let turn = script.choose(|| {
            if waits {
                match commands.recv_timeout(IDLE) {
                    Ok(command) => taken.push(command),
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => is_over = true,
                }
            }
            loop {
                match commands.try_recv() {
                    Ok(command) => taken.push(command),
                    Err(TryRecvError::Empty) => break,
                    Err(TryRecvError::Disconnected) => {
                        is_over = true;
                        break;
                    }
                }
            }
            let commands = match &self.script {
                Script::Alone => Vec::new(),
                _ => taken.iter().filter_map(Told::of).collect(),
            };
            Turn { commands, is_over }
        })?;
        if self.script.follows() {
            for told in turn.commands {
                match told.command() {
                    Ok(command) => {
                        self.state.waiting.fetch_add(command.places(), Ordering::AcqRel);
                        taken.push(command);
                    }
                    // The first rank has built the policy.
                    Err(error) => tracing::error!("a command of rank 0: {error}"),
                }
            }
        }
        let goes_on = !turn.is_over || !taken.is_empty();
        taken.into_iter().try_for_each(|command| self.obey(command))?;
        Ok(goes_on)
    }

    fn obey(&mut self, command: Command) -> Result<(), ParallelError> {
        match command {
            Command::Submit(jobs) => {
                for Submitted { id, job, updates } in jobs {
                    let since = Instant::now();
                    self.enqueue(Waiting::Job { id, job, updates, since, place: None })?;
                }
            }
            Command::Cancel(id) => self.cancel(id),
            Command::Picture { id, reply } => {
                let running = self.groups.iter().find_map(|group| group.picture(id));
                let ended = || self.pictures.iter().find(|(own, _)| *own == id);
                drop(reply.send(running.or_else(|| ended().map(|(_, picture)| picture.clone()))));
            }
            Command::Compress { id, name, tokens, policy, reply } => {
                self.enqueue(Waiting::Context { id, name, tokens, policy, reply })?;
            }
            Command::Contexts(reply) => drop(reply.send(self.contexts.list())),
            Command::Forget { name, reply } => {
                let may = self.contexts.may_forget(&name);
                let may = self.on_all(may, || format!("delete context `{name}`"))?;
                let forgotten = may.and_then(|()| self.contexts.forget(&name));
                self.state.note_contexts(self.contexts.lengths());
                drop(reply.send(forgotten));
            }
            Command::Save { name, reply } => {
                let was_saved = self.contexts.is_saved(&name);
                let saved = self.contexts.save(&name);
                let is_written = saved.is_ok();
                let saved = self.on_all(saved, || format!("save context `{name}`"))?;
                if saved.is_err() && is_written && !was_saved {
                    // A part of a context is no context.
                    if let Err(error) = self.contexts.forget_files(&name) {
                        tracing::error!("{error}");
                    }
                }
                drop(reply.send(saved));
            }
            Command::ShutDown { patience, reply } => {
                let until = Instant::now() + patience;
                let closing = self.closing.get_or_insert(Closing { until, replies: Vec::new() });
                closing.until = closing.until.min(until);
                closing.replies.push(reply);
            }
        }
        Ok(())
    }

    /// The result where all ranks have succeeded.
    fn on_all<T>(
        &self,
        own: Result<T, JobError>,
        action: impl Fn() -> String,
    ) -> Result<Result<T, JobError>, ParallelError> {
        let all = self.script.agree(own.is_ok())?;
        // The first rank's own error is its answer.
        if let (true, Err(error)) = (self.script.follows(), &own) {
            let shard = self.model.llama().ranks().shard();
            match error {
                JobError::UnknownContext { .. } => {}
                error => tracing::error!("{shard} could not {}: {error}", action()),
            }
        }
        Ok(own.and_then(|own| match all {
            true => Ok(own),
            false => Err(JobError::OtherRank { action: action() }),
        }))
    }

    /// Refuses what can never run.
    fn check(&self, waiting: &Waiting) -> Result<(), JobError> {
        if self.closing.is_some() || self.state.is_closed.load(Ordering::Acquire) {
            return Err(JobError::ShuttingDown);
        }
        match waiting {
            Waiting::Job { job, .. } => {
                let context = job.context.as_deref();
                let kept = context.map(|name| self.contexts.kept(name));
                if let (Some(name), Some(None)) = (context, kept) {
                    return Err(self.contexts.unknown(name));
                }
                let place = waiting.place_in(self.model, kept.flatten());
                let Some(Place::Arena { weights, slots: needed }) = place else {
                    return self.check_least(job);
                };
                let all = arena_slots(self.model, weights, &self.options);
                if needed <= all {
                    return Ok(());
                }
                let config = self.model.config();
                let excess = (needed - all).div_ceil(config.num_kv_heads.max(1));
                let new = job.request.new_tokens.min(config.max_positions);
                let fewer = new.saturating_sub(excess);
                if let Some(name) = context {
                    let fits = match fewer {
                        0 => "compress the document to fewer tokens".into(),
                        fewer => format!("ask for at most {fewer} new tokens"),
                    };
                    return Err(self.context_too_large(name, needed, all, fits));
                }
                let fits = match fewer {
                    0 => format!(
                        "give a smaller budget, or a prompt of which at most {} tokens are kept",
                        all / config.num_kv_heads.max(1)
                    ),
                    fewer => {
                        format!("ask for at most {fewer} new tokens, or give a smaller budget")
                    }
                };
                let (needed, limit) = self.in_bytes(needed, all);
                Err(JobError::TooLarge { policy: job.policy.name().into(), needed, limit, fits })
            }
            Waiting::Context { name, tokens, policy, .. } => {
                let capabilities = policy.capabilities();
                if capabilities.changes_decode || capabilities.renumbers {
                    return Err(JobError::ContextPolicy { policy: policy.name().into() });
                }
                let least = least_bytes(self.model, &**policy, tokens.len());
                self.contexts.check(name, least)?;
                let (slots, weights) = (policy.least_kept(tokens.len()), SlotWeights::NONE);
                let kept = KeptContext { tokens: tokens.len(), slots, weights };
                self.check_asked(name, kept)
            }
        }
    }

    /// Refuses a context of which no group has room for a copy, a question of one token and an
    /// answer.
    fn check_asked(&self, name: &str, kept: KeptContext) -> Result<(), JobError> {
        let all = arena_slots(self.model, kept.weights, &self.options);
        let room = room_of(self.model, kept.tokens + 1, 1);
        let needed = self.model.config().num_kv_heads * (kept.slots + 1 + room);
        if needed <= all {
            return Ok(());
        }
        let fits = "give fewer tokens or a smaller budget".into();
        Err(self.context_too_large(name, needed, all, fits))
    }

    fn context_too_large(&self, name: &str, needed: usize, all: usize, fits: String) -> JobError {
        let (needed, limit) = self.in_bytes(needed, all);
        JobError::ContextTooLarge { name: name.into(), needed, limit, fits }
    }

    /// The bytes of `needed` slots of each layer, and of all slots that a group has, `all` of each
    /// layer.
    fn in_bytes(&self, needed: usize, all: usize) -> (usize, usize) {
        let part = self.options.bytes / self.options.groups.max(1);
        ((needed as f64 / all.max(1) as f64 * part as f64) as usize, part)
    }

    /// Refuses a job whose compressed prompt alone takes more than a group has, as far as that is
    /// known before the prompt is computed.
    fn check_least(&self, job: &Job) -> Result<(), JobError> {
        let tokens = job.request.tokens.len();
        let limit = self.options.bytes / self.options.groups.max(1);
        let needed = least_bytes(self.model, &*job.policy, tokens);
        if needed <= limit {
            return Ok(());
        }
        let fit = (tokens as f64 * limit as f64 / needed as f64) as usize;
        let keeps_all = job.policy.least_kept(tokens) >= tokens;
        let other = if keeps_all { "a policy that drops some" } else { "a smaller budget" };
        let fits = format!("give fewer than {fit} tokens, or {other}");
        Err(JobError::TooLarge { policy: job.policy.name().into(), needed, limit, fits })
    }

    /// Adds to the queue, or refuses.
    ///
    /// # Errors
    /// [`ParallelError`] where the ranks have lost each other.
    fn enqueue(&mut self, mut waiting: Waiting) -> Result<(), ParallelError> {
        let checked = self.check(&waiting);
        let is_taken = match self.state.is_closed.load(Ordering::Acquire) {
            // The other ranks have ended.
            true => false,
            // A rank whose heads keep more of a context than the first rank's might refuse a job
            // that the first rank takes.
            false => self.script.choose(|| checked.is_ok())?,
        };
        let taken = if is_taken { Ok(()) } else { checked.and(Err(JobError::ShuttingDown)) };
        match taken {
            Ok(()) => {
                let found = self.place(&waiting);
                if let Waiting::Job { job, place, .. } = &mut waiting
                    && job.context.is_none()
                {
                    *place = found;
                }
                self.totals.submitted += u64::from(matches!(waiting, Waiting::Job { .. }));
                self.queue.push_back(waiting);
            }
            Err(error) => {
                self.state.waiting.fetch_sub(1, Ordering::AcqRel);
                self.totals.refused += u64::from(matches!(waiting, Waiting::Job { .. }));
                waiting.fail(error);
            }
        }
        Ok(())
    }

    /// Begins with the next prompt that has room behind it.
    fn admit(&mut self) -> Result<(), ParallelError> {
        let queue = &self.queue;
        self.repeated.take_if(|own| !jobs_of(queue).any(|job| own.serves(job)));
        // At most so many sequences are outside of all groups.
        let outside = self.starting.len() + self.ready.len();
        let most = if self.starting.is_empty() { PARKED + 1 } else { PARKED };
        if self.starting.len() >= STARTING || outside >= most || self.queue.is_empty() {
            return Ok(());
        }
        let next = self.script.choose(|| self.next())?;
        let Some(waiting) = next.and_then(|at| self.queue.remove(at)) else { return Ok(()) };
        self.state.waiting.fetch_sub(1, Ordering::AcqRel);
        let place = self.place(&waiting);
        match self.begin(waiting) {
            Ok(mut starting) => {
                starting.place = place;
                starting.computed = self.starting.first().map_or(0, |first| first.computed);
                self.starting.push(starting);
            }
            Err(failed) => {
                let (error, waiting) = *failed;
                let error = self.script.failed(error, "begin a prompt")?;
                self.totals.failed += 1;
                waiting.fail(error);
            }
        }
        Ok(())
    }

    /// The place in the queue of the next prompt that has room beside the prompts that are on their
    /// way, and beside the jobs before it that have waited for long.
    fn next(&self) -> Option<usize> {
        let now = Instant::now();
        let is_late = |since: Instant| now.duration_since(since) > OVERTAKEN;
        // The place that such a job claimed was too small: it waits until a group is idle. A job of
        // an own policy lets jobs join an arena that is there, since it needs another group. A job
        // of an arena needs all of the groups to run empty.
        let late = self.ready.iter().find(|parked| is_late(parked.since));
        if late.is_some_and(|parked| parked.place.as_ref().is_none_or(Place::is_arena)) {
            return None;
        }
        // A prompt that is under way is passed by much shorter ones alone.
        let longest = self.starting.first().map_or(usize::MAX, |first| first.length() / SHORTER);
        let mut claims = self.claims();
        // Late jobs that find no place.
        let mut placeless = Vec::new();
        let offers: Vec<Offer> = self.groups.iter().map(Group::offer).collect();
        let groups = self.options.groups.max(1);
        for (at, waiting) in self.queue.iter().enumerate() {
            let Some(place) = self.place(waiting) else {
                if waiting.length() <= longest {
                    return Some(at);
                }
                continue;
            };
            let serves = |offer: &Offer| offer.serves(&place);
            let may = late.is_none() || (place.is_arena() && offers.iter().any(serves));
            let claimed: Vec<&Place> = claims.iter().collect();
            let slots = arena_slots(self.model, place.weights(), &self.options);
            let limits = Limits { groups, arena: (self.options.rows, slots) };
            let is_free = place.is_free(&claimed, &placeless, &offers, limits);
            if may && waiting.length() <= longest && is_free {
                return Some(at);
            }
            // Nobody takes the place of a job that has waited for long.
            if matches!(waiting, Waiting::Job { since, .. } if is_late(*since)) {
                if !is_free {
                    placeless.push(place.clone());
                }
                claims.push(place);
            }
        }
        None
    }

    /// The places that prompts which are on their way will take.
    fn claims(&self) -> Vec<Place> {
        let starting = self.starting.iter().map(|own| own.place.clone());
        starting.chain(self.ready.iter().map(|own| own.place.clone())).flatten().collect()
    }

    fn begin(&mut self, waiting: Waiting) -> Result<Starting<'a>, Failed<Waiting>> {
        if let Waiting::Job { job, .. } = &waiting
            && let Some(name) = &job.context
        {
            return match self.contexts.copy(name, job.request.tokens.len()) {
                Ok(session) => Ok(Starting::question(session, waiting)),
                Err(error) => Err(Box::new((error, waiting))),
            };
        }
        if let Waiting::Job { job, .. } = &waiting
            && let Some(repeated) = self.repeated.take_if(|own| own.serves(job))
        {
            let goes_on = jobs_of(&self.queue).any(|other| repeated.serves(other));
            let session = match goes_on {
                true => self.repeated.insert(repeated).session(),
                false => repeated.into_session(),
            };
            return Ok(Starting::copy(session, waiting));
        }
        Starting::prefill(self.model, waiting, &mut self.prefixes)
    }

    /// The place that a job's sequence will take; `None` for documents, and for jobs whose context
    /// is gone, which fail as soon as they begin.
    fn place(&self, waiting: &Waiting) -> Option<Place> {
        let Waiting::Job { job, place, .. } = waiting else { return None };
        if place.is_some() {
            return place.clone();
        }
        let kept = match job.context.as_deref() {
            Some(name) => Some(self.contexts.kept(name)?),
            None => None,
        };
        waiting.place_in(self.model, kept)
    }

    /// Computes some layers of the prompts that are on their way, in turns, or all layers where
    /// nothing decodes. Returns for how many tokens a layer was computed, each layer counted.
    fn prefill(&mut self, steps: bool) -> Result<usize, ParallelError> {
        let layers = self.model.config().num_layers;
        let began = Instant::now();
        let (mut done, mut most) = (0, None);
        loop {
            // The one for which less was computed since they share the time; the later of equals.
            let each = self.starting.iter().map(|own| own.computed).enumerate().rev();
            let Some((at, _)) = each.min_by_key(|(_, computed)| *computed) else { break };
            let tokens = self.starting[at].tokens(layers);
            let goes_on = self.script.choose(|| match steps {
                true => done < *most.get_or_insert(self.pace.layers(tokens) * tokens),
                false => began.elapsed() < ALONE,
            })?;
            if !goes_on {
                break;
            }
            done += tokens;
            self.starting[at].computed += tokens;
            match self.starting[at].layer() {
                Ok(true) => {}
                Ok(false) => {
                    let opened = self.starting.remove(at);
                    self.open(opened)?;
                    break;
                }
                Err(error) => {
                    let error = self.script.failed(error, "compute a prompt")?;
                    self.totals.failed += 1;
                    self.starting.remove(at).waiting.fail(error);
                    break;
                }
            }
        }
        Ok(done)
    }

    /// Takes a compressed prompt on.
    fn open(&mut self, mut starting: Starting<'a>) -> Result<(), ParallelError> {
        if let Some(prefix) = starting.take_prefix() {
            self.prefixes.keep(prefix);
        }
        let (shared, began) = (starting.cached, Instant::now());
        let place = starting.place.take();
        let (waiting, session, prefill) = match starting.finish() {
            Ok(finished) => finished,
            Err(failed) => {
                let (error, waiting) = *failed;
                let error = self.script.failed(error, "compress a prompt")?;
                self.totals.failed += 1;
                waiting.fail(error);
                return Ok(());
            }
        };
        match waiting {
            Waiting::Context { name, tokens, reply, .. } => {
                self.totals.prompt_tokens += (tokens.len() - shared) as u64;
                self.totals.cached_tokens += shared as u64;
                let fits = self.check_asked(&name, KeptContext::of(&session, tokens.len()));
                let inserted = fits.and_then(|()| self.contexts.insert(&name, tokens, session));
                let is_in = inserted.is_ok();
                let inserted = self.on_all(inserted, || format!("keep context `{name}`"))?;
                if is_in && inserted.is_err() {
                    // Not saved yet, so that nothing but memory is freed.
                    drop(self.contexts.forget(&name));
                }
                self.state.note_contexts(self.contexts.lengths());
                drop(reply.send(inserted));
            }
            Waiting::Job { id, job, updates, since, .. } => {
                if !self.repeated.as_ref().is_some_and(|repeated| repeated.serves(&job))
                    && let Some(new) = Repeated::of(&job, &session, jobs_of(&self.queue))
                {
                    self.repeated = Some(new);
                }
                let finished = began.elapsed();
                let own = job.request.tokens.len();
                let cached = job.context.as_deref().and_then(|name| self.contexts.tokens(name));
                let cached = cached.unwrap_or_default();
                self.totals.prompt_tokens += (own - shared) as u64;
                self.totals.cached_tokens += (cached.len() + shared) as u64;
                let started = Started {
                    prompt_tokens: own + cached.len(),
                    cached_tokens: cached.len() + shared,
                    waited: since.elapsed().saturating_sub(prefill),
                    prefill,
                    held: Held::default(),
                };
                let history = [cached, &job.request.tokens].concat();
                let at = (self.model, &self.script);
                match open(at, (id, job, updates), session, started, &history)? {
                    Opened::Ready(ready) => {
                        self.ready.push(Parked { ready, place, since: Instant::now() });
                    }
                    Opened::Ended(finish) => self.count_end(finish),
                }
                let drawn = began.elapsed() - finished;
                tracing::debug!("a prompt: {finished:?} for its end, {drawn:?} for its token");
                self.totals.new_tokens += 1;
            }
        }
        Ok(())
    }

    fn count_end(&mut self, finish: Option<Finish>) {
        match finish {
            Some(Finish::Cancelled) => self.totals.cancelled += 1,
            Some(_) => self.totals.ended += 1,
            None => self.totals.failed += 1,
        }
    }

    /// Gives jobs that are ready a row, where one is free.
    fn join(&mut self) -> Result<(), ParallelError> {
        for parked in std::mem::take(&mut self.ready) {
            let Parked { ready, place, since } = parked;
            // Ranks agree about a row, which takes time: they do where the first rank has one.
            let tries = self.script.choose(|| self.may_join(&ready))?;
            let waits = match tries {
                true => self.join_one(*ready)?,
                false => Some(*ready),
            };
            if let Some(ready) = waits {
                self.ready.push(Parked { ready: Box::new(ready), place, since });
            }
        }
        Ok(())
    }

    /// Whether this rank has a row for a job, or room for another group.
    fn may_join(&self, Ready { one, room, .. }: &Ready<'_>) -> bool {
        let serves = |group: &Group<'_>| group.accepts(one) && group.has_place(one, *room);
        self.groups.iter().any(serves) || self.may_add_group(one) || self.idle_group().is_some()
    }

    /// Gives a job a row on all ranks; gives the job back where it must wait.
    fn join_one(&mut self, ready: Ready<'a>) -> Result<Option<Ready<'a>>, ParallelError> {
        let Ready { one, row, room } = ready;
        for group in &mut self.groups {
            if !self.script.agree(group.accepts(&one))? {
                continue;
            }
            if self.script.agree(group.has_place(&one, room))? {
                let joined = group.join(&one, row, room);
                if let Err(failed) = self.script.alike(joined, "join a group")? {
                    self.fail_row(*failed);
                }
                return Ok(None);
            }
            // It waits until others leave.
            if !group.is_idle() {
                return Ok(Some(Ready { one, row, room }));
            }
        }
        let mut former = self.script.choose(|| self.idle_kin(&one))?;
        if former.is_none() && !self.may_add_group(&one) {
            former = self.script.choose(|| self.idle_group())?;
            if former.is_none() {
                return Ok(Some(Ready { one, row, room }));
            }
        }
        let former = former.map(|at| self.groups.remove(at));
        match Group::with(self.model, one, row, room, former, (&self.options, &self.script))? {
            Ok(group) => self.groups.push(group),
            Err(failed) => self.fail_row(*failed),
        }
        Ok(None)
    }

    fn fail_row(&mut self, (error, mut row): (JobError, Row)) {
        self.totals.failed += 1;
        row.tell(Update::Failed(error));
    }

    /// Whether there may be one group more, for a sequence.
    fn may_add_group(&self, one: &Decoder<'_>) -> bool {
        self.groups.len() < self.options.groups.max(1) && self.leaves_room(one)
    }

    /// A group that may make room for another one; if possible, a group that no prompt on its way
    /// needs.
    fn idle_group(&self) -> Option<usize> {
        let claims = self.claims();
        let claims: Vec<&Place> = claims.iter().collect();
        let offers: Vec<Offer> = self.groups.iter().map(Group::offer).collect();
        let idle = || (0..offers.len()).filter(|&at| offers[at].is_idle);
        idle().find(|&at| !offers[at].is_claimed(&claims)).or_else(|| idle().next())
    }

    /// A group without jobs whose rows are of a sequence's policy, but too small for it.
    fn idle_kin(&self, one: &Decoder<'_>) -> Option<usize> {
        self.groups.iter().position(|group| group.is_idle() && group.is_kin(one))
    }

    /// Whether a group for a sequence leaves one of several groups to policies whose steps only
    /// append: most policies are of this kind, and requests of the others may decode for long.
    fn leaves_room(&self, one: &Decoder<'_>) -> bool {
        let most = self.options.groups.max(1);
        let others = self.groups.iter().filter(|group| !group.is_arena()).count();
        one.session().appends_only() || most == 1 || others + 1 < most
    }

    fn cancel(&mut self, id: JobId) {
        let is_it = |waiting: &Waiting| match waiting {
            Waiting::Job { id: own, .. } | Waiting::Context { id: own, .. } => *own == id,
        };
        if let Some(at) = self.queue.iter().position(is_it) {
            self.state.waiting.fetch_sub(1, Ordering::AcqRel);
            self.queue.remove(at).into_iter().for_each(cancelled);
            self.totals.cancelled += 1;
        } else if let Some(at) = self.starting.iter().position(|own| is_it(&own.waiting)) {
            cancelled(self.starting.remove(at).waiting);
            self.totals.cancelled += 1;
        } else if let Some(at) = self.ready.iter().position(|parked| parked.ready.row.id == id) {
            end_parked(self.ready.remove(at));
            self.totals.cancelled += 1;
        } else {
            let totals = &mut self.totals;
            let _ = self.groups.iter_mut().any(|group| group.cancel(id, totals));
            self.keep_pictures();
        }
    }

    /// Keeps the last pictures of jobs that have ended.
    fn keep_pictures(&mut self) {
        self.pictures.extend(self.groups.iter_mut().flat_map(Group::take_ended));
        let forgotten = self.pictures.len().saturating_sub(PICTURES);
        self.pictures.drain(..forgotten);
    }

    /// Cancels everything; returns the number of jobs.
    fn cancel_all(&mut self) -> usize {
        let waiting = self.queue.drain(..).chain(self.starting.drain(..).map(|own| own.waiting));
        let waiting: Vec<Waiting> = waiting.collect();
        self.state.waiting.store(0, Ordering::Release);
        let mut count = waiting.len();
        waiting.into_iter().for_each(cancelled);
        count += self.ready.len();
        self.ready.drain(..).for_each(end_parked);
        self.totals.cancelled += count as u64;
        for group in &mut self.groups {
            count += group.cancel_all(&mut self.totals);
        }
        count
    }

    /// Whether the engine has shut down.
    fn closes(&mut self) -> Result<bool, ParallelError> {
        let Some(closing) = &self.closing else { return Ok(false) };
        if !self.script.choose(|| self.is_idle() || Instant::now() >= closing.until)? {
            return Ok(false);
        }
        let cancelled = self.cancel_all();
        self.publish_now();
        self.state.is_closed.store(true, Ordering::Release);
        for reply in self.closing.take().into_iter().flat_map(|closing| closing.replies) {
            let _ = reply.send(cancelled);
        }
        Ok(true)
    }

    fn publish(&mut self) {
        if self.published.elapsed() > PUBLISHED {
            self.publish_now();
        }
    }

    /// Shows handles the load.
    fn publish_now(&mut self) {
        self.published = Instant::now();
        let jobs: Vec<JobLoad> = self.groups.iter().flat_map(Group::loads).collect();
        let (options, shared) = (&self.options, self.contexts.bytes() + self.prefixes.bytes());
        // Of all ranks: each has as much, as far as their heads keep equal numbers of slots.
        let ranks = self.model.llama().ranks().shard().world();
        let part = options.bytes / options.groups.max(1);
        let load = Load {
            waiting: 0,
            prefilling: self.starting.len() + self.ready.len(),
            running: self.groups.iter().map(Group::running).sum(),
            bytes: jobs.iter().map(|job| job.held.bytes).sum::<usize>() + ranks * shared,
            allocated: ranks * (self.groups.iter().map(Group::bytes).sum::<usize>() + shared),
            most_bytes: ranks * (options.bytes + options.context_bytes + options.prefix_bytes),
            fullest: self.groups.iter().map(|group| group.share(part)).fold(0.0, f64::max),
            jobs,
            totals: self.totals,
        };
        *self.state.load.lock().unwrap_or_else(PoisonError::into_inner) = load;
    }
}

/// The jobs of a queue.
fn jobs_of(queue: &VecDeque<Waiting>) -> impl Iterator<Item = &Job> {
    queue.iter().filter_map(|waiting| match waiting {
        Waiting::Job { job, .. } => Some(&**job),
        Waiting::Context { .. } => None,
    })
}

/// Bytes of keys, values and positions that a policy keeps of a document at least, as far as it is
/// known before the document is computed.
fn least_bytes(model: &Model, policy: &dyn Policy, tokens: usize) -> usize {
    let kept = policy.least_kept(tokens);
    let (config, dtype) = (model.config(), model.llama().dtype());
    let (layers, heads) = (config.num_layers, config.num_kv_heads);
    let slots = MemoryReport::full(kept, layers, heads, config.head_dim, dtype);
    slots + kept * layers * heads * size_of::<i32>()
}

/// Tells a job that found no row that it is cancelled.
fn end_parked(parked: Parked<'_>) {
    let Ready { mut row, .. } = *parked.ready;
    row.cancel();
    row.end(Held::default());
}

/// Tells what waited that it is cancelled.
fn cancelled(waiting: Waiting) {
    match waiting {
        Waiting::Job { mut updates, .. } => {
            let (finish, tokens, held) = (Finish::Cancelled, 0, Held::default());
            let _ = updates(Update::Ended(Ended { finish, tokens, held }));
        }
        Waiting::Context { .. } => waiting.fail(JobError::ShuttingDown),
    }
}
