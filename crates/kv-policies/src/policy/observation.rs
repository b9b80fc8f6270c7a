//! What a policy is shown of a prompt.

use burn::tensor::{DType, Int, Tensor};
use kv_core::{CacheOptions, LayerCache, Room, Selection};

use super::Needs;
use super::attention_scores::last_queries;
use crate::{PolicyError, Result};

/// The index of a layer, and the number of layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerContext {
    /// Counted from 0.
    pub index: usize,
    /// Layers of the model.
    pub count: usize,
}

/// One layer after its prompt was prefilled: a group of sequences of equal length.
#[derive(Debug, Clone)]
pub struct Observation<'a> {
    /// The layer.
    pub layer: LayerContext,
    /// Keys after RoPE, `[B, Hkv, T, D]`.
    pub keys: &'a Tensor<4>,
    /// Values, `[B, Hkv, T, D]`.
    pub values: &'a Tensor<4>,
    /// Logical positions, `[B, T]`, ascending.
    pub positions: &'a Tensor<2, Int>,
    /// Tokens of the prompt; more than `T` where earlier layers pruned hidden states.
    pub prompt_tokens: usize,
    /// The last `W >= needs.window` queries after RoPE (fewer only if `T` is), `[B, Hq, W, D]`.
    pub window: Option<Tensor<4>>,
    /// Column sums of the causal attention of each query head, `[B, Hq, T]`, f32, over the queries
    /// that were computed.
    pub column_sums: Option<Tensor<3>>,
    /// Queries before RoPE, `[B, Hq, N, D]`: all `T` of a prompt, but for frozen tokens; the last
    /// ones during decode.
    pub raw_queries: Option<Tensor<4>>,
    /// Whether these are a cache's slots during decode, shown as if they were a prompt.
    pub decoding: bool,
    /// RoPE's inverse frequencies, `[D / 2]`; empty for models without RoPE.
    pub inverse_frequencies: &'a [f64],
    /// One seed a sequence, for policies that draw.
    pub seeds: &'a [u64],
}

impl<'a> Observation<'a> {
    /// Keys `[B, Hkv, T, D]` after RoPE, values `[B, Hkv, T, D]` and positions `[B, T]` of a prompt
    /// in the one layer of a model without RoPE. Whatever else a policy needs is added by the
    /// methods below; [`crate::Policy::needs`] says what that is.
    pub fn new(keys: &'a Tensor<4>, values: &'a Tensor<4>, positions: &'a Tensor<2, Int>) -> Self {
        Self {
            layer: LayerContext { index: 0, count: 1 },
            keys,
            values,
            positions,
            prompt_tokens: keys.dims()[2],
            window: None,
            column_sums: None,
            raw_queries: None,
            decoding: false,
            inverse_frequencies: &[],
            seeds: &[],
        }
    }

    /// The observation with another layer in it.
    #[must_use]
    pub fn of_layer(self, layer: LayerContext) -> Self {
        Self { layer, ..self }
    }

    /// The observation of a prompt that had `prompt_tokens` tokens before earlier layers pruned
    /// some.
    #[must_use]
    pub fn of_prompt(self, prompt_tokens: usize) -> Self {
        Self { prompt_tokens, ..self }
    }

    /// The observation with the last queries after RoPE, `[B, Hq, W, D]`.
    #[must_use]
    pub fn with_window(self, window: impl Into<Option<Tensor<4>>>) -> Self {
        Self { window: window.into(), ..self }
    }

    /// The observation with column sums of the causal attention, `[B, Hq, T]`, f32.
    #[must_use]
    pub fn with_column_sums(self, column_sums: impl Into<Option<Tensor<3>>>) -> Self {
        Self { column_sums: column_sums.into(), ..self }
    }

    /// The observation with queries before RoPE, `[B, Hq, N, D]`.
    #[must_use]
    pub fn with_raw_queries(self, raw_queries: impl Into<Option<Tensor<4>>>) -> Self {
        Self { raw_queries: raw_queries.into(), ..self }
    }

    /// The observation of a model whose RoPE has these inverse frequencies, `[D / 2]`.
    #[must_use]
    pub fn with_frequencies(self, inverse_frequencies: &'a [f64]) -> Self {
        Self { inverse_frequencies, ..self }
    }

    /// The observation with one seed a sequence, for policies that draw.
    #[must_use]
    pub fn with_seeds(self, seeds: &'a [u64]) -> Self {
        Self { seeds, ..self }
    }

    /// The observation of a cache's slots during decode, shown as if they were a prompt.
    #[must_use]
    pub fn during_decode(self) -> Self {
        Self { decoding: true, ..self }
    }

    /// `[B, Hkv, T, D]`
    pub fn dims(&self) -> [usize; 4] {
        self.keys.dims()
    }

    /// Tokens in this layer.
    pub fn tokens(&self) -> usize {
        self.keys.dims()[2]
    }

    /// The last `count` queries after RoPE (fewer only if there are), `[B, Hq, count, D]`.
    ///
    /// # Errors
    /// [`PolicyError::MissingObservation`] where `policy` did not declare that it needs them.
    pub fn last_queries(&self, policy: &'static str, count: usize) -> Result<Tensor<4>> {
        let missing = PolicyError::MissingObservation { policy, what: "the last queries" };
        Ok(last_queries(self.window.as_ref().ok_or(missing)?, count))
    }

    /// The column sums of the causal attention, `[B, Hq, T]`, f32.
    ///
    /// # Errors
    /// [`PolicyError::MissingObservation`] where `policy` did not declare that it needs them.
    pub fn attention_sums(&self, policy: &'static str) -> Result<Tensor<3>> {
        let missing = PolicyError::MissingObservation { policy, what: "column sums of attention" };
        self.column_sums.clone().ok_or(missing)
    }

    /// A cache of what `selection` keeps of the prompt, not yet prepared for decoding.
    ///
    /// # Errors
    /// The errors of [`LayerCache::from_prefill`].
    pub fn cache(
        &self,
        selection: &Selection,
        room: Room,
        options: CacheOptions,
    ) -> Result<LayerCache> {
        let Self { keys, values, positions, .. } = self;
        Ok(LayerCache::from_prefill(keys, values, positions, selection, room, options)?)
    }
}

/// An observation that outlives the pass that made it, for policies that compress all layers
/// together.
#[derive(Debug, Clone)]
pub struct OwnedObservation {
    layer: LayerContext,
    keys: Tensor<4>,
    values: Tensor<4>,
    positions: Tensor<2, Int>,
    prompt_tokens: usize,
    window: Option<Tensor<4>>,
    column_sums: Option<Tensor<3>>,
    raw_queries: Option<Tensor<4>>,
    inverse_frequencies: Vec<f64>,
    seeds: Vec<u64>,
}

impl OwnedObservation {
    /// A copy of the parts that `needs` names.
    pub fn new(observation: &Observation<'_>, needs: Needs) -> Self {
        // A copy: a view would keep all queries alive.
        let window = observation.window.as_ref().filter(|_| needs.window > 0);
        let sums = observation.column_sums.clone().filter(|_| needs.column_sums);
        let queries = observation.raw_queries.clone().filter(|_| needs.raw_queries);
        Self {
            layer: observation.layer,
            keys: observation.keys.clone(),
            values: observation.values.clone(),
            positions: observation.positions.clone(),
            prompt_tokens: observation.prompt_tokens,
            window: window.map(|window| window.clone().mul_scalar(1.0)),
            column_sums: sums,
            raw_queries: queries,
            inverse_frequencies: observation.inverse_frequencies.to_vec(),
            seeds: observation.seeds.to_vec(),
        }
    }

    /// The observation that a policy is shown.
    pub fn view(&self) -> Observation<'_> {
        Observation::new(&self.keys, &self.values, &self.positions)
            .of_layer(self.layer)
            .of_prompt(self.prompt_tokens)
            .with_window(self.window.clone())
            .with_column_sums(self.column_sums.clone())
            .with_raw_queries(self.raw_queries.clone())
            .with_frequencies(&self.inverse_frequencies)
            .with_seeds(&self.seeds)
    }

    /// One sequence of the batch.
    pub fn row(&self, row: usize) -> Self {
        let of = |tensor: &Tensor<4>| tensor.clone().narrow(0, row, 1);
        Self {
            layer: self.layer,
            keys: of(&self.keys),
            values: of(&self.values),
            positions: self.positions.clone().cast(DType::I32).narrow(0, row, 1),
            prompt_tokens: self.prompt_tokens,
            window: self.window.as_ref().map(of),
            column_sums: self.column_sums.as_ref().map(|sums| sums.clone().narrow(0, row, 1)),
            raw_queries: self.raw_queries.as_ref().map(of),
            inverse_frequencies: self.inverse_frequencies.clone(),
            seeds: self.seeds.get(row).copied().into_iter().collect(),
        }
    }
}
