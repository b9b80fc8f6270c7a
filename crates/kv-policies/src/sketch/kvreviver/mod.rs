mod parts;
mod sketch;
mod steps;

use std::sync::Arc;

use burn::tensor::{DType, Tensor};
use kv_core::{Budget, CacheOptions, LayerAllocation, LayerCache, Room, Selection, counted};
use rand::Rng;
use serde::{Deserialize, Serialize};

use crate::policy::config::{Config, config_of, invalid};
use crate::policy::ends::protected;
use crate::policy::generator::generator;
use crate::policy::notice::warn_once;
use crate::{
    Capabilities, Composition, EvictionPolicy, LayerContext, Needs, Observation, Plan, Policy,
    PolicyError, Reduction, Result, StepPlan,
};
use parts::{Parts, Shares, least};

pub use sketch::{Sketch, SketchHead, SketchOptions};
pub use steps::SketchedOutput;

const NAME: &str = "kvreviver";
/// The option that configures the policy which scores prompts.
const CANDIDATES: &str = "candidates";
/// Options that `candidates` may not have: how much is kept, where and when. `candidates` only
/// scores prompts.
const FOREIGN: [&str; 4] = ["budget", "layers", "decode", "interval"];

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
    /// The policy that scores prompts, in place of accumulated attention.
    candidates: Option<Arc<dyn EvictionPolicy>>,
}

/// KVReviver's own options.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KvReviverOptions {
    /// Slots per key-value head, entries of the sketch included.
    pub budget: Budget,
    /// How layers share the budget; the paper's is by Fisher information.
    #[serde(default)]
    pub layers: LayerAllocation,
    /// Share of the most recent tokens.
    #[serde(default = "default_recent")]
    pub recent: f64,
    /// Share of the candidates.
    #[serde(default = "default_candidate")]
    pub candidate: f64,
    /// Share of the sketch.
    #[serde(default = "default_sketch_share", alias = "vague")]
    pub sketch_share: f64,
    /// `r`
    #[serde(default = "default_buckets")]
    pub buckets: usize,
    /// Steps between two bulks of recents that become candidates.
    #[serde(default = "default_slack")]
    pub slack: usize,
    /// A token comes back if its score is this many times the weakest candidate's; `null` for
    /// never.
    #[serde(default = "default_replace_rate")]
    pub replace_rate: Option<f32>,
    /// Whether keys have random signs, as values have. The paper's keys have none: the keys of an
    /// entry then add up, and an estimate is off by the mean key times the tokens of an entry.
    #[serde(default)]
    pub signed_keys: bool,
    /// Whether every step rebuilds a layer's whole cache before it attends.
    #[serde(default)]
    pub rebuild: bool,
}

/// Technical appendix, table 2, as are the two shares below.
fn default_recent() -> f64 {
    0.45
}

fn default_candidate() -> f64 {
    0.45
}

fn default_sketch_share() -> f64 {
    0.1
}

fn default_buckets() -> usize {
    3
}

fn default_slack() -> usize {
    16
}

fn default_replace_rate() -> Option<f32> {
    Some(1.1)
}

impl KvReviverOptions {
    /// The paper's defaults.
    pub fn new(budget: Budget) -> Self {
        Self {
            budget,
            layers: LayerAllocation::Uniform,
            recent: default_recent(),
            candidate: default_candidate(),
            sketch_share: default_sketch_share(),
            buckets: default_buckets(),
            slack: default_slack(),
            replace_rate: default_replace_rate(),
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
        if let Some(together) = candidates.as_ref().filter(|own| !own.heads_choose()) {
            return Err(joint(together.name()));
        }
        Ok(Self { options, candidates })
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

    /// The accumulated attention of a prompt's tokens, `[B, Hkv, T]`.
    fn scores(&self, observation: &Observation<'_>, parts: Parts) -> Result<Tensor<3>> {
        let [batch, kv_heads, tokens, _] = observation.dims();
        let missing = |what| PolicyError::MissingObservation { policy: NAME, what };
        let Some(candidates) = &self.candidates else {
            let sums = observation.column_sums.clone();
            let sums = sums.ok_or_else(|| missing("column sums of attention"))?;
            return Ok(Reduction::Sum.groups(sums, kv_heads));
        };
        // Short prompts are kept whole, but their tokens need scores, too.
        let budget = parts.exact().min(tokens.saturating_sub(1)).max(1);
        let scores = match candidates.with_budget(Budget::Tokens(budget)) {
            Ok(candidates) => candidates.rank(observation)?.map(|(scores, _)| scores),
            // More tokens are protected than the prompt has.
            Err(_) if tokens <= parts.exact() => None,
            Err(error) => return Err(error),
        };
        let Some(scores) = scores else {
            if tokens > parts.exact() {
                return Err(joint(candidates.name()));
            }
            let device = observation.keys.device();
            return Ok(Tensor::zeros([batch, kv_heads, tokens], (&device, DType::F32)));
        };
        // Protected tokens have +∞, and get the highest score of the others.
        let endless = scores.clone().is_inf().bool_and(scores.clone().greater_scalar(0.0));
        let highest = scores.clone().mask_fill(endless.clone(), f32::MIN).max_dim(2);
        let scores = scores.mask_where(endless, highest.expand([batch, kv_heads, tokens]));
        let lowest = scores.clone().min_dim(2);
        let scores = scores - lowest;
        let total = scores.clone().sum_dim(2).clamp_min(f32::MIN_POSITIVE);
        let mass = (group(observation) * tokens) as f64;
        Ok(scores.mul_scalar(mass) / total)
    }

    /// Tokens that share an entry of the sketch behind a prompt of `prompt` tokens:
    /// `r (T - E) / N`, where `N` entries in `r` buckets stand for all but `E` of `T` tokens.
    /// `None` where all tokens are kept exactly.
    pub fn sketch_load(&self, prompt: usize) -> Option<f64> {
        let slots = self.options.budget.resolve(prompt) as f64;
        let (entries, buckets) = (slots * self.options.sketch_share, self.options.buckets as f64);
        let sketched = prompt as f64 - (slots - entries);
        (sketched > 0.0).then(|| buckets * sketched / entries.max(buckets))
    }

    /// The policy from its configuration.
    pub(crate) fn from_config(config: &mut Config) -> Result<Arc<dyn Policy>> {
        let candidates = candidates(config)?;
        let options = config.take_beside::<KvReviverOptions>(NAME, "`candidates` with its own")?;
        Ok(Arc::new(Self::new(options, candidates)?))
    }
}

fn joint(name: &str) -> PolicyError {
    let reason = format!("`candidates` is `{name}`, whose heads do not choose for themselves");
    PolicyError::InvalidConfig { policy: NAME.into(), reason }
}

/// The tokens of a prompt that are kept exactly: all of a short prompt; else the most recent
/// tokens, and the other tokens of the highest scores.
fn exact_tokens(
    observation: &Observation<'_>,
    budget: usize,
    parts: Parts,
    scores: Tensor<3>,
) -> Result<Selection> {
    let [batch, kv_heads, tokens, _] = observation.dims();
    if budget >= tokens {
        return Ok(Selection::all(batch * kv_heads, tokens));
    }
    Ok(Selection::highest(protected(scores, 0, parts.recents), parts.exact())?)
}

/// Query heads to a key-value head, as far as an observation shows.
fn group(observation: &Observation<'_>) -> usize {
    let kv_heads = observation.dims()[1];
    let heads = [
        observation.column_sums.as_ref().map(|sums| sums.dims()[1]),
        observation.window.as_ref().map(|window| window.dims()[1]),
        observation.raw_queries.as_ref().map(|queries| queries.dims()[1]),
    ];
    heads.into_iter().flatten().next().map_or(1, |heads| heads / kv_heads)
}

/// The policy that scores prompts, by name or configuration without a budget.
fn candidates(config: &mut Config) -> Result<Option<Arc<dyn EvictionPolicy>>> {
    let Some(mut candidates) = config.take_part(CANDIDATES, None) else { return Ok(None) };
    if let Some(candidates) = candidates.as_object_mut() {
        if let Some(key) = FOREIGN.iter().find(|key| candidates.contains_key(**key)) {
            let reason = format!(
                "`{key}` in `candidates`, expected it beside, if at all: they score prompts alone"
            );
            return Err(invalid(NAME, reason));
        }
        candidates.insert("budget".into(), serde_json::json!(1.0));
    }
    let policy = config.build(&candidates)?;
    let name = policy.name();
    let evictor = policy.into_eviction_policy().ok_or_else(|| {
        let reason = format!("`candidates` is `{name}`, expected a policy that scores tokens");
        invalid(NAME, reason)
    })?;
    Ok(Some(evictor))
}

impl Policy for KvReviver {
    fn name(&self) -> &'static str {
        NAME
    }

    fn config(&self) -> serde_json::Value {
        let mut config = config_of(NAME, &self.options);
        if let Some(candidates) = &self.candidates {
            let mut inner = candidates.config();
            if let Some(inner) = inner.as_object_mut() {
                FOREIGN.iter().for_each(|key| drop(inner.remove(*key)));
            }
            config[CANDIDATES] = inner;
        }
        config
    }

    fn budget(&self) -> Option<Budget> {
        Some(self.options.budget)
    }

    fn composition(&self) -> Composition<'_> {
        match &self.candidates {
            Some(candidates) => Composition::Around { option: CANDIDATES, inner: &**candidates },
            None => Composition::None,
        }
    }

    fn needs(&self) -> Needs {
        match &self.candidates {
            Some(candidates) => candidates.needs(),
            None => Needs { column_sums: true, ..Needs::default() },
        }
    }

    fn select(&self, observation: &Observation<'_>) -> Result<Plan> {
        let (budget, parts) = self.parts(observation)?;
        let scores = self.scores(observation, parts)?;
        Ok(exact_tokens(observation, budget, parts, scores)?.into())
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
        Capabilities { changes_decode: true, combines: false, ..Capabilities::default() }
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
        let scores = self.scores(observation, parts)?;
        let selection = exact_tokens(observation, budget, parts, scores.clone())?;
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
