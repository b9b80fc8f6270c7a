//! What a policy is, what it is shown, and what it does. All groups of policies use the submodules:
//!
//! * [`observation`]: what a policy is shown of a prompt.
//! * [`step`]: one decode step of one layer; [`board`]: what layers of one step show each other.
//! * [`step_plan`]: what a policy plans for such a step, and how a plan runs.
//! * [`prompt`]: how a policy changes a prompt's own computation.
//! * [`evictor`]: policies whose victims another policy merges before they are dropped.
//! * [`forward`]: what policies around another leave to the other.
//! * [`lists`]: steps that attend to lists of slots; [`reads`]: counts of what steps have read.
//! * [`attention_scores`]: attention of the last queries, pooled and reduced.
//! * [`write_slots`]: caches of a fixed size, whose new tokens overwrite.
//! * [`kept_tokens`]: tracks of what a cache keeps of a prompt.
//! * [`ends`]: first and last tokens that always stay.
//! * [`config`]: parameters from and to JSON; [`check`]: what they may be; [`spelling`]: kernels'
//!   choices among them.
//! * [`state_tensors`], [`sentinels`], [`generator`], [`notice`], [`error`]: state tensors,
//!   values that are no numbers, random numbers, warnings, errors.

pub(crate) mod attention_scores;
pub(crate) mod board;
pub(crate) mod check;
pub(crate) mod config;
pub(crate) mod ends;
pub(crate) mod error;
pub(crate) mod evictor;
pub(crate) mod forward;
pub(crate) mod generator;
pub(crate) mod kept_tokens;
pub(crate) mod lists;
pub(crate) mod notice;
pub(crate) mod observation;
pub(crate) mod prompt;
pub(crate) mod reads;
pub(crate) mod sentinels;
pub(crate) mod spelling;
pub(crate) mod state_tensors;
pub(crate) mod step;
pub(crate) mod step_plan;
pub(crate) mod write_slots;

use std::any::Any;
use std::fmt::Debug;
use std::sync::Arc;

use burn::tensor::Tensor;
use kv_core::{Budget, CacheOptions, LayerCache, NUMERATORS, Room, Selection};

use error::Result;
use evictor::EvictionPolicy;
use observation::{LayerContext, Observation, OwnedObservation};
use prompt::{FrozenTokens, VisibleWindow};
use step::Step;
use step_plan::StepPlan;

/// What a policy must be shown during prefill; nothing else is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Needs {
    /// The last queries, this many (after RoPE).
    pub window: usize,
    /// Column sums of the causal attention matrix.
    pub column_sums: bool,
    /// All queries before RoPE.
    pub raw_queries: bool,
}

impl Needs {
    /// The needs of both, taken together.
    pub fn union(self, other: Self) -> Self {
        Self {
            window: self.window.max(other.window),
            column_sums: self.column_sums || other.column_sums,
            raw_queries: self.raw_queries || other.raw_queries,
        }
    }
}

/// What a policy does, as far as those who run it must know. By default a policy chooses what to
/// keep of a prompt, each layer by itself, and its decode steps only append and attend.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Capabilities {
    /// The prompt's own computation depends on the policy: it prunes hidden states, narrows what
    /// queries see, or freezes tokens. Such a policy prefills alone.
    pub changes_prefill: bool,
    /// Layers are compressed together ([`Policy::prefill_layers`]), when the whole prompt has been
    /// prefilled. Until then all layers' keys and values are held whole.
    pub needs_all_layers: bool,
    /// Decode steps may drop or change slots, or read a part of them. If not, several tokens may be
    /// appended at once.
    pub changes_decode: bool,
    /// Layers take frozen tokens or lists of tokens from layers before them.
    pub reads_other_layers: bool,
    /// A choice for one head depends on the layer's other heads, so that a rank with a part of the
    /// heads cannot make it by itself.
    pub compares_heads: bool,
    /// Decode steps compare the hidden states that a layer projects ([`crate::LayerInput`]).
    pub compares_hidden: bool,
    /// Positions are renumbered without gaps, so that the next token's position is the number of
    /// slots rather than the number of tokens seen.
    pub renumbers: bool,
    /// Choices of a prompt or of decode steps are drawn from the request's seed: two requests with
    /// one prompt and different seeds hold different slots.
    pub draws: bool,
    /// The weights that the slots of a compressed prompt have.
    pub weights: SlotWeights,
    /// The choice of a prompt, or the decode steps behind another policy's choice, make sense by
    /// themselves, so that the policy may be a part of [`crate::Combine`].
    pub combines: bool,
    /// The share of the attention that decode steps are to drop at most, where the policy measures
    /// it and sets its sizes by it.
    pub target: Option<f32>,
    /// Steps of a block that share index sets of one size, where each set holds the tokens of the
    /// highest sums over a group's query heads; `None` where sets have other sizes or other scores,
    /// and for policies without index sets.
    pub block_of_sums: Option<usize>,
}

impl Default for Capabilities {
    fn default() -> Self {
        Self {
            changes_prefill: false,
            needs_all_layers: false,
            changes_decode: false,
            reads_other_layers: false,
            compares_heads: false,
            compares_hidden: false,
            renumbers: false,
            draws: false,
            weights: SlotWeights::NONE,
            combines: true,
            target: None,
            block_of_sums: None,
        }
    }
}

/// The weights that slots have beside keys and values. Attention reads them at every step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct SlotWeights {
    /// Each slot has a weight, as a logarithm ([`LayerCache::log_weights`]).
    pub weighted: bool,
    /// Each value has a weight of its own in the numerator ([`NUMERATORS`]).
    pub numerators: bool,
}

impl SlotWeights {
    /// Every slot counts once.
    pub const NONE: Self = Self { weighted: false, numerators: false };

    /// The weights that the slots of a cache have.
    pub fn of(cache: &LayerCache) -> Self {
        let weighted = cache.log_weights().is_some();
        Self { weighted, numerators: cache.track(NUMERATORS).is_some() }
    }

    /// The weights of both.
    pub fn union(self, other: Self) -> Self {
        Self {
            weighted: self.weighted || other.weighted,
            numerators: self.numerators || other.numerators,
        }
    }
}

/// The policies that a policy is made of.
#[derive(Debug, Clone, Copy)]
pub enum Composition<'a> {
    /// It is made of no others.
    None,
    /// It asks another one for scores or victims, within its own budget.
    Around {
        /// The option that configures the inner policy.
        option: &'static str,
        /// The inner policy.
        inner: &'a dyn Policy,
    },
    /// One policy chooses from prompts, another one decodes.
    Combined {
        /// The policy of prompts.
        prefill: &'a dyn Policy,
        /// The policy of decode steps.
        decode: &'a dyn Policy,
    },
}

/// What a policy keeps of a prompt.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The tokens kept of each head range.
    pub selection: Selection,
    /// Log-weights of the kept tokens, in the selection's order; `None` if all are 1.
    pub log_weights: Option<Vec<f32>>,
    /// Weights of the kept tokens' values in the numerator, in the selection's order; `None` if
    /// values weigh as much as their tokens.
    pub numerators: Option<Vec<f32>>,
}

impl Plan {
    /// Keeps all tokens.
    pub fn whole(observation: &Observation<'_>) -> Self {
        let [batch, kv_heads, tokens, _] = observation.dims();
        Selection::all(batch * kv_heads, tokens).into()
    }
}

impl From<Selection> for Plan {
    fn from(selection: Selection) -> Self {
        Self { selection, log_weights: None, numerators: None }
    }
}

/// A KV-cache compression policy: how one layer's slots are chosen after prefill and kept within
/// their budget during decode.
///
/// A policy is configuration only and serves any number of requests at once. What it must remember
/// lives in the [`LayerCache`] and is saved with it: tracks, which follow the slots, state tensors
/// of a layer, and types of the policy's own ([`kv_core::PolicyState`]).
pub trait Policy: Any + Debug + Send + Sync {
    /// The registry's name.
    fn name(&self) -> &'static str;

    /// The whole configuration, as [`crate::build`] takes it.
    fn config(&self) -> serde_json::Value;

    /// What the policy does, as far as those who run it must know.
    fn capabilities(&self) -> Capabilities {
        Capabilities::default()
    }

    /// Slots that a head keeps, or tokens that it reads, where the policy is given a number of
    /// them.
    fn budget(&self) -> Option<Budget> {
        None
    }

    /// Tokens that share an entry of the policy's sketch behind a prompt of `_prompt` tokens;
    /// `None` without a sketch.
    fn sketch_load(&self, _prompt: usize) -> Option<f64> {
        None
    }

    /// The policies that this one is made of.
    fn composition(&self) -> Composition<'_> {
        Composition::None
    }

    /// The most slots that the policy keeps of a layer's prompt of `tokens` tokens, the mean over
    /// heads; by default all. Those who reserve memory before a prompt is computed ask for it.
    fn most_kept(&self, layer: LayerContext, tokens: usize) -> usize {
        let _ = layer;
        tokens
    }

    /// The fewest slots that the policy keeps of a prompt of `tokens` tokens, the mean over layers
    /// and heads, as far as it is known before the prompt is computed; by default the budget. Those
    /// who refuse prompts that cannot fit ask for it.
    fn least_kept(&self, tokens: usize) -> usize {
        self.budget().map_or(0, |budget| budget.resolve(tokens).min(tokens))
    }

    /// What prefill must compute for [`Self::select`] and [`Self::init_cache`] beside keys and
    /// values.
    fn needs(&self) -> Needs {
        Needs::default()
    }

    /// Chooses what to keep of a prompt; by default everything.
    ///
    /// # Errors
    /// [`crate::PolicyError`] for budgets that cannot be met and observations that lack what the
    /// policy needs.
    fn select(&self, observation: &Observation<'_>) -> Result<Plan> {
        Ok(Plan::whole(observation))
    }

    /// Prepares a freshly filled cache for decoding under this policy: limits, tracks and state.
    ///
    /// # Errors
    /// The errors of [`Self::select`].
    fn init_cache(
        &self,
        _cache: &mut LayerCache,
        _observation: &Observation<'_>,
        _selection: &Selection,
    ) -> Result<()> {
        Ok(())
    }

    /// Rebuilds the policy's own state of a loaded cache from the file's part for that state
    /// ([`LayerCache::restore_state`]).
    ///
    /// # Errors
    /// Where a file's state does not fit its cache.
    fn restore(&self, _cache: &mut LayerCache) -> Result<()> {
        Ok(())
    }

    /// Slots to reserve for a head that keeps `kept` tokens and decodes up to `new_tokens` more.
    ///
    /// # Errors
    /// The errors of [`Self::select`].
    fn room(&self, observation: &Observation<'_>, new_tokens: usize) -> Result<Room> {
        let _ = observation;
        Ok(Room::Extra(new_tokens))
    }

    /// Warnings for users of this policy in a model of `layers` layers, such as that it does
    /// nothing there.
    fn warnings(&self, layers: usize) -> Vec<String> {
        let _ = layers;
        Vec::new()
    }

    /// Plans the next decode step of this layer; by default it appends and attends to all live
    /// slots. Called before every step, and when the step runs. It must not read from the device.
    ///
    /// # Errors
    /// The errors of [`Self::step`].
    fn plan(&self, layer: LayerContext, cache: &LayerCache) -> Result<StepPlan<'_>> {
        let _ = (layer, cache);
        Ok(StepPlan::append().recordable(!self.capabilities().changes_decode))
    }

    /// One decode step: runs its plan. Returns the attention output `[B, Hq, D]`.
    ///
    /// # Errors
    /// [`crate::PolicyError`]; a full cache is one.
    fn step(&self, layer: LayerContext, cache: &mut LayerCache, step: Step) -> Result<Tensor<3>> {
        self.plan(layer, cache)?.run(layer, cache, &step)
    }

    /// Slots that the last step attended to; `None` where it attended to all. One list for each
    /// key-value head of each sequence, or for each query head. Slots count from the first one of
    /// the head range. Waits for the device.
    ///
    /// # Errors
    /// Where the device cannot be read.
    fn last_attended(
        &self,
        _layer: LayerContext,
        cache: &LayerCache,
    ) -> Result<Option<Vec<Vec<usize>>>> {
        reads::last_attended(cache)
    }

    /// Tokens whose hidden states the layers behind this one still compute, `[B]` lists of indices
    /// into this layer's tokens, equally many; `None` for all. Policies that prune so change the
    /// prompt's own computation.
    ///
    /// # Errors
    /// The errors of [`Self::select`].
    fn prune(&self, _observation: &Observation<'_>) -> Result<Option<Vec<Vec<u32>>>> {
        Ok(None)
    }

    /// What a layer's queries see of a prompt; `None` for everything. Tokens count within the
    /// layer, where earlier ones pruned hidden states.
    fn visible_window(&self, _layer: LayerContext) -> Option<VisibleWindow> {
        None
    }

    /// Which of a prompt's `tokens` tokens a layer passes on as they are; `None` for none.
    fn frozen_tokens(&self, _layer: LayerContext, _tokens: usize) -> Option<FrozenTokens> {
        None
    }

    /// The policy as one whose victims another may merge, where it evicts by scores.
    ///
    /// # Errors
    /// The policy or options that are expected instead, such as "a policy that evicts by scores".
    fn into_eviction_policy(
        self: Arc<Self>,
    ) -> std::result::Result<Arc<dyn EvictionPolicy>, &'static str> {
        Err("a policy that evicts by scores")
    }

    /// Compresses one layer's prompt into a cache: selects, fills, and prepares it for decoding
    /// ([`Self::init_cache`]).
    ///
    /// # Errors
    /// The errors of [`Self::select`].
    fn prefill(
        &self,
        observation: &Observation<'_>,
        new_tokens: usize,
        options: CacheOptions,
    ) -> Result<LayerCache> {
        fill(self, self.select(observation)?, observation, new_tokens, options)
    }

    /// Compresses a prompt's layers, all of them in order: by default, each by itself.
    ///
    /// # Errors
    /// The errors of [`Self::select`].
    fn prefill_layers(
        &self,
        layers: &[OwnedObservation],
        new_tokens: usize,
        options: CacheOptions,
    ) -> Result<Vec<LayerCache>> {
        let each = layers.iter();
        each.map(|layer| self.prefill(&layer.view(), new_tokens, options.clone())).collect()
    }
}

impl dyn Policy {
    /// The kind of the next decode step of this layer ([`StepPlan::kind`]), where it can be
    /// recorded and replayed ([`StepPlan::recordable`]); else `None`. Called before every step:
    /// recordings are given up at a step that is not recordable.
    pub fn recordable_kind(&self, layer: LayerContext, cache: &LayerCache) -> Option<u32> {
        if cache.options().growable {
            return None;
        }
        self.plan(layer, cache).ok().filter(|plan| plan.recordable).map(|plan| plan.kind)
    }
}

/// A cache of what a plan keeps of a prompt, ready for a policy's decode steps.
pub(crate) fn fill<P: Policy + ?Sized>(
    policy: &P,
    plan: Plan,
    observation: &Observation<'_>,
    new_tokens: usize,
    options: CacheOptions,
) -> Result<LayerCache> {
    let room = policy.room(observation, new_tokens)?;
    let mut cache = observation.cache(&plan.selection, room, options)?;
    // The weights are there even where the plan keeps the whole prompt: which arena a sequence
    // joins must be known before its prompt is computed.
    let slots = plan.selection.total();
    let SlotWeights { weighted, numerators } = policy.capabilities().weights;
    if let Some(weights) = plan.log_weights.or_else(|| weighted.then(|| vec![0.0; slots])) {
        cache.set_live_log_weights(&weights)?;
    }
    if let Some(numerators) = plan.numerators.or_else(|| numerators.then(|| vec![1.0; slots])) {
        cache.set_live_track(NUMERATORS, &numerators, 1.0)?;
    }
    policy.init_cache(&mut cache, observation, &plan.selection)?;
    Ok(cache)
}
