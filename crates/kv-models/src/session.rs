//! A batch of sequences in progress: prefilled, compressed, and ready to decode.

mod decoder;
mod penalty;
mod prefill;

use std::path::Path;
use std::sync::Arc;
use std::thread::{self, ThreadId};

use burn::tensor::{DType, Tensor};
use kv_core::{KvCache, LayerCache, MemoryReport, Origin, read_f32};
use kv_kernels::device_work;
use kv_parallel::Shard;
use kv_policies::{Policy, warn_of_remarks};

pub use decoder::{Decoder, StepCounts};
pub use prefill::Prefilling;

use crate::llama::SharedPrefix;
use crate::rope::trained_context;
use crate::{Model, ModelError, Result};

/// Sequences that decode together.
#[derive(Debug)]
pub struct Session<'a> {
    model: &'a Model,
    policy: Arc<dyn Policy>,
    cache: KvCache,
    /// The sequences' tokens, whatever the cache has kept of them; `None` in a resumed session.
    history: Option<Vec<Vec<u32>>>,
    /// Logits of the next tokens, `[B, vocabulary]`.
    logits: Tensor<2>,
    steps: usize,
    /// Sequences that have ended: their rows go on at the same position, unseen.
    ended: Vec<usize>,
    /// The thread whose work on the device the cache's tensors come from.
    home: ThreadId,
    /// Bytes that prefill took for whole keys and values, the largest group's: one layer's, or all
    /// layers' where they were compressed together.
    scratch: usize,
}

impl<'a> Session<'a> {
    /// Prefills prompts of any lengths, compresses them under `policy` and reserves room for
    /// `new_tokens` more, at most as many as the model has positions for. `seeds` has one seed a
    /// prompt.
    ///
    /// Neighbouring prompts of equal length go through a layer together, up to 32,768 tokens or one
    /// prompt at a time; nothing is ever padded.
    ///
    /// # Errors
    /// [`ModelError`] for prompts that are empty or too long, [`ModelError::BeyondSlidingWindow`]
    /// where a prompt and its new tokens exceed the window, and the errors of the policy.
    pub fn start(
        model: &'a Model,
        policy: Arc<dyn Policy>,
        prompts: &[Vec<u32>],
        seeds: &[u64],
        new_tokens: usize,
    ) -> Result<Self> {
        let mut sessions = Self::start_many(model, &[policy], prompts, seeds, new_tokens)?;
        sessions.pop().ok_or(ModelError::EmptyPrompt)
    }

    /// [`Self::start`] under several policies at once: they share the prefill. Policies that change
    /// it (prune hidden states, freeze them or narrow windows) prefill alone.
    ///
    /// # Errors
    /// The errors of [`Self::start`].
    pub fn start_many(
        model: &'a Model,
        policies: &[Arc<dyn Policy>],
        prompts: &[Vec<u32>],
        seeds: &[u64],
        new_tokens: usize,
    ) -> Result<Vec<Self>> {
        Self::start_rows(model, policies, prompts, seeds, &vec![new_tokens; prompts.len()])
    }

    /// [`Self::start_many`] with a number of new tokens for each prompt.
    ///
    /// # Errors
    /// The errors of [`Self::start`].
    pub fn start_rows(
        model: &'a Model,
        policies: &[Arc<dyn Policy>],
        prompts: &[Vec<u32>],
        seeds: &[u64],
        new_tokens: &[usize],
    ) -> Result<Vec<Self>> {
        check_start(model, policies, prompts, new_tokens)?;
        let mut sessions: Vec<Option<Self>> = policies.iter().map(|_| None).collect();
        let shared: Vec<usize> = (0..policies.len())
            .filter(|&index| !policies[index].capabilities().changes_prefill)
            .collect();
        let alone =
            (0..policies.len()).filter(|&index| policies[index].capabilities().changes_prefill);
        for group in std::iter::once(shared).chain(alone.map(|index| vec![index])) {
            let chosen: Vec<Arc<dyn Policy>> =
                group.iter().map(|&index| policies[index].clone()).collect();
            if chosen.is_empty() {
                continue;
            }
            let mut prefilling = Prefilling::new(model, &chosen, prompts, seeds, new_tokens, None)?;
            while prefilling.layer()? {}
            let started = prefilling.finish()?;
            for (index, session) in group.into_iter().zip(started) {
                sessions[index] = Some(session);
            }
        }
        Ok(sessions.into_iter().flatten().collect())
    }

    /// [`Self::start`] of one prompt a layer at a time, so that other work may come in between.
    ///
    /// # Errors
    /// The errors of [`Self::start`].
    pub fn begin(
        model: &'a Model,
        policy: Arc<dyn Policy>,
        prompt: Vec<u32>,
        seed: u64,
        new_tokens: usize,
    ) -> Result<Prefilling<'a>> {
        Self::begin_behind(model, policy, prompt, (seed, new_tokens), None)
    }

    /// [`Self::begin`] behind a beginning of the prompt whose keys and values are there already.
    pub(crate) fn begin_behind(
        model: &'a Model,
        policy: Arc<dyn Policy>,
        prompt: Vec<u32>,
        (seed, new_tokens): (u64, usize),
        prefix: Option<&SharedPrefix>,
    ) -> Result<Prefilling<'a>> {
        let (policies, prompts, new_tokens) = ([policy], [prompt], [new_tokens]);
        check_start(model, &policies, &prompts, &new_tokens)?;
        Prefilling::new(model, &policies, &prompts, &[seed], &new_tokens, prefix)
    }

    /// Whether this thread loaded the model and started the session.
    fn is_home(&self) -> bool {
        let here = thread::current().id();
        self.home == here && self.model.home() == here
    }

    /// The model.
    pub fn model(&self) -> &'a Model {
        self.model
    }

    /// The compressed cache.
    pub fn cache(&self) -> &KvCache {
        &self.cache
    }

    pub(crate) fn cache_mut(&mut self) -> &mut KvCache {
        &mut self.cache
    }

    /// The policy.
    pub fn policy(&self) -> &dyn Policy {
        &*self.policy
    }

    /// Bytes of the cache, and of the scratch that prefill shared among its layers.
    pub fn memory(&self) -> MemoryReport {
        let memory = self.cache.memory();
        MemoryReport { scratch: self.scratch.max(memory.scratch), ..memory }
    }

    /// Each sequence's part of [`Self::memory`] in bytes: its live keys and values, and an equal
    /// share of metadata and of states of policies.
    pub fn live_bytes(&self) -> Vec<usize> {
        let (memory, batch) = (self.cache.memory(), self.cache.batch());
        let shared = (memory.metadata + memory.policy) / batch.max(1);
        let mut bytes = vec![shared; batch];
        for layer in &self.cache.layers {
            let lengths = layer.layout().lengths();
            let slot = 2 * layer.head_dim() * layer.options().dtype.size();
            let rows = lengths.chunks(lengths.len().checked_div(batch).unwrap_or(1).max(1));
            for (bytes, lengths) in bytes.iter_mut().zip(rows) {
                *bytes += slot * lengths.iter().sum::<usize>();
            }
        }
        bytes
    }

    /// The next tokens' logits, read to the host, `B` rows.
    ///
    /// # Errors
    /// [`ModelError::NonFinite`] where they hold NaN or infinities.
    pub fn read_logits(&self) -> Result<Vec<Vec<f32>>> {
        let vocabulary = self.logits.dims()[1];
        let logits = read_f32("logits", self.logits.clone())?;
        if logits.iter().any(|logit| !logit.is_finite()) {
            return Err(ModelError::NonFinite { step: self.steps });
        }
        Ok(logits.chunks(vocabulary).map(<[f32]>::to_vec).collect())
    }

    /// Appends one token to every sequence. The state is unchanged after an error in the tokens.
    ///
    /// # Errors
    /// The errors of [`crate::Llama::decode`].
    pub fn step(&mut self, tokens: &[u32]) -> Result<()> {
        let _work = device_work();
        let before = self.cache.seen.clone();
        self.logits = self.model.llama().decode(tokens, &mut self.cache, &*self.policy)?;
        for &row in &self.ended {
            self.cache.seen[row] = before[row];
        }
        self.remember(tokens);
        self.steps += 1;
        Ok(())
    }

    /// Ends a sequence of the batch: further steps take any token for it, and it needs no more of
    /// the model's positions.
    pub fn end(&mut self, row: usize) {
        if row < self.cache.batch() && !self.ended.contains(&row) {
            // Its next token stands where its last one stood.
            self.cache.seen[row] = self.cache.seen[row].saturating_sub(1);
            self.ended.push(row);
        }
    }

    /// Whether the model has a position for a sequence's next token.
    pub fn has_position(&self, row: usize) -> bool {
        let positions = self.model.config().max_positions;
        self.cache.seen.get(row).is_some_and(|seen| *seen < positions)
    }

    /// Appends the same number of tokens to every sequence, as a question behind a compressed
    /// context: at once where the policy's decode steps change no slots, else step by step. Returns
    /// the logits before each of them, `[N]` of `[B, vocabulary]`.
    ///
    /// # Errors
    /// The errors of [`Self::step`].
    pub fn append(&mut self, tokens: &[&[u32]]) -> Result<Vec<Tensor<2>>> {
        let _work = device_work();
        let count = tokens.first().map_or(0, |tokens| tokens.len());
        let mut before = vec![self.logits.clone()];
        if self.policy.capabilities().changes_decode {
            self.append_by_steps(tokens, |session| before.push(session.logits.clone()))?;
        } else if count > 0 {
            let seen = self.cache.seen.clone();
            let logits = self.model.llama().extend(tokens, &mut self.cache)?;
            self.note_appended(tokens, &seen);
            let [batch, added, vocabulary] = logits.dims();
            before.extend(
                (0..added)
                    .map(|index| logits.clone().narrow(1, index, 1).reshape([batch, vocabulary])),
            );
        }
        if let Some(last) = before.pop() {
            self.logits = last;
        }
        Ok(before)
    }

    /// [`Self::append`] at once, of tokens whose own logits nobody wants, such as a question: only
    /// the logits behind the last of them are made.
    pub(crate) fn append_to_last(&mut self, tokens: &[&[u32]]) -> Result<()> {
        let seen = self.cache.seen.clone();
        self.logits = self.model.llama().extend_to_last(tokens, &mut self.cache)?;
        self.note_appended(tokens, &seen);
        Ok(())
    }

    /// Appends tokens step by step, and shows the session behind each step.
    fn append_by_steps(&mut self, tokens: &[&[u32]], mut behind: impl FnMut(&Self)) -> Result<()> {
        let expected = tokens.first().map_or(0, |tokens| tokens.len());
        for actual in 0..expected {
            let step: Option<Vec<u32>> =
                tokens.iter().map(|tokens| tokens.get(actual).copied()).collect();
            self.step(&step.ok_or(ModelError::UnequalPrompts { expected, actual })?)?;
            behind(self);
        }
        Ok(())
    }

    /// Notes tokens of equal number that were appended at once behind `seen` tokens. Sequences that
    /// have ended stay where they are.
    fn note_appended(&mut self, tokens: &[&[u32]], seen: &[usize]) {
        let added = tokens.first().map_or(0, |tokens| tokens.len());
        for index in 0..added {
            self.remember(&tokens.iter().map(|tokens| tokens[index]).collect::<Vec<_>>());
        }
        self.steps += added;
        self.ended.iter().for_each(|&row| self.cache.seen[row] = seen[row]);
    }

    /// Goes on as if every sequence had decoded `tokens` more ([`KvCache::assume`]): for
    /// measurements of long outputs.
    ///
    /// # Errors
    /// [`kv_core::Error::CapacityExhausted`].
    pub fn assume(&mut self, tokens: usize) -> Result<()> {
        let _work = device_work();
        Ok(self.cache.assume(tokens)?)
    }

    /// A deep copy that goes on by itself.
    pub fn fork(&self) -> Self {
        let _work = device_work();
        self.copy_with(self.cache.clone(), 1)
    }

    /// A deep copy with each sequence `times` times: all sequences, then all of them again. They go
    /// on by themselves, such as several questions on one compressed context.
    ///
    /// # Errors
    /// [`ModelError::EmptyPrompt`] for no times, and the errors of [`LayerCache::concat`].
    pub fn repeated(&self, times: usize) -> Result<Self> {
        if times == 0 {
            return Err(ModelError::EmptyPrompt);
        }
        let _work = device_work();
        let KvCache { layers, seen, origin } = &self.cache;
        let layers = layers.iter().map(|layer| LayerCache::concat(vec![layer.clone(); times]));
        let layers = layers.collect::<kv_core::Result<_>>()?;
        let cache = KvCache { layers, seen: seen.repeat(times), origin: origin.clone() };
        Ok(self.copy_with(cache, times))
    }

    /// A copy with another cache, which has all sequences `times` times.
    fn copy_with(&self, cache: KvCache, times: usize) -> Self {
        let rows = 0..times * self.cache.batch();
        Self {
            model: self.model,
            policy: self.policy.clone(),
            cache,
            history: self.history.as_ref().map(|history| vec![&history[..]; times].concat()),
            // A copy: a recorded step writes every step's logits into the same place.
            logits: self.logits.clone().repeat_dim(0, times).mul_scalar(1.0),
            steps: self.steps,
            ended: rows.filter(|row| self.ended.contains(&(row % self.cache.batch()))).collect(),
            home: thread::current().id(),
            scratch: self.scratch,
        }
    }

    /// Sets the tokens that the sequences have, prompts included: a resumed session does not know
    /// them, and a repetition penalty needs them.
    ///
    /// # Errors
    /// [`ModelError::UnequalPrompts`] for another number of sequences,
    /// [`ModelError::TokenOutOfRange`].
    pub fn with_history(mut self, tokens: Vec<Vec<u32>>) -> Result<Self> {
        let (expected, actual) = (self.cache.batch(), tokens.len());
        if expected != actual {
            return Err(ModelError::UnequalPrompts { expected, actual });
        }
        tokens.iter().try_for_each(|tokens| self.model.llama().check_tokens(tokens))?;
        self.history = Some(tokens);
        Ok(self)
    }

    /// Adds a token to each sequence's history.
    fn remember(&mut self, tokens: &[u32]) {
        for (history, token) in self.history.iter_mut().flatten().zip(tokens) {
            history.push(*token);
        }
    }

    /// Saves cache and policy state; [`Self::resume`] goes on with identical tokens.
    ///
    /// # Errors
    /// [`kv_core::Error`].
    pub fn save(&self, path: &Path) -> Result<()> {
        let _work = device_work();
        Ok(self.cache.save(path)?)
    }

    /// Continues a saved session. `last` are the tokens that each sequence continues with.
    ///
    /// # Errors
    /// [`kv_core::Error`] for files that are not of this model and policy.
    pub fn resume(
        model: &'a Model,
        policy: Arc<dyn Policy>,
        path: &Path,
        last: &[u32],
    ) -> Result<Self> {
        let mut session = Self::restore(model, policy, path)?;
        let Self { policy, cache, .. } = &mut session;
        session.logits = model.llama().decode(last, cache, &**policy)?;
        session.steps = 1;
        Ok(session)
    }

    /// A saved session before anything is appended to it: it has no logits yet.
    pub(crate) fn restore(model: &'a Model, policy: Arc<dyn Policy>, path: &Path) -> Result<Self> {
        let _work = device_work();
        let mut cache = KvCache::load(path, &model.llama().device())?;
        // Earlier versions had other names for some options.
        if let Ok(saved) = kv_policies::build(&cache.origin.policy) {
            cache.origin.policy = saved.config();
        }
        cache.expect_origin(&origin(model, &*policy)?)?;
        cache.layers.iter_mut().try_for_each(|layer| policy.restore(layer))?;
        let shape = [cache.batch(), model.config().vocab_size];
        let logits = Tensor::zeros(shape, (&model.llama().device(), DType::F32));
        let (home, ended, history) = (thread::current().id(), Vec::new(), None);
        Ok(Self { model, policy, cache, history, logits, steps: 0, ended, home, scratch: 0 })
    }
}

/// Checks prompts before anything runs, and warns of what their policies do not do.
fn check_start(
    model: &Model,
    policies: &[Arc<dyn Policy>],
    prompts: &[Vec<u32>],
    new_tokens: &[usize],
) -> Result<()> {
    if prompts.is_empty() {
        return Err(ModelError::EmptyPrompt);
    }
    for (prompt, new_tokens) in prompts.iter().zip(new_tokens) {
        model.llama().check_prompt(prompt)?;
        if model.config().sliding_window.is_some() {
            model.config().check_length(prompt.len().saturating_add(*new_tokens))?;
        }
    }
    if policies.iter().any(|policy| policy.capabilities().renumbers) {
        check_renumbered(model, prompts)?;
    }
    let shard = model.llama().ranks().shard();
    policies.iter().try_for_each(|policy| check_heads(shard, &**policy))?;
    let longest = prompts.iter().map(Vec::len).max().unwrap_or_default();
    let layers = model.config().num_layers;
    policies.iter().for_each(|policy| warn_of_remarks(&**policy, layers, longest));
    Ok(())
}

/// Checks that a policy's heads decide by themselves where a rank has a part of them.
///
/// # Errors
/// [`ModelError::ComparesHeads`].
pub fn check_heads(shard: Shard, policy: &dyn Policy) -> Result<()> {
    if shard.is_part() && policy.capabilities().compares_heads {
        return Err(ModelError::ComparesHeads { policy: policy.name().into(), shard });
    }
    Ok(())
}

/// Checks that keys of prompts can be rotated to other positions.
fn check_renumbered(model: &Model, prompts: &[Vec<u32>]) -> Result<()> {
    let Some(trained) = trained_context(model.config()) else { return Ok(()) };
    match prompts.iter().map(Vec::len).find(|tokens| *tokens > trained) {
        Some(tokens) => Err(ModelError::LengthDependentRope { tokens, trained }),
        None => Ok(()),
    }
}

fn origin(model: &Model, policy: &dyn Policy) -> Result<Origin> {
    Ok(Origin { model: model.fingerprint()?, policy: policy.config() })
}
