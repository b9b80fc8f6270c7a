//! Prefill: the whole prompt, layer by layer, so that one layer's keys and values at a time are
//! whole.

use std::ops::Range;

use burn::tensor::{DType, Int, Tensor, TensorData};
use kv_kernels::{
    HeadLayout, PrefillOptions, PrefillWindow, RotaryTable, prefill_attention, split_heads,
    split_keys_values,
};
use kv_parallel::Collective;
use kv_policies::{FrozenTokens, LayerContext, Needs, Observation, Policy, Reuse, VisibleWindow};

use super::Llama;
use super::active_tokens::ActiveTokens;
use super::layer::Layer;
use super::prefix::SharedPrefix;
use crate::rope::inverse_frequencies_of;
use crate::{ModelError, Result};

/// What to compute in a prefill pass, beside the hidden states.
#[derive(Debug, Clone, Copy, Default)]
pub struct PrefillPass<'a> {
    /// What the observers need.
    pub needs: Needs,
    /// The one policy of the pass, whose windows and frozen tokens change it; `None` for the
    /// model's own computation.
    pub by: Option<&'a dyn Policy>,
    /// One seed a sequence.
    pub seeds: &'a [u64],
    /// Whether to keep the last token's hidden state of every layer.
    pub trace: bool,
    /// Tokens that go through a layer's MLP at a time, whose activations are a prompt's widest;
    /// `None` for 4,096.
    pub chunk: Option<usize>,
}

impl PrefillPass<'_> {
    /// The tokens that the policy freezes in a layer of `tokens` tokens.
    fn frozen(&self, layer: LayerContext, tokens: usize) -> Option<FrozenTokens> {
        let policy = self.by.filter(|_| layer.index < layer.count)?;
        policy.frozen_tokens(layer, tokens).filter(|frozen| !frozen.tokens.is_empty())
    }

    /// A layer's attention.
    fn options(&self, layer: LayerContext) -> PrefillOptions {
        let column_sums = self.needs.column_sums.then_some(usize::MAX);
        let plain = PrefillOptions { column_sums, ..PrefillOptions::default() };
        match self.by.and_then(|policy| policy.visible_window(layer)) {
            Some(VisibleWindow { from, sinks }) => {
                PrefillOptions { window: PrefillWindow::From(from), sinks, ..plain }
            }
            None => plain,
        }
    }
}

/// Tokens of a chunk, unless a pass says otherwise.
const CHUNK: usize = 4096;

/// The results of a prefill pass, beside the ones that its observers kept.
#[derive(Debug, Clone)]
pub struct Prefilled {
    /// Hidden states after the final norm, `[B, T', hidden]`: of all tokens that were not pruned.
    pub hidden: Tensor<3>,
    /// Hidden states of the last token: the embedding, each layer's output, the last one after the
    /// final norm; each `[B, hidden]`. Empty unless asked for.
    pub trace: Vec<Tensor<2>>,
}

impl Prefilled {
    /// The last token's hidden state, `[B, hidden]`.
    pub fn last(&self) -> Tensor<2> {
        let [batch, tokens, width] = self.hidden.dims();
        self.hidden.clone().narrow(1, tokens - 1, 1).reshape([batch, width])
    }
}

/// Tokens whose hidden states go on to the next layer, per sequence; `None` for all.
pub(crate) type Pruning = Option<Vec<Vec<u32>>>;

/// Prompts of equal length that go through a layer together.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PromptGroup<'a> {
    pub(crate) prompts: &'a [&'a [u32]],
    /// One a prompt.
    pub(crate) seeds: &'a [u64],
    /// The beginning of the group's only prompt, whose keys and values are there already.
    pub(crate) prefix: Option<&'a SharedPrefix>,
}

/// Groups of prompts on their way through the layers.
#[derive(Debug)]
pub(crate) struct PrefillRun {
    groups: Vec<PrefillState>,
    /// Layers that all groups have been through.
    done: usize,
}

/// A group on its way through the layers.
#[derive(Debug)]
struct PrefillState {
    seeds: Vec<u64>,
    /// Sequences.
    batch: usize,
    /// Tokens of a prompt.
    tokens: usize,
    /// Tokens of a prompt that were not pruned.
    left: usize,
    /// `[B * left, hidden]`
    hidden: Tensor<2>,
    /// `[B, left]`
    positions: Tensor<2, Int>,
    /// Rotations of these positions.
    rope: RotaryTable,
    /// `[D / 2]`
    frequencies: Vec<f64>,
    /// The last token's states so far.
    trace: Vec<Tensor<2>>,
    /// Keys and values of the layer before, where the next one reuses them.
    previous_layer: Option<[Tensor<4>; 2]>,
    /// The beginning that is not computed: the hidden states are of the tokens behind it.
    prefix: Option<SharedPrefix>,
}

impl Llama {
    /// Runs prompts of equal length through the decoder. `observe` sees each layer once, when its
    /// keys and values are complete; they are dropped when it returns.
    ///
    /// # Errors
    /// [`ModelError::EmptyPrompt`], [`ModelError::PromptTooLong`], [`ModelError::TokenOutOfRange`],
    /// [`ModelError::UnequalPrompts`], [`ModelError::InvalidFrozen`] and
    /// [`ModelError::FrozenQueries`] for frozen tokens that the policy cannot have or needs the
    /// queries of, and the errors of `observe`.
    pub fn prefill(
        &self,
        prompts: &[&[u32]],
        pass: PrefillPass<'_>,
        observe: &mut dyn FnMut(&Observation<'_>) -> Result<Pruning>,
    ) -> Result<Prefilled> {
        let whole = [PromptGroup { prompts, seeds: pass.seeds, prefix: None }];
        let mut prefilled = self.prefill_groups(&whole, pass, &mut |_, seen| observe(seen))?;
        prefilled.pop().ok_or(ModelError::EmptyPrompt)
    }

    /// Runs groups of prompts through the decoder, each layer for one group after the other, so
    /// that only one group's activations are there at a time. `observe` is told whose layer it
    /// sees.
    ///
    /// # Errors
    /// The errors of [`Self::prefill`].
    pub(crate) fn prefill_groups(
        &self,
        groups: &[PromptGroup<'_>],
        pass: PrefillPass<'_>,
        observe: &mut dyn FnMut(usize, &Observation<'_>) -> Result<Pruning>,
    ) -> Result<Vec<Prefilled>> {
        let mut run = PrefillRun::new(self, groups)?;
        while run.layer(self, &pass, observe)? {}
        run.finish(self, &pass)
    }

    /// Checks prompts before anything runs; returns `[B, T]`.
    fn check_prompts(&self, prompts: &[&[u32]]) -> Result<[usize; 2]> {
        let tokens = prompts.first().map_or(0, |prompt| prompt.len());
        for prompt in prompts {
            self.check_prompt(prompt)?;
            if prompt.len() != tokens {
                let actual = prompt.len();
                return Err(ModelError::UnequalPrompts { expected: tokens, actual });
            }
        }
        if tokens == 0 {
            return Err(ModelError::EmptyPrompt);
        }
        Ok([prompts.len(), tokens])
    }

    /// Checks one prompt's length and tokens.
    pub(crate) fn check_prompt(&self, prompt: &[u32]) -> Result<()> {
        if prompt.is_empty() {
            return Err(ModelError::EmptyPrompt);
        }
        self.config.check_length(prompt.len())?;
        self.check_tokens(prompt)
    }

    /// Checks that tokens are in the vocabulary.
    pub(crate) fn check_tokens(&self, tokens: &[u32]) -> Result<()> {
        let vocabulary = self.config.vocab_size;
        match tokens.iter().find(|&&token| token as usize >= vocabulary) {
            Some(&token) => Err(ModelError::TokenOutOfRange { token, vocabulary }),
            None => Ok(()),
        }
    }

    /// Tokens, or other numbers, on the device, `[N]`.
    pub(crate) fn upload(&self, tokens: &[u32]) -> Tensor<1, Int> {
        let ids: Vec<i32> = tokens.iter().map(|&token| token as i32).collect();
        let ids = TensorData::new(ids, [tokens.len()]);
        Tensor::from_data(ids, (&self.device(), DType::I32))
    }
}

impl PrefillRun {
    /// # Errors
    /// The errors of [`Llama::prefill`].
    pub(crate) fn new(llama: &Llama, groups: &[PromptGroup<'_>]) -> Result<Self> {
        // All are checked before anything runs.
        for group in groups {
            llama.check_prompts(group.prompts)?;
        }
        let groups = groups.iter().map(|group| PrefillState::new(llama, group)).collect();
        Ok(Self { groups, done: 0 })
    }

    /// Goes through the next layer; returns whether layers are left.
    ///
    /// # Errors
    /// The errors of [`Llama::prefill`].
    pub(crate) fn layer(
        &mut self,
        llama: &Llama,
        pass: &PrefillPass<'_>,
        observe: &mut dyn FnMut(usize, &Observation<'_>) -> Result<Pruning>,
    ) -> Result<bool> {
        for (at, group) in self.groups.iter_mut().enumerate() {
            group.layer(llama, self.done, pass, &mut |seen| observe(at, seen))?;
        }
        self.done += 1;
        Ok(self.done < llama.layers.len())
    }

    /// The hidden states behind the last layer.
    ///
    /// # Errors
    /// The errors of [`Llama::prefill`].
    pub(crate) fn finish(self, llama: &Llama, pass: &PrefillPass<'_>) -> Result<Vec<Prefilled>> {
        self.groups.into_iter().map(|group| group.finish(llama, pass)).collect()
    }
}

impl PrefillState {
    fn new(llama: &Llama, group: &PromptGroup<'_>) -> Self {
        let (batch, tokens) = (group.prompts.len(), group.prompts.first().map_or(0, |p| p.len()));
        let known = group.prefix.map_or(0, |prefix| prefix.tokens);
        let own: Vec<u32> =
            group.prompts.iter().flat_map(|prompt| &prompt[known..]).copied().collect();
        let hidden = llama.embed(llama.upload(&own));
        let positions = positions(known..tokens, batch, llama);
        Self {
            seeds: group.seeds.to_vec(),
            batch,
            tokens,
            left: tokens - known,
            hidden,
            positions,
            rope: llama.prompt_rope(tokens),
            frequencies: inverse_frequencies_of(&llama.config, tokens),
            trace: Vec::new(),
            previous_layer: None,
            prefix: group.prefix.cloned(),
        }
    }

    /// Goes through one layer.
    fn layer(
        &mut self,
        llama: &Llama,
        index: usize,
        pass: &PrefillPass<'_>,
        observe: &mut dyn FnMut(&Observation<'_>) -> Result<Pruning>,
    ) -> Result<()> {
        if let Some(prefix) = self.prefix.clone() {
            return self.layer_behind(&prefix, llama, index, pass, observe);
        }
        let (layer, count) = (&llama.layers[index], llama.layers.len());
        let (batch, left) = (self.batch, self.left);
        if pass.trace {
            self.trace.push(last_of(&self.hidden, batch, left));
        }
        let context = LayerContext { index, count };
        let frozen = pass.frozen(context, left);
        let computed = ActiveTokens::new(index, [batch, left], frozen.as_ref())?;
        let window = pass.needs.window.min(left);
        if window > computed.last() {
            let (needed, computed) = (window, computed.last());
            return Err(ModelError::FrozenQueries { layer: index, needed, computed });
        }
        let (own, own_positions) =
            (computed.rows(&self.hidden), computed.positions(&self.positions));
        let projected = layer.project(own.clone())?;
        let heads = layer.heads(&llama.config, &self.rope);
        let raw_queries = if pass.needs.raw_queries {
            let unrotated = HeadLayout { rope: None, ..heads.clone() };
            let [query, ..] = split_heads(projected.clone(), own_positions.clone(), &unrotated)?;
            // Attention sees queries at the rotary embedding's scale.
            Some(match llama.config.rope_scaling.attention_factor() {
                1.0 => query,
                factor => query.mul_scalar(factor),
            })
        } else {
            None
        };
        let [query, mut key, mut value] = split_heads(projected, own_positions, &heads)?;
        if let Some(frozen) = &frozen {
            let [frozen_key, frozen_value] = match frozen.reuse {
                Reuse::Hidden => {
                    let rows = computed.frozen_rows(&self.hidden);
                    let projected = layer.project_keys_values(rows, &llama.config)?;
                    split_keys_values(
                        projected,
                        computed.frozen_positions(&self.positions),
                        &heads,
                    )?
                }
                Reuse::KeysValues => computed.frozen_of(index, self.previous_layer.as_ref())?,
            };
            key = computed.with_frozen_heads(key, frozen_key);
            value = computed.with_frozen_heads(value, frozen_value);
        }
        let attention = computed.attend(&query, &key, &value, &pass.options(context))?;
        let last = || query.clone().narrow(2, computed.count() - window, window);
        let observation = Observation::new(&key, &value, &self.positions)
            .of_layer(context)
            .of_heads(llama.heads())
            .of_prompt(self.tokens)
            .with_window((window > 0).then(last))
            .with_column_sums(attention.column_sums)
            .with_raw_queries(raw_queries)
            .with_frequencies(&self.frequencies)
            .with_seeds(&self.seeds);
        let pruned = observe(&observation)?;
        drop(observation);
        let attention = attention.output.swap_dims(1, 2);
        let attended = llama.config.num_query_heads * llama.config.head_dim;
        let attention = attention.reshape([batch * computed.count(), attended]);
        let own = in_chunks((layer, llama.ranks()), own, attention, pass.chunk.unwrap_or(CHUNK))?;
        self.hidden = computed.with_frozen_rows(own, &self.hidden);
        let next = LayerContext { index: index + 1, count };
        let reused = pass.frozen(next, left).is_some_and(|f| f.reuse == Reuse::KeysValues);
        self.previous_layer = (reused && pruned.is_none()).then_some([key, value]);
        if let Some(kept) = pruned {
            self.prune(llama, &kept);
        }
        Ok(())
    }

    /// Goes through one layer of the tokens behind a prefix, whose keys and values come from a
    /// prompt that begins alike.
    fn layer_behind(
        &mut self,
        prefix: &SharedPrefix,
        llama: &Llama,
        index: usize,
        pass: &PrefillPass<'_>,
        observe: &mut dyn FnMut(&Observation<'_>) -> Result<Pruning>,
    ) -> Result<()> {
        let (layer, count) = (&llama.layers[index], llama.layers.len());
        let context = LayerContext { index, count };
        let known = &prefix.prefix.layers[index];
        let heads = layer.heads(&llama.config, &self.rope);
        let projected = layer.project(self.hidden.clone())?;
        let [query, key, value] = split_heads(projected, self.positions.clone(), &heads)?;
        let whole = |known: &Tensor<4>, own: Tensor<4>| {
            Tensor::cat(vec![known.clone().narrow(2, 0, prefix.tokens), own], 2)
        };
        let (key, value) = (whole(&known.keys, key), whole(&known.values, value));
        let attention = prefill_attention(&query, &key, &value, &pass.options(context))?;
        let column_sums = attention.column_sums.map(|sums| match &known.column_sums {
            Some(known) => {
                let [batch, heads, _] = sums.dims();
                let both = sums.clone().narrow(2, 0, prefix.tokens) + known.clone();
                sums.slice_assign([0..batch, 0..heads, 0..prefix.tokens], both)
            }
            None => sums,
        });
        let window = pass.needs.window.min(self.left);
        let last = || query.clone().narrow(2, self.left - window, window);
        let all = positions(0..self.tokens, self.batch, llama);
        let observation = Observation::new(&key, &value, &all)
            .of_layer(context)
            .of_heads(llama.heads())
            .of_prompt(self.tokens)
            .with_window((window > 0).then(last))
            .with_column_sums(column_sums)
            .with_frequencies(&self.frequencies)
            .with_seeds(&self.seeds);
        observe(&observation)?;
        drop(observation);
        let width = llama.config.num_query_heads * llama.config.head_dim;
        let attention = attention.output.swap_dims(1, 2).reshape([self.left, width]);
        let chunk = pass.chunk.unwrap_or(CHUNK);
        self.hidden = in_chunks((layer, llama.ranks()), self.hidden.clone(), attention, chunk)?;
        Ok(())
    }

    /// Leaves the tokens `kept` of each sequence, equally many of all.
    fn prune(&mut self, llama: &Llama, kept: &[Vec<u32>]) {
        let (batch, left) = (self.batch, self.left);
        let next = kept.first().map_or(0, Vec::len);
        let rows = kept
            .iter()
            .enumerate()
            .flat_map(|(row, kept)| kept.iter().map(move |&token| (row * left) as u32 + token));
        let rows = llama.upload(&rows.collect::<Vec<_>>());
        self.hidden = self.hidden.clone().select(0, rows.clone());
        let positions = self.positions.clone().reshape([batch * left]).select(0, rows);
        (self.positions, self.left) = (positions.reshape([batch, next]), next);
    }

    fn finish(mut self, llama: &Llama, pass: &PrefillPass<'_>) -> Result<Prefilled> {
        let [batch, left] = [self.batch, self.left];
        let hidden = llama.norm.forward(self.hidden)?;
        if pass.trace {
            self.trace.push(last_of(&hidden, batch, left));
        }
        let hidden = hidden.reshape([batch, left, llama.config.hidden_size]);
        Ok(Prefilled { hidden, trace: self.trace })
    }
}

/// Positions of tokens in each sequence, `[B, N]`.
fn positions(tokens: Range<usize>, batch: usize, llama: &Llama) -> Tensor<2, Int> {
    let count = tokens.len();
    let positions = tokens.start as i64..tokens.end as i64;
    let positions = Tensor::<1, Int>::arange(positions, (&llama.device(), DType::I32));
    positions.unsqueeze_dim::<2>(0).expand([batch, count])
}

/// The rest of a layer, chunk by chunk.
fn in_chunks(
    (layer, ranks): (&Layer, &dyn Collective),
    hidden: Tensor<2>,
    attention: Tensor<2>,
    chunk: usize,
) -> Result<Tensor<2>> {
    let (rows, chunk) = (hidden.dims()[0], chunk.max(1));
    if rows <= chunk {
        return layer.finish(hidden, attention, ranks);
    }
    let parts = (0..rows).step_by(chunk).map(|start| {
        let part = |whole: &Tensor<2>| whole.clone().narrow(0, start, chunk.min(rows - start));
        layer.finish(part(&hidden), part(&attention), ranks)
    });
    Ok(Tensor::cat(parts.collect::<Result<_>>()?, 0))
}

fn last_of(hidden: &Tensor<2>, batch: usize, tokens: usize) -> Tensor<2> {
    let width = hidden.dims()[1];
    let last = hidden.clone().reshape([batch, tokens, width]).narrow(1, tokens - 1, 1);
    last.reshape([batch, width])
}
