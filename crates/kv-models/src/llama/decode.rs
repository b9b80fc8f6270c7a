//! Decode: one token per sequence, or a few at once, against compressed caches.

use std::sync::Arc;

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use kv_core::KvCache;
use kv_kernels::split_heads;
use kv_policies::{LayerContext, LayerInput, Policy, Step};

use super::Llama;
use crate::{ModelError, Result};

/// The rows of a batch that have a sequence. A step leaves out the products of the other rows.
pub(crate) struct BusyRows {
    /// `[busy]`
    rows: Tensor<1, Int>,
    /// Where each row is among the busy ones, `[B]`; for the other rows, any place.
    places: Tensor<1, Int>,
}

impl BusyRows {
    /// The rows of `batch` rows that are not among the `idle` ones. `None` where all rows are busy,
    /// or none.
    pub(crate) fn of(batch: usize, idle: &[usize], device: &Device) -> Option<Self> {
        let rows: Vec<i32> =
            (0..batch).filter(|row| !idle.contains(row)).map(|row| row as i32).collect();
        if rows.is_empty() || rows.len() == batch {
            return None;
        }
        let mut places = vec![0; batch];
        for (place, &row) in rows.iter().enumerate() {
            places[row as usize] = place as i32;
        }
        let ints = |numbers: &[i32]| Tensor::from_data(numbers, (device, DType::I32));
        Some(Self { rows: ints(&rows), places: ints(&places) })
    }

    /// The busy rows of `[B, width]`.
    fn take(rows: Option<&Self>, all: Tensor<2>) -> Tensor<2> {
        match rows {
            Some(own) => all.select(0, own.rows.clone()),
            None => all,
        }
    }

    /// `[B, width]` of the busy rows. Other rows have the numbers of a busy one.
    fn spread(rows: Option<&Self>, busy: Tensor<2>) -> Tensor<2> {
        match rows {
            Some(own) => busy.select(0, own.places.clone()),
            None => busy,
        }
    }
}

impl Llama {
    /// One decode step: appends a token to every sequence and returns the next tokens' logits,
    /// `[B, vocabulary]`, f32.
    ///
    /// # Errors
    /// [`ModelError::TokenOutOfRange`], [`ModelError::PromptTooLong`] past the model's positions,
    /// [`ModelError::UnequalPrompts`] for another number of tokens than sequences, and the errors
    /// of the policy.
    pub fn decode(
        &self,
        tokens: &[u32],
        cache: &mut KvCache,
        policy: &dyn Policy,
    ) -> Result<Tensor<2>> {
        self.check_step(tokens, 1, cache)?;
        let batch = tokens.len();
        let ids = self.upload(tokens);
        let positions = self.positions(cache, 1).reshape([batch]);
        let logits = self.decode_at(ids, positions, cache, policy, None)?;
        self.advance(cache, policy);
        Ok(logits)
    }

    /// One decode step of tokens `[B]` at positions `[B]`, both on the device, without the host's
    /// part. It can be recorded. Where `rows` are given, only their logits mean something.
    pub(crate) fn decode_at(
        &self,
        tokens: Tensor<1, Int>,
        positions: Tensor<1, Int>,
        cache: &mut KvCache,
        policy: &dyn Policy,
        rows: Option<&BusyRows>,
    ) -> Result<Tensor<2>> {
        let [batch] = tokens.dims();
        let config = &self.config;
        let width = config.num_query_heads * config.head_dim;
        let mut hidden = BusyRows::take(rows, self.embed(tokens));
        let count = self.layers.len();
        let board = Arc::default();
        let factor = config.rope_scaling.attention_factor();
        for (index, (layer, slots)) in self.layers.iter().zip(&mut cache.layers).enumerate() {
            let projected = BusyRows::spread(rows, layer.project(hidden.clone())?);
            let heads = Arc::new(layer.heads(config, &self.rope));
            let frequencies = self.frequencies.clone();
            let of_all = BusyRows::spread(rows, hidden.clone());
            let input = LayerInput { hidden: of_all, norm: layer.attention_norm.of_rows() };
            let step = Step::projected(projected, heads, positions.clone(), frequencies)
                .with_rope_factor(factor)
                .with_input(input)
                .with_board(Arc::clone(&board));
            let attention = policy.step(LayerContext { index, count }, slots, step)?;
            let attention = BusyRows::take(rows, attention.reshape([batch, width]));
            hidden = layer.finish(hidden, attention, self.ranks())?;
        }
        Ok(BusyRows::spread(rows, self.logits(self.norm.forward(hidden)?)?))
    }

    /// The host's part of a decode step.
    pub(crate) fn advance(&self, cache: &mut KvCache, policy: &dyn Policy) {
        cache.seen.iter_mut().for_each(|seen| *seen += 1);
        if policy.capabilities().renumbers {
            cache.seen = cache.longest();
        }
    }

    /// Appends `N` tokens to every sequence at once and returns the logits behind each of them,
    /// `[B, N, vocabulary]`, f32. Nothing is evicted: for policies whose decode steps change no
    /// slots.
    ///
    /// # Errors
    /// The errors of [`Self::decode`].
    pub fn extend(&self, tokens: &[&[u32]], cache: &mut KvCache) -> Result<Tensor<3>> {
        let hidden = self.extend_hidden(tokens, cache)?;
        let [batch, added, width] = hidden.dims();
        let logits = self.logits(hidden.reshape([batch * added, width]))?;
        Ok(logits.reshape([batch, added, self.config.vocab_size]))
    }

    /// [`Self::extend`], with the logits behind each sequence's last token alone, `[B,
    /// vocabulary]`: the logits of all tokens would take `N` times the memory.
    pub(crate) fn extend_to_last(
        &self,
        tokens: &[&[u32]],
        cache: &mut KvCache,
    ) -> Result<Tensor<2>> {
        let hidden = self.extend_hidden(tokens, cache)?;
        let [batch, added, width] = hidden.dims();
        self.logits(hidden.narrow(1, added - 1, 1).reshape([batch, width]))
    }

    /// Appends tokens; returns the normalised hidden states, `[B, N, hidden]`.
    fn extend_hidden(&self, tokens: &[&[u32]], cache: &mut KvCache) -> Result<Tensor<3>> {
        let batch = tokens.len();
        let added = tokens.first().map_or(0, |tokens| tokens.len());
        if let Some(other) = tokens.iter().find(|tokens| tokens.len() != added) {
            return Err(ModelError::UnequalPrompts { expected: added, actual: other.len() });
        }
        if added == 0 {
            return Err(ModelError::EmptyPrompt);
        }
        let flat: Vec<u32> = tokens.concat();
        self.check_step(&flat, added, cache)?;
        let config = &self.config;
        let width = config.num_query_heads * config.head_dim;
        let mut hidden = self.embed(self.upload(&flat));
        let positions = self.positions(cache, added);
        for (layer, slots) in self.layers.iter().zip(&mut cache.layers) {
            let heads = layer.heads(config, &self.rope);
            let projected = layer.project(hidden.clone())?;
            let [query, key, value] = split_heads(projected, positions.clone(), &heads)?;
            slots.extend(key, value, positions.clone())?;
            let attention = slots.attend_extended(query)?.swap_dims(1, 2);
            hidden =
                layer.finish(hidden, attention.reshape([batch * added, width]), self.ranks())?;
        }
        cache.seen.iter_mut().for_each(|seen| *seen += added);
        let hidden = self.norm.forward(hidden)?;
        let [_, width] = hidden.dims();
        Ok(hidden.reshape([batch, added, width]))
    }

    fn check_step(&self, tokens: &[u32], each: usize, cache: &KvCache) -> Result<()> {
        if tokens.len() != each * cache.batch() {
            let (expected, actual) = (each * cache.batch(), tokens.len());
            return Err(ModelError::UnequalPrompts { expected, actual });
        }
        self.check_tokens(tokens)?;
        self.check_positions(cache, each)
    }

    /// Checks that the model has positions for `added` more tokens.
    pub(crate) fn check_positions(&self, cache: &KvCache, added: usize) -> Result<()> {
        self.config.check_length(cache.seen.iter().max().copied().unwrap_or_default() + added)
    }

    /// The next `added` positions of each sequence, `[B, added]`.
    pub(crate) fn positions(&self, cache: &KvCache, added: usize) -> Tensor<2, Int> {
        let seen = cache.seen.iter();
        let positions: Vec<i32> =
            seen.flat_map(|&seen| seen as i32..(seen + added) as i32).collect();
        let data = TensorData::new(positions, [cache.batch(), added]);
        Tensor::from_data(data, (&self.device(), DType::I32))
    }
}
