//! KeepKV: another policy's victims are merged into the slots that stay.

mod archive;
mod bound;
mod decode;
mod options;
mod periodic;
mod prompt;
mod scores;
mod takes;
mod votes;
mod window;

use std::sync::Arc;

use burn::tensor::Tensor;
use kv_core::{LayerCache, Selection};
use kv_kernels::{DecodeAttentionOptions, MergeOptions, StepScores};
use serde_json::Value;

use crate::policy::check::Check;
use crate::policy::config::{Config, EVICTOR, config_around, invalid};
use crate::policy::evictor::{evictor_of, evictor_part};
use crate::policy::forward::forward;
use crate::{
    Attended, Capabilities, Composition, Eviction, EvictionPolicy, LayerContext, Merge, Needs,
    Observation, Plan, Policy, RecentAttention, Result, Scorer, SlotWeights, StepPlan,
};

pub use archive::{Archive, Transfers};

pub use bound::perturbation_bound;
pub use options::{KeepKvOptions, Order};
pub use scores::Predictor;
pub use votes::{VOTES, VOTES_HIGH, read_votes};

const NAME: &str = "keepkv";

/// KeepKV (Tian et al., 2025) around any policy that evicts by scores: every victim is merged into
/// the kept slot of the most similar key (Algorithm 1), if the cosine exceeds a threshold, else
/// dropped. A merged slot carries the votes of all its tokens, which multiply its attention
/// (equation 6), and its key and value leave the attention unchanged if scores are as predicted
/// (ZIP merging, equations 7 and 25; [`kv_kernels::MergeOptions`]).
///
/// Under grouped queries one key serves several query heads, and exactness for all of them is
/// impossible: scores are the group's mean, and the additive rule's query is its mean query.
#[derive(Debug, Clone)]
pub struct KeepKv {
    evictor: Arc<dyn EvictionPolicy>,
    options: KeepKvOptions,
}

impl KeepKv {
    /// The registry's name.
    pub const NAME: &'static str = NAME;

    /// # Errors
    /// [`crate::PolicyError::InvalidConfig`] for policies that do not evict by scores, and options
    /// out of range.
    pub fn new(evictor: Arc<dyn Policy>, options: KeepKvOptions) -> Result<Self> {
        let evictor = evictor_of(evictor, NAME)?;
        let name = evictor.name();
        let KeepKvOptions { threshold, guard, alpha, window, epsilon, .. } = options;
        let KeepKvOptions { pristine, background, inherit, .. } = options;
        let check = Check(NAME);
        check.that("threshold", threshold, (-1.0..=1.0).contains(&threshold), "-1 to 1")?;
        check.that("guard", guard, guard == 0.0 || guard >= 1.0, "0 or at least 1")?;
        check.that("alpha", alpha, alpha > 0.0 && alpha < 1.0, "between 0 and 1")?;
        let from_0_on = |number: f64| number >= 0.0 && number.is_finite();
        check.that("epsilon", epsilon, from_0_on(epsilon), "a number from 0 on")?;
        if options.absolute_step && options.predictor != Predictor::Ema {
            return Err(invalid(NAME, "`absolute_step` is of the predictor `ema`".into()));
        }
        let above = options.rebuild_above;
        check.that("rebuild_above", above, from_0_on(above), "a number from 0 on")?;
        let followed = evictor.capabilities().changes_decode && !evictor.needs().raw_queries;
        if (options.period > 0 || above > 0.0) && !followed {
            let reason = format!(
                "`evictor` is `{name}`: `period` and `rebuild_above` need one that evicts during \
                 decode, without queries before RoPE"
            );
            return Err(invalid(NAME, reason));
        }
        check.positive("window", window)?;
        check.share("pristine", pristine)?;
        if background && evictor.capabilities().changes_decode && !evictor.heads_choose() {
            let reason = format!(
                "`evictor` is `{name}`, whose heads do not choose for themselves within a number of \
                 slots of their own: `background` needs one whose heads do"
            );
            return Err(invalid(NAME, reason));
        }
        if inherit && evictor.accumulates().is_none() {
            let reason = format!(
                "`evictor` is `{name}`: `inherit` needs one whose decode steps add to its scores"
            );
            return Err(invalid(NAME, reason));
        }
        Ok(Self { evictor, options })
    }

    /// How keys are merged.
    fn merging(&self, queries: Option<Tensor<2>>) -> MergeOptions {
        let guard = if self.options.guard == 0.0 { f32::INFINITY } else { self.options.guard };
        MergeOptions { rule: self.options.key, guard, scale: None, queries }
    }

    /// The policy from its configuration, around the evictor that it names or the paper's.
    pub(crate) fn from_config(config: &mut Config) -> Result<Arc<dyn Policy>> {
        let evictor = evictor_part(config, RecentAttention::NAME)?;
        Ok(Arc::new(Self::new(evictor, config.take_all::<KeepKvOptions>(NAME)?)?))
    }
}

impl Policy for KeepKv {
    forward!(evictor: budget, room);

    fn name(&self) -> &'static str {
        NAME
    }

    fn config(&self) -> Value {
        config_around(NAME, &self.options, &*self.evictor)
    }

    fn composition(&self) -> Composition<'_> {
        Composition::Around { option: EVICTOR, inner: &*self.evictor }
    }

    fn needs(&self) -> Needs {
        let own = Needs { window: self.options.window, ..Needs::default() };
        self.evictor.needs().union(own)
    }

    fn select(&self, observation: &Observation<'_>) -> Result<Plan> {
        if self.options.order == Order::MergeFirst
            && let Some((scores, budget)) = self.evictor.rank(observation)?
        {
            return Ok(self.by_groups(observation, scores, budget)?.into());
        }
        self.evictor.select(observation)
    }

    fn init_cache(
        &self,
        cache: &mut LayerCache,
        observation: &Observation<'_>,
        selection: &Selection,
    ) -> Result<()> {
        self.evictor.init_cache(cache, observation, selection)?;
        self.merge_prompt(cache, observation, selection)?;
        if self.rebuilds() { self.archive(cache, observation) } else { Ok(()) }
    }

    fn capabilities(&self) -> Capabilities {
        let Capabilities { compares_heads, draws, weights, .. } = self.evictor.capabilities();
        Capabilities {
            changes_decode: true,
            compares_heads,
            draws,
            // Votes are weights, there from the start, so that steps allocate nothing.
            weights: weights.union(SlotWeights { weighted: true, numerators: false }),
            ..Capabilities::default()
        }
    }

    fn plan(&self, layer: LayerContext, cache: &LayerCache) -> Result<StepPlan<'_>> {
        if self.due_now(layer, cache) {
            let rebuilt = StepPlan::attend_with(move |cache, query, step| {
                self.keep_newest(cache, step, &query)?;
                self.rebuild(layer, cache, step)?;
                self.prefetch_if_due(layer, cache);
                Ok(cache.attend(query, DecodeAttentionOptions::default())?.output)
            });
            return Ok(rebuilt.recordable(false));
        }
        let waits = self.merges_on_host() || self.rebuilds();
        let evicts = self.evictor.capabilities().changes_decode;
        let mut plan = self.evictor.plan(layer, cache)?;
        plan.eviction = plan.eviction.map(|rule| self.sparing_background(rule));
        let recordable = plan.recordable && evicts && !waits;
        Ok(plan.merging(self).recordable(recordable))
    }
}

impl Merge for KeepKv {
    fn merge(&self, cache: &mut LayerCache, attended: Attended<'_>) -> Result<Option<Eviction>> {
        let Attended { layer, step, .. } = attended;
        let scores = self.taken_by_merges(&attended);
        if scores.is_none() {
            self.observe(cache, &attended)?;
        }
        if !self.rebuilds() {
            return self.merge_due(cache, attended, scores);
        }
        self.keep_newest(cache, step, &attended.query)?;
        let above = self.options.rebuild_above;
        if above > 0.0 && self.estimated_perturbation(cache, &attended)? > above {
            self.rebuild(layer, cache, step)?;
            return Ok(None);
        }
        let due = self.merge_due(cache, attended, None)?;
        self.prefetch_if_due(layer, cache);
        Ok(due)
    }
}

impl KeepKv {
    /// Whether the host lists the slots that a step merges.
    fn merges_on_host(&self) -> bool {
        self.options.predictor == Predictor::Window || self.options.spare_protected
    }

    /// A step's scores, if the kernel that merges also adds them to the averages: it does for
    /// single victims, unless a rebuild needs the averages before.
    fn taken_by_merges(&self, attended: &Attended<'_>) -> Option<StepScores> {
        let single = matches!(attended.due, Some(Eviction::One { .. }));
        let taken = single && !self.merges_on_host() && !self.rebuilds();
        taken.then(|| self.step_scores(attended))
    }

    /// Merges the victims, after adding `scores` to the averages where they are given. Returns the
    /// slots to drop.
    fn merge_due(
        &self,
        cache: &mut LayerCache,
        attended: Attended<'_>,
        scores: Option<StepScores>,
    ) -> Result<Option<Eviction>> {
        let before = self.weights_before(cache);
        let kept = match attended.due {
            None => return Ok(None),
            Some(Eviction::One { victims, limits }) if !self.merges_on_host() => {
                self.merge_victims(cache, &victims, &limits, attended.query, scores)?;
                self.remember_merges(cache, before)?;
                return Ok(Some(Eviction::One { victims, limits }));
            }
            Some(due) => due.kept(cache)?,
        };
        self.merge_others(cache, &kept, attended.query)?;
        self.remember_merges(cache, before)?;
        Ok(Some(Eviction::Keep(kept)))
    }
}
