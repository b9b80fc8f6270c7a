//! Batches of jobs that decode together.

use std::sync::Arc;

use kv_core::{KvCache, LayerCache};
use kv_kernels::largest_tensor;
use kv_parallel::ParallelError;
use kv_policies::{Policy, SlotWeights, build};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::EngineOptions;
use super::job::{Held, JobError, JobId};
use super::load::{JobLoad, Picture, Totals};
use super::places::{Offer, OfferKind};
use super::row::{Decision, Failed, Row};
use super::script::Script;
use crate::{Decoder, Finish, Model, ModelError, Sampling, Session, StepCounts};

/// Rows of one batch, some of which have a job.
pub(super) struct Group<'a> {
    decoder: Decoder<'a>,
    rows: Vec<Option<Row>>,
    /// Steps that have been counted.
    counted: StepCounts,
    /// Whether the device has failed: no step can follow.
    is_broken: bool,
    /// Whether the group is of one job, and ends with it.
    is_alone: bool,
    /// The last pictures of jobs that have ended.
    ended: Vec<(JobId, Picture)>,
}

/// What the first rank tells the others of a decode step: the token that each row drew, and the
/// decision that each row took on it.
#[derive(Serialize, Deserialize)]
struct Step {
    /// For each row, the token that it drew, −1 for logits that are not finite; `None` for rows
    /// that drew for no job.
    drawn: Vec<Option<i64>>,
    decisions: Vec<Option<Decision>>,
}

impl<'a> Group<'a> {
    /// A group with a sequence in it, within a part of the engine's bytes, in the place of a
    /// `former` group without jobs. Its ranks have equally many rows, however many slots their own
    /// heads take.
    ///
    /// # Errors
    /// [`ParallelError`] where the ranks have lost each other. Within: [`JobError::TooLarge`] where
    /// the sequence alone takes more, and the errors of the device.
    pub(super) fn with(
        model: &'a Model,
        one: Decoder<'a>,
        row: Row,
        room: usize,
        former: Option<Self>,
        (options, script): (&EngineOptions, &Script),
    ) -> Result<Result<Self, Failed<Row>>, ParallelError> {
        let session = one.session();
        let part = options.bytes / options.groups.max(1);
        let too_large = |needed| JobError::TooLarge {
            policy: session.policy().name().into(),
            needed,
            limit: part,
            fits: "give fewer tokens or a smaller budget, or a policy whose steps only append, \
                   such as `snapkv`"
                .into(),
        };
        let own = bytes_of(session.cache());
        let made = if session.appends_only() {
            // Its memory is free before the arena takes as much.
            drop(former);
            Self::arena(model, session.slot_weights(), options)
        } else if !script.agree(own <= part)? {
            Err(too_large(own))
        } else if session.has_replaceable_rows() {
            let one_row = match Self::row(session, former, part, script)? {
                Ok(one_row) => one_row,
                Err(error) => return Ok(Err(Box::new((error.into(), row)))),
            };
            let needed = bytes_of(one_row.cache());
            if !script.agree(needed <= part)? {
                return Ok(Err(Box::new((too_large(needed), row))));
            }
            // A row alone is never idle while steps run. Idle rows rest as copies of one more
            // sequence.
            let fit = script.least(part / needed.max(1))?;
            let rows = if fit > 2 { (fit - 1).min(options.rows) } else { 1 };
            Self::like(session, &one_row, rows)
        } else {
            return Ok(Ok(Self::alone(one, row)));
        };
        let mut group = match script.alike(made, "make a group")? {
            Ok(group) => group,
            Err(error) => return Ok(Err(Box::new((error, row)))),
        };
        if !script.agree(group.has_place(&one, room))? {
            return Ok(Err(Box::new((too_large(own), row))));
        }
        let joined = group.join(&one, row, room);
        Ok(script.alike(joined, "join a group")?.map(|()| group))
    }

    /// A row for the one sequence of `session`. The row also has the room of a row of the `former`
    /// group, unless it would then take more than `part` bytes.
    fn row(
        session: &Session<'a>,
        former: Option<Self>,
        part: usize,
        script: &Script,
    ) -> Result<Result<Session<'a>, ModelError>, ParallelError> {
        if let Some(former) = former {
            let wide = session.row_like(Some(former.decoder.session()));
            match script.alike(wide, "make a row")? {
                Ok(wide) if script.agree(bytes_of(wide.cache()) <= part)? => return Ok(Ok(wide)),
                Ok(_) => {}
                Err(error) => return Ok(Err(error)),
            }
        }
        script.alike(session.row_like(None), "make a row")
    }

    /// Rows like `one_row`, for the one sequence of `session` and others.
    fn like(session: &Session<'a>, one_row: &Session<'a>, rows: usize) -> Result<Self, JobError> {
        let mut group = Self::new(one_row.repeated(rows)?, rows)?;
        if rows > 1 {
            group.decoder = group.decoder.resting_like(session);
        }
        Ok(group)
    }

    /// Rows for policies whose steps append and attend to all live slots.
    fn arena(
        model: &'a Model,
        weights: SlotWeights,
        options: &EngineOptions,
    ) -> Result<Self, JobError> {
        let (slots, most) = (arena_slots(model, weights, options), arena_most(model, options));
        let policy = append_policy()?;
        let arena = Session::arena(model, policy, options.rows, slots, most, weights)?;
        Self::new(arena, options.rows)
    }

    fn new(session: Session<'a>, rows: usize) -> Result<Self, JobError> {
        let decoder = session.decoder(&vec![Sampling::greedy(); rows])?;
        let rows = (0..rows).map(|_| None).collect();
        let counted = StepCounts::default();
        Ok(Self { decoder, rows, counted, is_broken: false, is_alone: false, ended: Vec::new() })
    }

    /// A group of one job, whose policy has state that no other job can take over.
    fn alone(one: Decoder<'a>, row: Row) -> Self {
        let (rows, counted, ended) = (vec![Some(row)], StepCounts::default(), Vec::new());
        Self { decoder: one, rows, counted, is_broken: false, is_alone: true, ended }
    }

    /// Whether the group's only job has ended.
    pub(super) fn is_over(&self) -> bool {
        self.is_broken || (self.is_alone && self.is_idle())
    }

    /// Whether jobs decode.
    pub(super) fn is_idle(&self) -> bool {
        self.rows.iter().all(Option::is_none)
    }

    /// Jobs that decode.
    pub(super) fn running(&self) -> usize {
        self.rows.iter().flatten().count()
    }

    /// Whether a sequence could join, once a row and slots are free.
    pub(super) fn accepts(&self, one: &Decoder<'_>) -> bool {
        !self.is_alone && self.decoder.accepts(one)
    }

    /// Whether the group's rows are of a sequence's policy, whatever their room.
    pub(super) fn is_kin(&self, one: &Decoder<'_>) -> bool {
        let (own, other) = (self.decoder.session().cache(), one.session().cache());
        !self.is_alone && !self.is_arena() && own.origin == other.origin
    }

    /// The places that the group has for other jobs.
    pub(super) fn offer(&self) -> Offer {
        let session = self.decoder.session();
        let kind = if self.is_alone {
            OfferKind::Alone
        } else if self.is_arena() {
            let layers = session.cache().layers.iter();
            let slots = layers.map(LayerCache::free_in_arena).min().unwrap_or(0);
            OfferKind::Arena { weights: session.slot_weights(), slots }
        } else {
            let layers = session.cache().layers.iter();
            let least = layers.flat_map(|layer| layer.layout().capacities()).min();
            let capacity = least.copied().unwrap_or_default();
            OfferKind::Own { policy: Arc::new(session.policy().config()), capacity }
        };
        let rows = self.rows.iter().filter(|row| row.is_none()).count();
        Offer { kind, rows, is_idle: self.is_idle() }
    }

    /// Whether the group is an arena.
    pub(super) fn is_arena(&self) -> bool {
        self.decoder.session().cache().layers.iter().all(LayerCache::is_arena)
    }

    /// Whether there is a row and room for a sequence that the group [`Self::accepts`].
    pub(super) fn has_place(&self, one: &Decoder<'_>, room: usize) -> bool {
        self.rows.iter().any(Option::is_none) && self.decoder.has_room_for(one, room)
    }

    /// Gives a sequence a row, where it [has a place](Self::has_place).
    pub(super) fn join(
        &mut self,
        one: &Decoder<'_>,
        mut row: Row,
        room: usize,
    ) -> Result<(), Failed<Row>> {
        let Some(free) = self.rows.iter().position(Option::is_none) else {
            let reason = "all rows of its group are taken".into();
            return Err(Box::new((JobError::StepFailed { reason }, row)));
        };
        match self.decoder.join(free, one, room) {
            Ok(in_flight) => {
                row.skips = in_flight;
                self.rows[free] = Some(row);
                Ok(())
            }
            Err(error) => Err(Box::new((error.into(), row))),
        }
    }

    /// Runs a step for all jobs and tells them their tokens.
    ///
    /// # Errors
    /// [`ParallelError`] where the ranks have lost each other, or have drawn different tokens.
    pub(super) fn step(
        &mut self,
        model: &Model,
        script: &Script,
        totals: &mut Totals,
    ) -> Result<(), ParallelError> {
        let shaped = self.rows.iter().flatten().any(Row::needs_logits);
        self.decoder.set_overlapped(!shaped);
        let draws = match self.decoder.draws() {
            Ok(draws) => draws,
            Err(error) => {
                let error = script.failed(error, "decode a step")?;
                self.fail(&error.to_string(), totals);
                return Ok(());
            }
        };
        self.count(totals);
        let draws = self.rows.iter_mut().zip(draws).map(|(row, drawn)| {
            let row = row.as_mut()?;
            (!std::mem::take(&mut row.skips)).then_some(drawn)
        });
        let draws: Vec<Option<Option<u32>>> = draws.collect();
        let of_row = |drawn: &Option<Option<u32>>| drawn.map(|token| token.map_or(-1, i64::from));
        let drawn: Vec<Option<i64>> = draws.iter().map(of_row).collect();
        let step = script
            .choose(|| Step { decisions: self.decide(model, &draws), drawn: drawn.clone() })?;
        if step.drawn != drawn {
            let rank = model.llama().ranks().shard().rank();
            return Err(ParallelError::Diverged { rank });
        }
        for (at, decision) in step.decisions.into_iter().enumerate() {
            let (Some(decision), Some(row)) = (decision, &mut self.rows[at]) else { continue };
            if script.follows() {
                row.follow(decision);
            }
            totals.new_tokens += 1;
            match decision {
                Decision::Drawn => {}
                // No step is in flight where rows have shapers.
                Decision::Replaced(token) => {
                    if let Err(error) = self.decoder.replace_token(at, token) {
                        let error = script.failed(error, "replace a token")?;
                        self.fail(&error.to_string(), totals);
                        return Ok(());
                    }
                }
                Decision::Ended => self.leave(at, totals),
            }
        }
        Ok(())
    }

    /// Tells jobs their tokens. Returns the decision of each row: the token that its next step
    /// takes, or its end. Rows that drew for no job have `None`.
    fn decide(&mut self, model: &Model, draws: &[Option<Option<u32>>]) -> Vec<Option<Decision>> {
        let decoder = &self.decoder;
        let rows = self.rows.iter_mut().zip(draws).enumerate();
        rows.map(|(at, (row, drawn))| {
            let (row, drawn) = (row.as_mut()?, (*drawn)?);
            let has_position = decoder.session().has_position(at) || decoder.has_step_in_flight();
            Some(row.take(model, drawn, || decoder.row_logits(at), has_position))
        })
        .collect()
    }

    /// Ends the job of a row, and frees the row.
    fn leave(&mut self, at: usize, totals: &mut Totals) {
        let held = self.held(at);
        if let Some(row) = self.rows[at].take() {
            self.ended.push((row.id, self.picture_of(at, &row, false)));
            match row.end(held) {
                Some(Finish::Cancelled) => totals.cancelled += 1,
                Some(_) => totals.ended += 1,
                None => totals.failed += 1,
            }
        }
        if let Err(error) = self.decoder.leave(at) {
            self.fail(&error.to_string(), totals);
        }
    }

    /// Fails all jobs: the device has failed them together.
    fn fail(&mut self, reason: &str, totals: &mut Totals) {
        self.is_broken = true;
        for mut row in self.rows.iter_mut().filter_map(Option::take) {
            let reason = reason.to_string();
            row.tell(super::Update::Failed(JobError::StepFailed { reason }));
            totals.failed += 1;
        }
    }

    /// Cancels a job; returns whether it was here.
    pub(super) fn cancel(&mut self, id: JobId, totals: &mut Totals) -> bool {
        let is_it = |row: &Option<Row>| row.as_ref().is_some_and(|row| row.id == id);
        let Some(at) = self.rows.iter().position(is_it) else { return false };
        if let Some(row) = &mut self.rows[at] {
            row.cancel();
        }
        self.leave(at, totals);
        true
    }

    /// Cancels all jobs; returns how many.
    pub(super) fn cancel_all(&mut self, totals: &mut Totals) -> usize {
        let ids: Vec<JobId> = self.rows.iter().flatten().map(|row| row.id).collect();
        ids.iter().filter(|&&id| self.cancel(id, totals)).count()
    }

    /// What a row holds.
    fn held(&self, at: usize) -> Held {
        held_in(self.decoder.session(), at)
    }

    /// The jobs' load.
    pub(super) fn loads(&self) -> impl Iterator<Item = JobLoad> {
        let session = self.decoder.session();
        let remembered = remembered(session);
        let rows = self.rows.iter().enumerate();
        rows.filter_map(move |(at, row)| {
            let row = row.as_ref()?;
            Some(JobLoad {
                id: row.id,
                policy: row.policy.clone(),
                prompt_tokens: row.prompt_tokens,
                new_tokens: row.new_tokens(),
                held: held_of(session, at, remembered),
                decoding: row.began.elapsed(),
            })
        })
    }

    /// What each head of a job holds.
    pub(super) fn picture(&self, id: JobId) -> Option<Picture> {
        let mut rows = self.rows.iter().enumerate();
        rows.find_map(|(at, row)| {
            let row = row.as_ref().filter(|row| row.id == id)?;
            Some(self.picture_of(at, row, true))
        })
    }

    fn picture_of(&self, at: usize, row: &Row, is_running: bool) -> Picture {
        let tokens = row.prompt_tokens + row.new_tokens();
        Picture { tokens, kept: kept_in(self.decoder.session().cache(), at), is_running }
    }

    /// The last pictures of the jobs that have ended since the last call.
    pub(super) fn take_ended(&mut self) -> Vec<(JobId, Picture)> {
        std::mem::take(&mut self.ended)
    }

    /// The share of the group that jobs have: of an arena's slots, of other groups' rows, or where
    /// a job is alone, of the group's `part` of the engine's bytes.
    pub(super) fn share(&self, part: usize) -> f64 {
        if self.is_alone {
            return (self.bytes() as f64 / part.max(1) as f64).min(1.0);
        }
        let rows = self.running() as f64 / self.rows.len().max(1) as f64;
        let layers = self.decoder.session().cache().layers.iter();
        let slots = layers.filter(|layer| layer.is_arena()).map(LayerCache::share_of_arena);
        slots.fold(rows, f64::max)
    }

    /// Bytes that the group's cache takes.
    pub(super) fn bytes(&self) -> usize {
        self.decoder.session().cache().memory().total()
    }

    /// Counts the steps since the last call.
    fn count(&mut self, totals: &mut Totals) {
        let now = self.decoder.counts();
        totals.replayed_steps += now.replayed - self.counted.replayed;
        totals.launched_steps += now.launched - self.counted.launched;
        totals.recordings += now.recordings - self.counted.recordings;
        self.counted = now;
    }
}

/// The policy of an arena's steps: they append and attend to all live slots.
fn append_policy() -> Result<Arc<dyn Policy>, JobError> {
    Ok(build(&json!({ "policy": "full" })).map_err(ModelError::from)?)
}

/// Slots of a layer of an arena that takes a part of the engine's bytes.
pub(super) fn arena_slots(model: &Model, weights: SlotWeights, options: &EngineOptions) -> usize {
    let config = model.config();
    // A position, and the weights.
    let scalars = 1 + usize::from(weights.weighted) + usize::from(weights.numerators);
    let slot = 2 * config.head_dim * model.llama().dtype().size() + scalars * size_of::<i32>();
    let part = options.bytes / options.groups.max(1) / (slot * config.num_layers).max(1);
    // More slots than all rows can use, or than one tensor of the device holds, serve nobody.
    let useful = options.rows * config.num_kv_heads * (config.max_positions + 1);
    let row = config.head_dim * model.llama().dtype().size();
    let largest = largest_tensor(&model.llama().device()).map_or(usize::MAX, |bytes| bytes / row);
    // The pool has a few slots more than its sequences.
    part.min(useful).min(largest.saturating_sub(LayerCache::SCRATCH))
}

/// The most slots of a head of an arena.
fn arena_most(model: &Model, options: &EngineOptions) -> usize {
    let config = model.config();
    let all = arena_slots(model, SlotWeights::NONE, options) / config.num_kv_heads.max(1);
    // One slot more than positions: a step begins before the host has seen the last token.
    all.min(config.max_positions + 1)
}

/// Bytes of a cache of one sequence.
pub(super) fn bytes_of(cache: &KvCache) -> usize {
    cache.memory().total()
}

/// What a row of a session holds. Bytes are of all ranks: each has as many.
pub(super) fn held_in(session: &Session<'_>, at: usize) -> Held {
    held_of(session, at, remembered(session))
}

/// Bytes that a policy remembers of each row beside its slots: on the device, and in host memory.
/// Policies remember nothing of an arena's rows.
fn remembered(session: &Session<'_>) -> [usize; 2] {
    let cache = session.cache();
    if cache.layers.iter().all(LayerCache::is_arena) {
        return [0, 0];
    }
    let (memory, rows) = (cache.memory(), cache.batch().max(1));
    [memory.policy / rows, memory.host / rows]
}

fn held_of(session: &Session<'_>, at: usize, [own, host]: [usize; 2]) -> Held {
    let cache = session.cache();
    let (mut slots, mut live_bytes, mut bytes, mut ranges, mut full_slot) = (0, own, own, 0, 0);
    for layer in &cache.layers {
        let heads = layer.layout().kv_heads();
        let rows = at * heads..(at + 1) * heads;
        let bare = 2 * layer.head_dim() * layer.options().dtype.size() + size_of::<i32>();
        let SlotWeights { weighted, numerators } = SlotWeights::of(layer);
        // Elsewhere the policy's own bytes have the numerators.
        let weights = usize::from(weighted) + usize::from(numerators && layer.is_arena());
        let slot = bare + weights * size_of::<f32>();
        let used = layer.layout().lengths()[rows.clone()].iter().sum::<usize>();
        slots += used;
        live_bytes += slot * used;
        bytes += slot * layer.layout().capacities()[rows].iter().sum::<usize>();
        ranges += heads;
        full_slot += bare * heads;
    }
    let full_bytes = full_slot * cache.seen.get(at).copied().unwrap_or_default();
    let ranks = session.model().llama().ranks().shard().world();
    Held {
        tokens: slots as f64 / ranges.max(1) as f64,
        live_bytes: live_bytes * ranks,
        bytes: bytes * ranks,
        host_bytes: host * ranks,
        full_bytes: full_bytes * ranks,
    }
}

/// Slots that each head of a row holds, `[layers][Hkv]`.
fn kept_in(cache: &KvCache, at: usize) -> Vec<Vec<usize>> {
    let layers = cache.layers.iter();
    let of = |layer: &LayerCache| {
        let heads = layer.layout().kv_heads();
        layer.layout().lengths()[at * heads..(at + 1) * heads].to_vec()
    };
    layers.map(of).collect()
}
