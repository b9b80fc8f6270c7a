mod blocks;
mod parts;
mod prompt;
mod sketch;
mod steps;

use std::sync::Arc;

use kv_core::{Budget, CacheOptions, LayerAllocation, LayerCache, Room, Selection, counted};
use rand::Rng;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::policy::config::{Config, config_of};
use crate::policy::generator::generator;
use crate::policy::notice::warn_once;
use crate::{
    Capabilities, Composition, EvictionPolicy, LayerContext, Needs, Observation, Plan, Policy,
    PolicyError, Result, StepPlan,
};
use parts::{Parts, Shares, least};
use prompt::{PromptScorer, candidates, exact_tokens};

pub use blocks::{BlockReviver, BlockReviverOptions, VagueForm, VagueHead, VaguePool, VagueTokens};
pub use sketch::{Sketch, SketchHead, SketchOptions};
pub use steps::SketchedOutput;

const NAME: &str = "kvreviver";
/// The option that names the form of the vague part.
pub(crate) const VAGUE: &str = "vague";
/// The value of `vague` that names the paper's form.
const FORM: &str = "sketch";
/// Options that only the sketch has.
const OF_SKETCH: [&str; 7] =
    ["candidate", "sketch_share", "buckets", "slack", "replace_rate", "signed_keys", "rebuild"];

/// KVReviver (2026): tokens that other policies would drop go into a count-sketch. Every step
/// estimates them from it, so that attention sees all tokens (algorithms 1 to 4).
///
/// A head's budget is shared (technical appendix, table 2) among *Recent* tokens, *Candidates* of
/// the highest accumulated attention, and the *Vague* part: `r` buckets of `b` entries that all
/// other tokens share. Surplus recents become candidates together, beyond a slack. The weakest
/// candidates go into the sketch. A token in the sketch whose score is `replace_rate` times the
/// weakest candidate's score changes places with it: its estimate goes into the slot, and out of
/// the sketch.
///
/// Attention estimates tokens on the fly ([`Sketch::attend`]); `rebuild`
/// writes the whole cache of one layer at a time to scratch memory first, as the paper does, with
/// the same result.
///
/// Where the paper leaves something open: scores are sums over the query heads of a group. A token
/// goes into the sketch once Recent and Candidate hold more than both budgets and the slack
/// together; algorithm 3 counts the slack of recents only, so that its first bulk comes up to
/// `slack` steps earlier, and later bulks at other steps. The sketch is kept in f32, so that a
/// token that goes in and out leaves hardly any rounding error. Reports count its bytes, which
/// beside a 16-bit cache are twice its share of the budget.
#[derive(Debug, Clone)]
pub struct KvReviver {
    options: KvReviverOptions,
    scorer: PromptScorer,
}

/// KVReviver's own options.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KvReviverOptions {
    /// Slots per key-value head, entries of the sketch included.
    pub budget: Budget,
    /// How layers share the budget; the paper's is by Fisher information.
    pub layers: LayerAllocation,
    /// Share of the most recent tokens.
    pub recent: f64,
    /// Share of the candidates.
    pub candidate: f64,
    /// Share of the sketch.
    pub sketch_share: f64,
    /// `r`
    pub buckets: usize,
    /// Steps between two bulks of recents that become candidates.
    pub slack: usize,
    /// A token comes back if its score is this many times the weakest candidate's; `null` for
    /// never.
    pub replace_rate: Option<f32>,
    /// Whether keys have random signs, as values have. The paper's keys have none: the keys of an
    /// entry then add up, and an estimate is off by the mean key times the tokens of an entry.
    pub signed_keys: bool,
    /// Whether every step rebuilds a layer's whole cache before it attends.
    pub rebuild: bool,
}

impl KvReviverOptions {
    /// The paper's defaults; a slack is ours, as the paper has no number.
    pub fn new(budget: Budget) -> Self {
        Self {
            budget,
            layers: LayerAllocation::Uniform,
            // Technical appendix, table 2.
            recent: 0.45,
            candidate: 0.45,
            sketch_share: 0.1,
            buckets: 3,
            slack: 16,
            replace_rate: Some(1.1),
            signed_keys: false,
            rebuild: false,
        }
    }

    fn shares(&self) -> Shares {
        Shares { recent: self.recent, candidate: self.candidate, sketch: self.sketch_share }
    }
}

impl KvReviver {
    /// `candidates` scores prompts in place of accumulated attention; its scores, less the lowest
    /// one, are scaled to the mass of the prompt's attention (of one query head, where it looks at
    /// no queries). Every step then adds its attention.
    ///
    /// # Errors
    /// [`PolicyError::InvalidConfig`] for shares that do not add up to 1, a number of buckets
    /// outside 1 to [`kv_kernels::MAX_BUCKETS`], a replace rate below 1, a slack above
    /// [`Sketch::MOST_SLACK`], a budget in tokens below an entry in each bucket, a recent token and
    /// a candidate, and for candidates whose heads choose together.
    pub fn new(
        options: KvReviverOptions,
        candidates: Option<Arc<dyn EvictionPolicy>>,
    ) -> Result<Self> {
        let invalid = |reason: String| PolicyError::InvalidConfig { policy: NAME.into(), reason };
        options.budget.validate()?;
        options.shares().validate().map_err(invalid)?;
        if !(1..=kv_kernels::MAX_BUCKETS).contains(&options.buckets) {
            let reason = format!(
                "`buckets` is {}, expected 1 to {}",
                options.buckets,
                kv_kernels::MAX_BUCKETS
            );
            return Err(invalid(reason));
        }
        if let Some(rate) = options.replace_rate.filter(|rate| rate.is_nan() || *rate < 1.0) {
            return Err(invalid(format!("`replace_rate` is {rate}, expected at least 1")));
        }
        if options.slack > Sketch::MOST_SLACK {
            let (slack, most) = (options.slack, Sketch::MOST_SLACK);
            return Err(invalid(format!("`slack` is {slack}, expected at most {most}")));
        }
        if let Budget::Tokens(budget) = options.budget {
            options.shares().of(budget, options.buckets)?;
        }
        Ok(Self { options, scorer: PromptScorer::new(candidates)? })
    }

    /// The options.
    pub fn options(&self) -> &KvReviverOptions {
        &self.options
    }

    /// One layer's slots per head, and its parts.
    fn parts(&self, observation: &Observation<'_>) -> Result<(usize, Parts)> {
        let LayerContext { index, count } = observation.layer;
        let (tokens, layers) = (observation.tokens(), &self.options.layers);
        let least = least(self.options.buckets);
        let budget = match self.options.budget {
            // Budgets in tokens fill up even after short prompts.
            Budget::Tokens(budget) => layers.spread(count, budget, least, usize::MAX)?[index],
            budget => {
                let slots = layers.spread(count, budget.resolve(tokens), least, tokens)?[index];
                if slots < least {
                    warn_once(NAME, "least", || {
                        let slots = counted(slots, "slot");
                        format!("a budget of {slots} is below its least: it takes {least}")
                    });
                }
                slots.max(least)
            }
        };
        Ok((budget, self.options.shares().of(budget, self.options.buckets)?))
    }

    /// The policy from its configuration: the form that `vague` names. Without `vague`, an option
    /// that only the sketch has chooses the sketch, as in files of the time when it had no name.
    pub(crate) fn from_config(config: &mut Config) -> Result<Arc<dyn Policy>> {
        match config.take(VAGUE) {
            None if OF_SKETCH.into_iter().any(|option| config.has(option)) => {}
            None => return BlockReviver::from_config(config, VagueForm::QUANTIZED),
            Some(Value::String(form)) if form == FORM => {}
            // An earlier name of the sketch's share.
            Some(share) if share.as_f64().is_some_and(|share| share < 1.0) => {
                config.set_default("sketch_share", share);
            }
            Some(other) => {
                if let Some(form) = other.as_str().and_then(VagueForm::named) {
                    return BlockReviver::from_config(config, form);
                }
                let forms = "\"quantized\", \"archive\", \"summary\" or \"sketch\"";
                let reason = format!("`vague` is {other}, expected {forms}");
                return Err(PolicyError::InvalidConfig { policy: NAME.into(), reason });
            }
        }
        let candidates = candidates(config, None)?;
        config.set_defaults_by("budget", KvReviverOptions::new);
        let options = config.take_beside::<KvReviverOptions>(NAME, "`candidates` with its own")?;
        Ok(Arc::new(Self::new(options, candidates)?))
    }
}

impl Policy for KvReviver {
    fn name(&self) -> &'static str {
        NAME
    }

    fn config(&self) -> Value {
        let mut config = config_of(NAME, &self.options);
        config[VAGUE] = FORM.into();
        self.scorer.write_into(&mut config);
        config
    }

    fn budget(&self) -> Option<Budget> {
        Some(self.options.budget)
    }

    /// A part of the budget is the sketch's.
    fn least_kept(&self, _tokens: usize) -> usize {
        0
    }

    /// Tokens that share an entry of the sketch behind a prompt of `prompt` tokens:
    /// `r (T - E) / N`, where `N` entries in `r` buckets stand for all but `E` of `T` tokens.
    /// `None` where all tokens are kept exactly.
    fn sketch_load(&self, prompt: usize) -> Option<f64> {
        let slots = match self.options.budget {
            // Budgets in tokens fill up behind short prompts.
            Budget::Tokens(slots) => slots,
            budget => budget.resolve(prompt),
        } as f64;
        let (entries, buckets) = (slots * self.options.sketch_share, self.options.buckets as f64);
        let sketched = prompt as f64 - (slots - entries);
        (sketched > 0.0).then(|| buckets * sketched / entries.max(buckets))
    }

    fn composition(&self) -> Composition<'_> {
        self.scorer.composition()
    }

    fn needs(&self) -> Needs {
        self.scorer.needs()
    }

    fn select(&self, observation: &Observation<'_>) -> Result<Plan> {
        let (budget, parts) = self.parts(observation)?;
        let scores = self.scorer.scores(observation, parts.exact())?;
        Ok(exact_tokens(observation, budget, [parts.exact(), parts.recents], scores)?.into())
    }

    fn init_cache(
        &self,
        _cache: &mut LayerCache,
        _observation: &Observation<'_>,
        _selection: &Selection,
    ) -> Result<()> {
        let reason = "its sketch needs the number of tokens to come, as `prefill` is told".into();
        Err(PolicyError::InvalidConfig { policy: NAME.into(), reason })
    }

    fn room(&self, observation: &Observation<'_>, new_tokens: usize) -> Result<Room> {
        let limit = self.parts(observation)?.1.exact();
        Ok(Room::Limited { limit, over: self.options.slack + 1, new_tokens })
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            changes_decode: true,
            combines: false,
            draws: true,
            ..Capabilities::default()
        }
    }

    fn restore(&self, cache: &mut LayerCache) -> Result<()> {
        Ok(cache.restore_state::<Sketch>()?)
    }

    fn plan(&self, _layer: LayerContext, _cache: &LayerCache) -> Result<StepPlan<'_>> {
        Ok(StepPlan::attend_with(|cache, query, step| {
            let attended = Sketch::of(cache)?.attend(cache, query, &step.position)?;
            Sketch::update(cache, attended.logits, step.position.clone())?;
            Ok(attended.output)
        }))
    }

    fn prefill(
        &self,
        observation: &Observation<'_>,
        new_tokens: usize,
        options: CacheOptions,
    ) -> Result<LayerCache> {
        let [batch, kv_heads, tokens, head_dim] = observation.dims();
        if observation.prompt_tokens != tokens {
            let reason = format!(
                "{tokens} of {} prompt tokens reach this layer, expected all of them",
                observation.prompt_tokens
            );
            return Err(PolicyError::InvalidConfig { policy: NAME.into(), reason });
        }
        let (budget, parts) = self.parts(observation)?;
        let scores = self.scorer.scores(observation, parts.exact())?;
        let selection =
            exact_tokens(observation, budget, [parts.exact(), parts.recents], scores.clone())?;
        let (keys, values) = (observation.keys, observation.values);
        let room = self.room(observation, new_tokens)?;
        let device = options.device.clone();
        let mut cache = LayerCache::from_prefill(
            keys,
            values,
            observation.positions,
            &selection,
            room,
            options,
        )?;
        // Tokens that never leave the exact slots need no room in the sketch.
        let unused = tokens + new_tokens <= parts.exact() && !cache.options().growable;
        let entries = if unused { 1 } else { parts.entries };
        let head = SketchHead { entries, limit: parts.exact(), recents: parts.recents };
        cache.set_limits(vec![head.limit.max(selection.lengths()[0]); batch * kv_heads])?;
        let ranges = (0..batch).flat_map(|row| (0..kv_heads).map(move |head| (row, head)));
        let seeds = ranges.map(|(row, head)| {
            let bits: u64 = generator(observation, row, head).random();
            [bits as u32, (bits >> 32) as u32]
        });
        let sketch_options = SketchOptions {
            buckets: self.options.buckets,
            signed_keys: self.options.signed_keys,
            slack: self.options.slack,
            replace_rate: self.options.replace_rate,
            rebuild: self.options.rebuild,
        };
        let mut sketch = Sketch::new(
            vec![head; batch * kv_heads],
            tokens + new_tokens,
            head_dim,
            &seeds.collect::<Vec<_>>(),
            sketch_options,
            &device,
        )?;
        sketch.fill(keys, values, scores.clone(), &selection)?;
        sketch.put_into(&mut cache)?;
        cache.set_kept_track(Sketch::SCORES, scores.flatten(0, 1), &selection, 0.0)?;
        Ok(cache)
    }
}
