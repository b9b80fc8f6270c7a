//! Sequences that join a decoder and leave it.
//!
//! A row is overwritten in place, so that recorded steps stay valid: they read and write the
//! tensors that were there when they were recorded. There are two kinds of batches:
//!
//! * Arenas ([`Session::arena`]), for policies whose steps append and attend to all live slots
//!   ([`Session::appends_only`]). Sequences of different policies and budgets share one, each with
//!   as many slots as it needs.
//! * Rows like a given sequence ([`Session::row_like`]), for other policies. All rows have its
//!   policy and capacities.

use std::sync::Arc;
use std::thread;

use burn::tensor::{DType, Tensor};
use kv_core::{CacheOptions, KvCache, LayerCache, NUMERATORS};
use kv_kernels::device_work;
use kv_policies::{Policy, SlotWeights};

use super::{Decoder, Session, Stage, WARM_UP};
use crate::{Model, Result};

/// Capacities of rows are multiples of this, so that sequences of similar length fit.
const CAPACITY_STEP: usize = 64;

impl<'a> Session<'a> {
    /// Idle rows that share `slots` slots a layer, at most `most` of them a head. Sequences join
    /// them by [`Decoder::join`].
    ///
    /// # Errors
    /// [`crate::ModelError`] where the model's fingerprint cannot be read.
    pub fn arena(
        model: &'a Model,
        policy: Arc<dyn Policy>,
        rows: usize,
        slots: usize,
        most: usize,
        weights: SlotWeights,
    ) -> Result<Self> {
        let _work = device_work();
        let llama = model.llama();
        let config = llama.config();
        let mut options = CacheOptions::new(&llama.device(), llama.dtype());
        options.weighted = weights.weighted;
        let shape = [rows, config.num_kv_heads, config.head_dim];
        let layers = (0..config.num_layers).map(|_| {
            let mut layer = LayerCache::arena(shape, slots, most, options.clone());
            if weights.numerators {
                let [slots, _] = layer.keys().dims();
                let ones = Tensor::ones([slots], (&llama.device(), DType::F32));
                layer.set_track(NUMERATORS, ones, 1.0)?;
            }
            Ok(layer)
        });
        let layers = layers.collect::<kv_core::Result<_>>()?;
        let origin = super::super::origin(model, &*policy)?;
        let cache = KvCache { layers, seen: vec![0; rows], origin };
        Ok(Self::idle(model, policy, cache))
    }

    /// An idle row with this one sequence's policy and states. Its capacities are this sequence's,
    /// rounded up. The row also has the room of a row of `former`, where `former` has this policy:
    /// of two sequences, one may need more slots and the other one larger states, so that neither
    /// fits into the other's row.
    ///
    /// A decoder of several such rows, which [`Self::repeated`] makes, needs
    /// [`Decoder::resting_like`] this sequence.
    ///
    /// # Errors
    /// The errors of [`LayerCache::resize`] and [`LayerCache::widen_states`].
    pub fn row_like(&self, former: Option<&Session<'_>>) -> Result<Self> {
        let _work = device_work();
        let former = former.filter(|former| former.cache.origin == self.cache.origin);
        let layers = self.cache.layers.iter().enumerate().map(|(at, layer)| {
            let mut layer = layer.clone();
            let most = layer.layout().most_capacity().max(1).next_multiple_of(CAPACITY_STEP);
            // One slot more than a head is held at: a head without room is then one that grows.
            let is_limit = layer.limits().is_some_and(|limits| limits.contains(&most));
            let mut most = most + usize::from(is_limit);
            if let Some(former) = former.and_then(|former| former.cache.layers.get(at)) {
                most = most.max(former.layout().most_capacity());
                layer.widen_states(former)?;
            }
            layer.resize(vec![most; layer.layout().head_ranges()])?;
            Ok(layer)
        });
        let layers = layers.collect::<kv_core::Result<_>>()?;
        let (seen, origin) = (self.cache.seen.clone(), self.cache.origin.clone());
        let cache = KvCache { layers, seen, origin };
        Ok(Self::idle(self.model, self.policy.clone(), cache))
    }

    /// Whether steps only append and attend to all live slots, so that the sequence may join an
    /// arena.
    pub fn appends_only(&self) -> bool {
        let capabilities = self.policy.capabilities();
        !capabilities.changes_decode && !capabilities.renumbers
    }

    /// Whether rows like this sequence can be replaced by others: its policy holds every head at a
    /// limit, and all of its state can be replaced.
    pub fn has_replaceable_rows(&self) -> bool {
        let held = |layer: &LayerCache| layer.limits().is_some() && layer.accepts(layer);
        self.cache.layers.iter().all(held)
    }

    /// The weights that slots have. The slots of an arena have as many as those of each sequence
    /// that joins it.
    pub fn slot_weights(&self) -> SlotWeights {
        let layers = self.cache.layers.iter().map(SlotWeights::of);
        layers.fold(SlotWeights::NONE, SlotWeights::union)
    }

    fn idle(model: &'a Model, policy: Arc<dyn Policy>, cache: KvCache) -> Self {
        let rows = cache.batch();
        let vocabulary = model.config().vocab_size;
        let logits = Tensor::zeros([rows, vocabulary], (&model.llama().device(), DType::F32));
        Self {
            model,
            policy,
            cache,
            history: None,
            logits,
            steps: 0,
            ended: (0..rows).collect(),
            home: thread::current().id(),
            scratch: 0,
        }
    }
}

impl<'a> Decoder<'a> {
    /// Whether a sequence of another decoder can join any row of this one. An arena also needs room
    /// for it.
    pub fn accepts(&self, one: &Decoder<'_>) -> bool {
        let (own, other) = (&self.session, &one.session);
        if own.cache.layers.iter().any(LayerCache::is_arena) {
            return other.appends_only() && own.slot_weights() == other.slot_weights();
        }
        let mut layers = own.cache.layers.iter().zip(&other.cache.layers);
        own.cache.origin == other.cache.origin && layers.all(|(own, other)| own.accepts(other))
    }

    /// Whether a sequence that [`Self::accepts`] finds room for it, with `room` free slots in every
    /// head of an arena. It also needs a row.
    pub fn has_room_for(&self, one: &Decoder<'_>, room: usize) -> bool {
        let mut layers = self.session.cache.layers.iter().zip(&one.session.cache.layers);
        layers.all(|(own, other)| {
            let needed = other.layout().lengths().iter().map(|length| length + room).sum();
            !own.is_arena() || own.free_in_arena() >= needed
        })
    }

    /// Lets idle rows begin anew as copies of this one sequence where they have no room for another
    /// step. Rows of policies that evict rarely, or never, would grow without end.
    pub fn resting_like(mut self, one: &Session<'_>) -> Self {
        let _work = device_work();
        self.rest = Some(one.cache.clone());
        self
    }

    /// Makes room for a step of idle rows.
    pub(super) fn rest_idle_rows(&mut self) -> Result<()> {
        let Session { cache, ended, .. } = &mut self.session;
        cache.rest_idle_rows()?;
        let Some(rest) = &self.rest else { return Ok(()) };
        for &row in &*ended {
            if !cache.has_room(row) {
                cache.replace_row(row, rest)?;
            }
        }
        Ok(())
    }

    /// Puts the one sequence of another decoder, which has drawn its first token, into a row that
    /// no sequence has, with `room` free slots in every head of an arena. Returns whether the next
    /// draw of the row means nothing, since its step has begun already.
    ///
    /// Recorded steps stay valid, unless the sequence draws in a way that no row has had before.
    ///
    /// # Errors
    /// [`kv_core::Error::ArenaFull`], and the errors of [`KvCache::place_row`] and
    /// [`KvCache::replace_row`]. The row has no sequence then.
    pub fn join(&mut self, row: usize, one: &Decoder<'_>, room: usize) -> Result<bool> {
        let _work = device_work();
        let cache = &mut self.session.cache;
        if cache.layers.iter().any(LayerCache::is_arena) {
            cache.place_row(row, &one.session.cache, room)?;
        } else {
            cache.replace_row(row, &one.session.cache)?;
        }
        if self.state.replace_row(row, &one.state)? {
            self.forget_recordings();
        }
        self.session.ended.retain(|ended| *ended != row);
        self.drawn = self.drawn.max(1);
        Ok(self.ahead.is_some())
    }

    /// Takes a sequence out of its row, which is idle from then on. An arena's slots are free then.
    ///
    /// # Errors
    /// [`crate::ModelError::Kernel`].
    pub fn leave(&mut self, row: usize) -> Result<()> {
        let _work = device_work();
        self.end(row)?;
        Ok(self.session.cache.free_row(row)?)
    }

    /// The next draw of every row: `None` for logits that are not finite. Draws of idle rows mean
    /// nothing.
    ///
    /// # Errors
    /// The errors of [`Self::next_tokens`].
    pub fn draws(&mut self) -> Result<Vec<Option<u32>>> {
        let (drawn, _) = self.next_draws()?;
        Ok(drawn.into_iter().map(|token| u32::try_from(token).ok()).collect())
    }

    /// Replaces the last drawn token of a row before it is decoded.
    ///
    /// # Errors
    /// [`crate::ModelError::StepInFlight`] where a step with that token has begun already, and
    /// [`crate::ModelError::Kernel`] for rows that are not there.
    pub fn replace_token(&mut self, row: usize, token: u32) -> Result<()> {
        if self.ahead.is_some() {
            return Err(crate::ModelError::StepInFlight);
        }
        let _work = device_work();
        Ok(self.state.force_row(row, token)?)
    }

    /// Whether steps begin before the host has read the tokens that they decode
    /// ([`Self::overlapped`]), from the next draw on.
    pub fn set_overlapped(&mut self, overlapped: bool) {
        self.runs_ahead = overlapped;
    }

    /// The logits that a row's last token was drawn from, `[1, vocabulary]`.
    pub fn row_logits(&self, row: usize) -> Tensor<2> {
        self.session.logits.clone().narrow(0, row, 1)
    }

    /// Steps are recorded anew.
    pub(super) fn forget_recordings(&mut self) {
        if let Some(stages) = &mut self.stages {
            stages.values_mut().for_each(|stage| *stage = Stage::Counting(WARM_UP));
        }
    }
}
