//! Generation on the device: a step draws tokens and decodes them without the host, which reads one
//! number a sequence.

mod joins;

use std::collections::BTreeMap;

use burn::tensor::{Int, Tensor};
use kv_core::{KvCache, is_cpu};
use kv_kernels::{DrawState, Reading, Recording, StepGraph, device_work, draw};
use kv_policies::LayerContext;

use super::Session;
use super::penalty::Penalty;
use crate::llama::BusyRows;
use crate::{ModelError, Result, Sampling};

/// Steps of a kind before one is recorded: kernels are compiled and tuned at their first use.
const WARM_UP: usize = 2;
/// Steps before one is recorded once other kinds are: most kernels are compiled by then.
const LATER_WARM_UP: usize = 1;
/// The most kinds of steps that are recorded. Each keeps the memory of its results.
const MOST_KINDS: usize = 4;

/// Sequences that draw their own tokens.
///
/// Steps are recorded where the device can (CUDA graphs, and wgpu's counterpart) and the policy's
/// steps ask nothing of the host ([`kv_policies::StepPlan::recordable`]). The third step is
/// recorded after it has run, and later steps of its kind are one launch each; steps of another
/// kind, such as rare ones that move many slots, are recorded beside them. After a step that needs
/// the host, steps are recorded anew. Only the thread that loaded the model and started the
/// session records, since devices record no tensors of other threads' work. Elsewhere every kernel
/// is launched by itself. While a decoder records, other threads' sessions wait; their other work
/// on the device should be announced ([`kv_kernels::device_work`]).
#[derive(Debug)]
pub struct Decoder<'a> {
    // Dropped first: they refer to tensors of the session and the state. `None` where steps are
    // never recorded.
    stages: Option<BTreeMap<Kinds, Stage>>,
    session: Session<'a>,
    state: DrawState,
    /// `None` where no sequence has one.
    penalty: Option<Penalty>,
    drawn: usize,
    /// The cache of one sequence, as which idle rows begin anew.
    rest: Option<KvCache>,
    /// The tokens that a step drew behind tokens that were appended; nobody has asked for them yet.
    unread: Option<Tensor<1, Int>>,
    /// Whether steps begin before the host has read the tokens that they decode.
    runs_ahead: bool,
    /// The tokens that the step ahead of the host draws.
    ahead: Option<Result<Tensor<1, Int>>>,
    failed: bool,
    counts: StepCounts,
}

/// How a decoder's steps ran.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StepCounts {
    /// Steps that were one launch of a recording.
    pub replayed: u64,
    /// Steps whose kernels were launched one by one.
    pub launched: u64,
    /// Recordings that were made.
    pub recordings: u64,
}

/// The kinds of a step's layers, in order ([`kv_policies::StepPlan::kind`]).
type Kinds = Vec<u32>;

/// Steps of one kind.
#[derive(Debug)]
enum Stage {
    /// Steps run so far.
    Counting(usize),
    Recorded(Box<Recorded>),
}

#[derive(Debug)]
struct Recorded {
    graph: StepGraph,
    /// Written by every replay, `[B]`.
    drawn: Tensor<1, Int>,
    /// Written by every replay, `[B, vocabulary]`.
    logits: Tensor<2>,
    /// By how much a step changes the lengths, `[B * Hkv]` a layer.
    growth: Vec<Vec<isize>>,
}

impl<'a> Session<'a> {
    /// Goes on with tokens that the device draws; `samplings` has one entry for each sequence.
    ///
    /// # Errors
    /// [`ModelError::InvalidSampling`]; [`ModelError::UnequalPrompts`] for another number of
    /// samplings than sequences; [`ModelError::UnknownHistory`] for a repetition penalty in a
    /// resumed session without [`Session::with_history`].
    pub fn decoder(self, samplings: &[Sampling]) -> Result<Decoder<'a>> {
        let _work = device_work();
        let (expected, actual) = (self.cache.batch(), samplings.len());
        if expected != actual {
            return Err(ModelError::UnequalPrompts { expected, actual });
        }
        let rows = samplings.iter().map(Sampling::settings).collect::<Result<Vec<_>>>()?;
        let mut state = DrawState::new(&rows, &self.cache.seen, &self.model.llama().device())?;
        self.ended.iter().try_for_each(|&row| state.end(row, self.cache.seen[row]))?;
        let penalty = self.penalty(samplings)?;
        // A penalty's tensors are made anew by every step.
        let stages = penalty.is_none().then(BTreeMap::new);
        Ok(Decoder {
            stages,
            session: self,
            state,
            penalty,
            drawn: 0,
            unread: None,
            runs_ahead: false,
            ahead: None,
            rest: None,
            failed: false,
            counts: StepCounts::default(),
        })
    }
}

impl Session<'_> {
    fn penalty(&self, samplings: &[Sampling]) -> Result<Option<Penalty>> {
        if samplings.iter().all(|sampling| sampling.repetition_penalty == 1.0) {
            return Ok(None);
        }
        let history = self.history.as_ref().ok_or(ModelError::UnknownHistory)?;
        let [_, vocabulary] = self.logits.dims();
        let device = self.model.llama().device();
        Ok(Some(Penalty::new(samplings, history, vocabulary, &device)))
    }
}

impl<'a> Decoder<'a> {
    /// Never records steps: every kernel is launched by itself.
    pub fn without_recording(mut self) -> Self {
        self.stages = None;
        self
    }

    /// Begins every recorded step before the host reads the tokens that it decodes, so that the
    /// device does not wait for the host. The tokens are the same. As many steps run as tokens are
    /// asked for, one more than otherwise. Caches and logits are one step further then, with the
    /// last tokens in them ([`Self::has_step_in_flight`]). Where caches have no room for that step,
    /// it is left out.
    pub fn overlapped(mut self) -> Self {
        self.runs_ahead = true;
        self
    }

    /// Whether the last tokens drawn are in the caches already.
    pub fn has_step_in_flight(&self) -> bool {
        matches!(self.ahead, Some(Ok(_)))
    }

    /// Whether steps are replayed.
    pub fn is_recorded(&self) -> bool {
        self.recorded_kinds() > 0
    }

    /// The kinds of steps that are recorded.
    pub fn recorded_kinds(&self) -> usize {
        let stages = self.stages.iter().flat_map(BTreeMap::values);
        stages.filter(|stage| matches!(stage, Stage::Recorded(_))).count()
    }

    /// How the steps so far ran.
    pub fn counts(&self) -> StepCounts {
        self.counts
    }

    /// The sequences.
    pub fn session(&self) -> &Session<'a> {
        &self.session
    }

    /// The sequences, to go on with in another way. The last tokens drawn are not in their caches,
    /// unless the decoder [has a step in flight](Self::has_step_in_flight).
    ///
    /// # Errors
    /// [`ModelError::DecoderFailed`] after an error within a step.
    pub fn into_session(self) -> Result<Session<'a>> {
        let Self { stages, session, failed, .. } = self;
        drop(stages);
        if failed { Err(ModelError::DecoderFailed) } else { Ok(session) }
    }

    /// Ends a sequence: later tokens of it mean nothing.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] for rows that are not there.
    pub fn end(&mut self, row: usize) -> Result<()> {
        if !self.session.ended.contains(&row) && row < self.session.cache.batch() {
            self.session.end(row);
            self.state.end(row, self.session.cache.seen[row])?;
        }
        Ok(())
    }

    /// The next token of every sequence.
    ///
    /// # Errors
    /// [`ModelError::NonFinite`] where the logits of a sequence that has not ended hold NaN or
    /// infinities, [`ModelError::PromptTooLong`] past the model's positions, and the errors of the
    /// policy. After an error within a step there is no next step: [`ModelError::DecoderFailed`].
    pub fn next_tokens(&mut self) -> Result<Vec<u32>> {
        let (tokens, step) = self.next_draws()?;
        let ended = &self.session.ended;
        if (0..tokens.len()).any(|row| tokens[row] < 0 && !ended.contains(&row)) {
            self.failed = true;
            self.ahead = None;
            return Err(ModelError::NonFinite { step });
        }
        let tokens: Vec<u32> = tokens.into_iter().map(|token| token.max(0) as u32).collect();
        self.session.remember(&tokens);
        Ok(tokens)
    }

    /// The next draw of every sequence, −1 for logits that are not finite, and the step that they
    /// come from.
    fn next_draws(&mut self) -> Result<(Vec<i32>, usize)> {
        let ahead = self.ahead.take();
        if self.failed && ahead.is_none() {
            return Err(ModelError::DecoderFailed);
        }
        let drawn = match ahead {
            Some(drawn) => drawn?,
            None => match self.unread.take() {
                Some(drawn) => drawn,
                None if self.drawn == 0 => {
                    let _work = device_work();
                    self.draw()?
                }
                None => self.decode()?,
            },
        };
        self.drawn += 1;
        let step = self.session.steps;
        let work = device_work();
        let reading = Reading::begin(drawn)?;
        drop(work);
        if self.runs_ahead && self.can_go_on() {
            self.ahead = Some(self.decode());
        }
        Ok((reading.wait()?, step))
    }

    /// Appends the same number of tokens to every sequence in place of drawn ones, as
    /// [`Session::append`] does: by steps that are recorded, where the policy's decode steps change
    /// slots. Returns the logits before each token, `[N]` of `[B, vocabulary]`.
    ///
    /// [`Self::next_tokens`] goes on behind the last token, and draws as if the tokens had been
    /// drawn.
    ///
    /// # Errors
    /// [`ModelError::UnequalPrompts`] for rows of different lengths,
    /// [`ModelError::TokenOutOfRange`], [`ModelError::PromptTooLong`], [`ModelError::StepInFlight`]
    /// where a step has begun ahead of the host, and the errors of the policy. Logits may be NaN.
    pub fn append(&mut self, tokens: &[&[u32]]) -> Result<Vec<Tensor<2>>> {
        let count = self.check_append(tokens)?;
        if self.session.policy.capabilities().changes_decode {
            let mut before = Vec::with_capacity(count);
            // Copies: a recorded step writes every step's logits into the same place.
            let mut keep = |logits: &Tensor<2>| before.push(logits.clone().mul_scalar(1.0));
            self.append_by_steps(tokens, count, &mut keep)?;
            Ok(before)
        } else {
            self.append_at_once(tokens, count, |session| session.append(tokens))
        }
    }

    /// [`Self::append`] of tokens whose own logits nobody wants, such as a question.
    ///
    /// # Errors
    /// The errors of [`Self::append`].
    pub fn append_question(&mut self, tokens: &[&[u32]]) -> Result<()> {
        let count = self.check_append(tokens)?;
        if self.session.policy.capabilities().changes_decode {
            self.append_by_steps(tokens, count, &mut |_| {})
        } else {
            self.append_at_once(tokens, count, |session| session.append_to_last(tokens))
        }
    }

    /// The number of tokens that every row appends.
    fn check_append(&self, tokens: &[&[u32]]) -> Result<usize> {
        if self.failed {
            return Err(ModelError::DecoderFailed);
        }
        if self.ahead.is_some() {
            return Err(ModelError::StepInFlight);
        }
        let batch = self.session.cache.batch();
        if tokens.len() != batch {
            return Err(ModelError::UnequalPrompts { expected: batch, actual: tokens.len() });
        }
        let count = tokens.first().map_or(0, |row| row.len());
        for row in tokens {
            if row.len() != count {
                return Err(ModelError::UnequalPrompts { expected: count, actual: row.len() });
            }
            self.session.model.llama().check_tokens(row)?;
        }
        if count > 0 {
            self.session.model.llama().check_positions(&self.session.cache, count)?;
        }
        Ok(count)
    }

    /// Makes sure that the next token is drawn already, so that appended tokens replace it.
    fn draw_to_replace(&mut self) -> Result<()> {
        if self.unread.is_some() {
            return Ok(());
        }
        if self.drawn == 0 {
            // The first draw moves positions to the first token's.
            let _work = device_work();
            self.unread = Some(self.draw()?);
        } else {
            // The last token drawn is in no cache, and is replaced.
            for history in self.session.history.iter_mut().flatten() {
                history.pop();
            }
        }
        Ok(())
    }

    /// Appends tokens of equal number step by step, and shows the logits before each.
    fn append_by_steps(
        &mut self,
        tokens: &[&[u32]],
        count: usize,
        before: &mut dyn FnMut(&Tensor<2>),
    ) -> Result<()> {
        for index in 0..count {
            self.draw_to_replace()?;
            let step: Vec<u32> = tokens.iter().map(|row| row[index]).collect();
            let work = device_work();
            before(&self.session.logits);
            self.state.force(&step)?;
            drop(work);
            self.unread = Some(self.decode()?);
            self.session.remember(&step);
        }
        Ok(())
    }

    /// Appends tokens of equal number by one pass over them all.
    fn append_at_once<T: Default>(
        &mut self,
        tokens: &[&[u32]],
        count: usize,
        append: impl FnOnce(&mut Session<'_>) -> Result<T>,
    ) -> Result<T> {
        if count == 0 {
            return Ok(T::default());
        }
        self.draw_to_replace()?;
        // The cache may have other tensors behind it than the recorded ones.
        self.forget_recordings();
        let _work = device_work();
        self.failed = true;
        let appended = append(&mut self.session)?;
        if let Some(penalty) = &mut self.penalty {
            for index in 0..count {
                let step: Vec<u32> = tokens.iter().map(|row| row[index]).collect();
                penalty.add(self.session.model.llama().upload(&step));
            }
        }
        // The draw behind the tokens moves on by the last of them.
        self.state.skip(count - 1)?;
        self.unread = Some(self.draw()?);
        self.failed = false;
        Ok(appended)
    }

    /// Whether there can be another step, without the host.
    fn can_go_on(&mut self) -> bool {
        let Some(kinds) = self.kinds() else { return false };
        if self.rest_idle_rows().is_err() {
            return false;
        }
        let Session { model, cache, .. } = &mut self.session;
        let stage = self.stages.as_ref().and_then(|stages| stages.get(&kinds));
        let Some(Stage::Recorded(step)) = stage else { return false };
        step.graph.is_own_thread()
            && model.llama().check_positions(cache, 1).is_ok()
            && cache.check_advance(&step.growth).is_ok()
    }

    /// The kinds of the next step's layers; `None` if it asks something of the host.
    fn kinds(&self) -> Option<Kinds> {
        let Session { policy, cache, .. } = &self.session;
        let count = cache.layers.len();
        let layers = cache.layers.iter().enumerate();
        layers
            .map(|(index, layer)| policy.recordable_kind(LayerContext { index, count }, layer))
            .collect()
    }

    /// Runs a step, and notes that it has run.
    fn decode(&mut self) -> Result<Tensor<1, Int>> {
        self.session.model.llama().check_positions(&self.session.cache, 1)?;
        let before = self.session.cache.seen.clone();
        self.failed = true;
        self.rest_idle_rows()?;
        let drawn = self.step()?;
        self.failed = false;
        let Session { model, policy, cache, ended, .. } = &mut self.session;
        model.llama().advance(cache, &**policy);
        ended.iter().for_each(|&row| cache.seen[row] = before[row]);
        self.session.steps += 1;
        Ok(drawn)
    }

    /// Decodes the last tokens and draws the next ones.
    fn step(&mut self) -> Result<Tensor<1, Int>> {
        let recorded = self.recorded_kinds();
        let is_home = self.session.is_home();
        let kinds = self.kinds();
        let Some(stages) = &mut self.stages else { return self.eager_step() };
        let Some(kinds) = kinds else {
            // The step may give the cache other tensors than the recorded ones.
            stages.values_mut().for_each(|stage| *stage = Stage::Counting(WARM_UP));
            return self.eager_step();
        };
        match stages.get_mut(&kinds) {
            Some(Stage::Recorded(step)) if step.graph.is_own_thread() => {
                let _work = device_work();
                self.session.cache.advance(&step.growth)?;
                // SAFETY: the graph reads and writes the model's weights, which the session
                // borrows, the cache and the state, which live as long as it does and are written
                // in place, and tensors of its own; all on this thread.
                unsafe { step.graph.replay() }?;
                self.counts.replayed += 1;
                self.session.logits = step.logits.clone();
                Ok(step.drawn.clone())
            }
            Some(Stage::Recorded(_)) => {
                // The device orders a graph against its own thread's work only.
                self.stages = None;
                self.eager_step()
            }
            stage => {
                let steps = stage.map_or(0, |stage| match stage {
                    Stage::Counting(steps) => *steps,
                    Stage::Recorded(_) => 0,
                });
                let warm_up = if recorded > 0 { LATER_WARM_UP } else { WARM_UP };
                if !is_home || recorded == MOST_KINDS {
                    return self.eager_step();
                }
                let device = self.session.model.llama().device();
                // Where another recording of this thread is under way, a later step tries again.
                let recording = if steps >= warm_up { Recording::begin(&device) } else { None };
                let Some(recording) = recording else {
                    stages.insert(kinds, Stage::Counting(steps + 1));
                    return self.eager_step();
                };
                let (drawn, recorded) = self.run_and_record(recording)?;
                match (recorded, &mut self.stages) {
                    (Some(recorded), Some(stages)) => {
                        stages.insert(kinds, Stage::Recorded(Box::new(recorded)));
                    }
                    // What cannot be recorded once is not tried again.
                    _ => self.stages = None,
                }
                Ok(drawn)
            }
        }
    }

    /// Runs a step, which is the recording's warm-up, and records it.
    fn run_and_record(
        &mut self,
        recording: Recording,
    ) -> Result<(Tensor<1, Int>, Option<Recorded>)> {
        let before = self.session.cache.mirror();
        let drawn = self.device_step()?;
        self.counts.launched += 1;
        self.counts.recordings += 1;
        let _ = self.session.model.llama().device().sync();
        let (after, logits) = (self.session.cache.mirror(), self.session.logits.clone());
        // The recording gets the memory that the warm-up leaves free, and needs room for results
        // beside the warm-up's own, which are still held.
        drop((drawn.clone().add_scalar(0), logits.clone().mul_scalar(1.0)));
        // The recorded step launches the kernels of the step that has run, and is not run itself:
        // the host plans it from the lengths before the step.
        self.session.cache.restore(&before);
        let recorded = recording.record(|| self.device_step());
        self.session.cache.restore(&after);
        let written = std::mem::replace(&mut self.session.logits, logits);
        let (recorded, graph) = recorded?;
        let growth = after.growth_since(&before);
        let recorded =
            recorded.ok().map(|drawn| Recorded { graph, drawn, logits: written, growth });
        Ok((drawn, recorded))
    }

    /// Runs a step, and the host's part of it.
    fn eager_step(&mut self) -> Result<Tensor<1, Int>> {
        let _work = device_work();
        let Session { model, cache, ended, .. } = &self.session;
        let [batch] = self.state.tokens().dims();
        let positions = model.llama().positions(cache, 1).reshape([batch]);
        self.counts.launched += 1;
        // On a CPU a product's time grows with its rows. GPUs read the weights once for all rows,
        // and compile kernels for numbers of rows.
        let device = model.llama().device();
        let busy = is_cpu(&device).then(|| BusyRows::of(batch, ended, &device)).flatten();
        self.step_at(positions, busy.as_ref())
    }

    /// Runs a step without the host's part.
    fn device_step(&mut self) -> Result<Tensor<1, Int>> {
        self.step_at(self.state.positions().clone(), None)
    }

    fn step_at(
        &mut self,
        positions: Tensor<1, Int>,
        busy: Option<&BusyRows>,
    ) -> Result<Tensor<1, Int>> {
        let Session { model, policy, cache, logits, .. } = &mut self.session;
        let tokens = self.state.tokens().clone();
        *logits = model.llama().decode_at(tokens, positions, cache, &**policy, busy)?;
        if let Some(penalty) = &mut self.penalty {
            penalty.add(self.state.tokens().clone());
        }
        self.draw()
    }

    /// Draws the next tokens from the session's logits.
    fn draw(&mut self) -> Result<Tensor<1, Int>> {
        let logits = self.session.logits.clone();
        let logits = match &self.penalty {
            Some(penalty) => penalty.apply(logits),
            None => logits,
        };
        Ok(draw(logits, &mut self.state)?)
    }
}
