//! What a policy is shown of a prompt.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

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

/// Which of a layer's key-value heads are shown: all, or one rank's part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadPart {
    /// The first head that is shown.
    pub first: usize,
    /// The layer's heads on all ranks together.
    pub all: usize,
}

/// One layer after its prompt was prefilled: a group of sequences of equal length.
#[derive(Debug, Clone)]
pub struct Observation<'a> {
    /// The layer.
    pub layer: LayerContext,
    /// Which of its key-value heads these are.
    pub heads: HeadPart,
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
    /// Scores that policies have computed of it.
    pub known: KnownScores,
}

/// Scores that policies have computed of an observation, for all that are shown it. A clone has
/// none, since it may be changed.
#[derive(Debug, Default)]
pub struct KnownScores(Arc<Mutex<BTreeMap<String, Tensor<3>>>>);

impl KnownScores {
    fn all(&self) -> MutexGuard<'_, BTreeMap<String, Tensor<3>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Clone for KnownScores {
    fn clone(&self) -> Self {
        Self::default()
    }
}

impl<'a> Observation<'a> {
    /// Keys `[B, Hkv, T, D]` after RoPE, values `[B, Hkv, T, D]` and positions `[B, T]` of a prompt
    /// in the one layer of a model without RoPE. Whatever else a policy needs is added by the
    /// methods below; [`crate::Policy::needs`] says what that is.
    pub fn new(keys: &'a Tensor<4>, values: &'a Tensor<4>, positions: &'a Tensor<2, Int>) -> Self {
        Self {
            layer: LayerContext { index: 0, count: 1 },
            heads: HeadPart { first: 0, all: keys.dims()[1] },
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
            known: KnownScores::default(),
        }
    }

    /// The observation with another layer in it.
    #[must_use]
    pub fn of_layer(self, layer: LayerContext) -> Self {
        Self { layer, ..self }
    }

    /// The observation of a part of the layer's key-value heads.
    #[must_use]
    pub fn of_heads(self, heads: HeadPart) -> Self {
        Self { heads, ..self }
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

    /// Scores that depend on the observation and the parameters in `key` alone: computed when they
    /// are first asked for, by whichever policy, and there for all that are shown the observation.
    pub(crate) fn once(
        &self,
        key: &str,
        compute: impl FnOnce() -> Result<Tensor<3>>,
    ) -> Result<Tensor<3>> {
        let found = self.known.all().get(key).cloned();
        if let Some(scores) = found {
            return Ok(scores);
        }
        let scores = compute()?;
        self.known.all().insert(key.to_string(), scores.clone());
        Ok(scores)
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
    heads: HeadPart,
    keys: Tensor<4>,
    values: Tensor<4>,
    positions: Tensor<2, Int>,
    prompt_tokens: usize,
    window: Option<Tensor<4>>,
    column_sums: Option<Tensor<3>>,
    raw_queries: Option<Tensor<4>>,
    inverse_frequencies: Vec<f64>,
    seeds: Vec<u64>,
    known: KnownScores,
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
            heads: observation.heads,
            keys: observation.keys.clone(),
            values: observation.values.clone(),
            positions: observation.positions.clone(),
            prompt_tokens: observation.prompt_tokens,
            window: window.map(|window| window.clone().mul_scalar(1.0)),
            column_sums: sums,
            raw_queries: queries,
            inverse_frequencies: observation.inverse_frequencies.to_vec(),
            seeds: observation.seeds.to_vec(),
            known: KnownScores(observation.known.0.clone()),
        }
    }

    /// The observation that a policy is shown.
    pub fn view(&self) -> Observation<'_> {
        let view = Observation::new(&self.keys, &self.values, &self.positions)
            .of_layer(self.layer)
            .of_heads(self.heads)
            .of_prompt(self.prompt_tokens)
            .with_window(self.window.clone())
            .with_column_sums(self.column_sums.clone())
            .with_raw_queries(self.raw_queries.clone())
            .with_frequencies(&self.inverse_frequencies)
            .with_seeds(&self.seeds);
        Observation { known: KnownScores(self.known.0.clone()), ..view }
    }

    /// One sequence of the batch.
    pub fn row(&self, row: usize) -> Self {
        if self.keys.dims()[0] == 1 {
            return self.clone();
        }
        let of = |tensor: &Tensor<4>| tensor.clone().narrow(0, row, 1);
        Self {
            layer: self.layer,
            heads: self.heads,
            keys: of(&self.keys),
            values: of(&self.values),
            positions: self.positions.clone().cast(DType::I32).narrow(0, row, 1),
            prompt_tokens: self.prompt_tokens,
            window: self.window.as_ref().map(of),
            column_sums: self.column_sums.as_ref().map(|sums| sums.clone().narrow(0, row, 1)),
            raw_queries: self.raw_queries.as_ref().map(of),
            inverse_frequencies: self.inverse_frequencies.clone(),
            seeds: self.seeds.get(row).copied().into_iter().collect(),
            known: KnownScores::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use kv_testing::devices;

    use super::*;

    /// Scores are computed once, until an observation is cloned, which may be changed.
    #[test]
    fn scores_are_known_to_all_who_see_the_observation() {
        let device = devices().remove(0).device;
        let keys = Tensor::<4>::zeros([1, 1, 2, 2], &device);
        let positions = Tensor::<2, Int>::zeros([1, 2], &device);
        let observation = Observation::new(&keys, &keys, &positions);
        let count = std::cell::Cell::new(0);
        let ask = |observation: &Observation<'_>, key: &str| {
            let compute = || {
                count.set(count.get() + 1);
                Ok(Tensor::<3>::zeros([1, 1, 2], &device))
            };
            observation.once(key, compute).unwrap();
            count.get()
        };
        assert_eq!([ask(&observation, "a"), ask(&observation, "a")], [1, 1]);
        assert_eq!([ask(&observation, "b"), ask(&observation.clone(), "a")], [2, 3]);
        let owned = OwnedObservation::new(&observation, Needs::default());
        assert_eq!([ask(&owned.view(), "a"), ask(&owned.view(), "c")], [3, 4]);
        assert_eq!(ask(&observation, "c"), 4);
    }
}
