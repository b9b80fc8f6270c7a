//! LongFlow (<https://github.com/yisunlp/LongFLow>): each new token overwrites the slot that adds
//! least to the output. [`Policy::plan`] is the step, whose slots [`crate::WriteSlots`] chooses and
//! writes. Where evictions follow the attention, [`importance`] scores the slots.

mod importance;

use std::sync::Arc;

use burn::tensor::Tensor;
use kv_core::{Budget, LayerCache, Room, Selection, counted};
use kv_kernels::EvictionScope;
use serde::{Deserialize, Serialize};

use crate::policy::check::Check;
use crate::policy::config::{Config, config_of};
use crate::policy::ends::{first_tokens, fit_ends, protected, warn_of_window};
use crate::policy::step_plan::VictimChoice;
use crate::policy::write_slots::WriteSlots;
use crate::{
    Capabilities, EvictionPolicy, EvictionRule, LayerContext, Needs, Observation, Plan, Policy,
    PolicyError, Result, Scorer, SnapKv, Step, StepAttention, StepPlan, StepUpdate, TokenSlot,
};

const NAME: &str = "longflow";

/// LongFlow (2026): a static cache for long outputs. Each decode step writes its token over the
/// slot that the step before chose, attends, and chooses the slot of least `‖α_i v_i‖₁` (equation
/// 6) for the next one, by one fused operator ([`WriteSlots::attend_and_choose_victim`]).
/// Below the budget nothing is chosen and the cache fills.
///
/// Prompts over the budget are first compressed to it by SnapKV (section 4.1); the last prompt
/// token's query then chooses the first slot to overwrite.
///
/// All heads of a layer give up the same token, the one of least importance summed over them: a
/// step "overwrites a single historical token", and Algorithm 1 has one mask. Each head for itself
/// is an option ([`Scope::Head`]).
///
/// One query is a noisy judge of a token. Two options of ours, which the paper does not have,
/// compare slots otherwise: [`Self::memory`] by the largest importance that a slot has had,
/// decayed, and [`Self::ties`] by importances that count as equal within a factor.
///
/// The paper lets a step evict any token, and the authors' code at times evicts the token just
/// written. Here a step does so only if no other token may go, unless `evict_newest` is set.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LongFlow {
    /// Slots per key-value head.
    pub budget: Budget,
    /// Which heads give up a slot together.
    #[serde(default)]
    pub scope: Scope,
    /// First tokens that are never overwritten.
    #[serde(default)]
    pub sinks: usize,
    /// Last tokens that are never overwritten.
    #[serde(default)]
    pub recents: usize,
    /// Whether the token just written may be overwritten next.
    #[serde(default)]
    pub evict_newest: bool,
    /// `γ`, above 0 and at most 1: slots are compared by `S_t = max(γ S_{t−1}, I_t)` instead of the
    /// importance `I_t` of this step. Ours; `None` is the paper's.
    #[serde(default)]
    pub memory: Option<f64>,
    /// A factor above 1 within which importances are equal; the oldest of equal slots is
    /// overwritten. Ours; `None` is the paper's.
    #[serde(default)]
    pub ties: Option<f64>,
    /// How prompts over the budget are compressed.
    #[serde(default)]
    pub prefill: SnapKv,
    /// Whether a step appends, attends, and then drops its least important slot, so that a policy
    /// around this one (KeepKV) can merge the slot first.
    #[serde(skip)]
    pub after_attention: bool,
}

/// Which heads give up a slot together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Scope {
    /// All heads of a layer give up one token, by their summed importance, as in the paper's text
    /// and its authors' code. A prompt is compressed to equal tokens in all heads.
    #[default]
    Layer,
    /// Every key-value head gives up a token of its own, by the sum over its group. Ours.
    Head,
}

impl LongFlow {
    /// The paper's defaults.
    pub fn new(budget: Budget) -> Self {
        Self {
            budget,
            scope: Scope::default(),
            sinks: 0,
            recents: 0,
            evict_newest: false,
            memory: None,
            ties: None,
            prefill: SnapKv::default(),
            after_attention: false,
        }
    }

    /// # Errors
    /// [`PolicyError::InvalidConfig`], for a token budget also where its slots are all protected.
    pub fn validate(&self) -> Result<()> {
        self.budget.validate()?;
        let invalid = |reason| PolicyError::InvalidConfig { policy: NAME.into(), reason };
        self.prefill.validate().map_err(invalid)?;
        let check = Check(NAME);
        // As the kernels take them, which count in f32.
        let [memory, ties] = [self.memory, self.ties].map(|number| number.map(|own| own as f32));
        if let Some(decay) = memory {
            check.that("memory", decay, decay > 0.0 && decay <= 1.0, "above 0 and at most 1")?;
        }
        if let Some(factor) = ties {
            check.that("ties", factor, factor > 1.0 && factor.is_finite(), "a number above 1")?;
        }
        match self.budget {
            Budget::Tokens(budget) => self.check_protected(budget),
            Budget::Ratio(_) => Ok(()),
        }
    }

    /// Checks that some slot may be overwritten; a budget's only slot may. A share of a short
    /// prompt may leave none, which is no error: each step then overwrites the newest token.
    fn check_protected(&self, budget: usize) -> Result<()> {
        if let Budget::Ratio(_) = self.budget {
            return Ok(());
        }
        let newest = usize::from(!self.evict_newest && budget > 1);
        let protected = self.sinks.saturating_add(self.recents.max(newest));
        if protected < budget {
            return Ok(());
        }
        let Self { sinks, recents, .. } = *self;
        let newest = if newest > 0 { " and the newest token" } else { "" };
        let [sinks, recents, slots] =
            [(sinks, "sink"), (recents, "recent"), (budget, "slot")].map(|(n, of)| counted(n, of));
        let reason = format!("{sinks}, {recents}{newest} leave none of {slots} to overwrite");
        Err(PolicyError::InvalidConfig { policy: NAME.into(), reason })
    }

    /// Scores of a prompt's tokens, `[B, Hkv, T]`, and how many a head keeps; `None` where all
    /// stay.
    fn prompt_scores(&self, observation: &Observation<'_>) -> Result<Option<(Tensor<3>, usize)>> {
        let tokens = observation.tokens();
        let budget = self.budget.resolve(tokens);
        if budget >= tokens {
            return Ok(None);
        }
        self.check_protected(budget)?;
        let (scorer, [sinks, recents]) = self.fitted(budget)?;
        let scores = self.scored(&scorer, observation, budget)?;
        Ok(Some((protected(scores, sinks, recents.min(tokens)), budget)))
    }

    /// A prompt's scores, without regard to which tokens always stay.
    fn scored(
        &self,
        scorer: &SnapKv,
        observation: &Observation<'_>,
        budget: usize,
    ) -> Result<Tensor<3>> {
        let scores = scorer.prefill(observation, budget)?;
        Ok(match self.scope {
            Scope::Layer => scores.clone().mean_dim(1).expand(scores.dims()),
            Scope::Head => scores,
        })
    }

    /// The scorer of prompts that are compressed to `budget` slots, and their sinks and recents.
    fn fitted(&self, budget: usize) -> Result<(SnapKv, [usize; 2])> {
        let fitted = self.prefill.fitted(budget);
        let cut = fitted.window < self.prefill.window;
        if cut {
            warn_of_window(NAME, budget, self.prefill.window, fitted.window);
        }
        let first = if cut { first_tokens(budget) } else { 0 };
        let ends = [self.sinks.max(first), self.recents];
        let [sinks, recents] = fit_ends(NAME, self.budget, budget, ends)?;
        // The observed window stays as far as the sinks leave room for it.
        let window = fitted.window.min(budget - sinks).max(1);
        Ok((SnapKv { window, ..fitted }, [sinks, recents.max(window)]))
    }

    /// First and last tokens that no step overwrites.
    fn guarded(&self) -> [usize; 2] {
        [self.sinks, self.recents.max(usize::from(!self.evict_newest))]
    }

    /// The limit of a head, below which short prompts leave free slots.
    fn limit(&self, observation: &Observation<'_>) -> usize {
        match self.budget {
            Budget::Tokens(count) => count,
            Budget::Ratio(_) => self.budget.resolve(observation.tokens()),
        }
    }

    /// How the launch that attends chooses the victim.
    fn choice(&self) -> VictimChoice {
        let scope = match self.scope {
            Scope::Head => EvictionScope::Head,
            Scope::Layer => EvictionScope::Layer,
        };
        let protected = [self.sinks, self.recents];
        let [memory, ties] = [self.memory, self.ties].map(|number| number.map(|own| own as f32));
        VictimChoice { scope, protected, evict_newest: self.evict_newest, memory, ties }
    }

    /// The policy from its configuration.
    pub(crate) fn from_config(config: &mut Config) -> Result<Arc<dyn Policy>> {
        let policy: Self = config.take_all(NAME)?;
        policy.validate()?;
        Ok(Arc::new(policy))
    }
}

impl Policy for LongFlow {
    fn name(&self) -> &'static str {
        NAME
    }

    fn config(&self) -> serde_json::Value {
        config_of(NAME, self)
    }

    fn budget(&self) -> Option<Budget> {
        Some(self.budget)
    }

    fn needs(&self) -> Needs {
        self.prefill.needs()
    }

    fn select(&self, observation: &Observation<'_>) -> Result<Plan> {
        let [batch, kv_heads, tokens, _] = observation.dims();
        match self.prompt_scores(observation)? {
            Some((scores, budget)) => {
                let kept = Selection::highest(scores, budget)?;
                // Heads that give up tokens together have the same scores.
                let together = self.scope == Scope::Layer;
                Ok(if together { kept.with_heads_alike() } else { kept }.into())
            }
            None => Ok(Selection::all(batch * kv_heads, tokens).into()),
        }
    }

    fn init_cache(
        &self,
        cache: &mut LayerCache,
        observation: &Observation<'_>,
        selection: &Selection,
    ) -> Result<()> {
        let limit = self.limit(observation);
        self.check_protected(limit)?;
        let kv_heads = cache.layout().kv_heads();
        if self.scope == Scope::Layer && !selection.has_heads_alike(kv_heads)? {
            let reason = "`scope` is `layer`, where all heads overwrite the same token, but heads \
                          keep different tokens of the prompt: expected `head`";
            return Err(PolicyError::InvalidConfig { policy: NAME.into(), reason: reason.into() });
        }
        let limits = selection.lengths().iter().map(|&kept| kept.max(limit));
        cache.set_limits(limits.collect())?;
        if self.after_attention {
            return Ok(());
        }
        WriteSlots::enable(cache)?;
        // The last prompt token's query chooses the first decoded token's place.
        let query = observation.last_queries(NAME, 1)?.squeeze_dim(2);
        let (batch, last) = (observation.dims()[0], observation.tokens() - 1);
        let now = observation.positions.clone().narrow(1, last, 1).reshape([batch]);
        let query = query.cast(cache.options().dtype);
        WriteSlots::attend_and_choose_victim(cache, query, &now, self.choice())?;
        Ok(())
    }

    fn room(&self, observation: &Observation<'_>, new_tokens: usize) -> Result<Room> {
        let over = usize::from(self.after_attention);
        Ok(Room::Limited { limit: self.limit(observation), over, new_tokens })
    }

    fn restore(&self, cache: &mut LayerCache) -> Result<()> {
        Ok(cache.restore_state::<WriteSlots>()?)
    }

    fn capabilities(&self) -> Capabilities {
        let compares_heads = self.scope == Scope::Layer;
        Capabilities { changes_decode: true, compares_heads, ..Capabilities::default() }
    }

    /// A step launches the same kernels whether heads fill up or overwrite.
    fn plan(&self, layer: LayerContext, cache: &LayerCache) -> Result<StepPlan<'_>> {
        if !self.after_attention {
            return Ok(StepPlan {
                slot: TokenSlot::Overwrite,
                attention: StepAttention::ChooseVictim(self.choice()),
                recordable: WriteSlots::are_held(cache),
                ..StepPlan::append()
            });
        }
        let update = self.memory.map(|decay| {
            StepUpdate::Own(Box::new(move |cache: &mut LayerCache, step: &Step, output| {
                let view = output.view(layer, cache, step);
                let importance = importance::importance(&view, self.scope)?;
                importance::remember(cache, importance, &step.position, decay)
            }))
        });
        let rule = EvictionRule {
            before_attention: false,
            interval: 1,
            keeps_order: false,
            protected: Box::new(|_| Ok(self.guarded())),
            scores: Box::new(move |view| match self.memory {
                Some(_) => importance::records(view.cache),
                None => importance::importance(view, self.scope),
            }),
        };
        Ok(StepPlan {
            attention: StepAttention::Live { probabilities: false, logits: true },
            recordable: rule.is_steady(cache),
            update,
            eviction: Some(rule),
            ..StepPlan::append()
        })
    }

    /// Scores of slots say nothing of ages, which [`Self::ties`] compares.
    fn into_eviction_policy(
        self: Arc<Self>,
    ) -> std::result::Result<Arc<dyn EvictionPolicy>, &'static str> {
        if self.ties.is_some() {
            return Err("`longflow` without `ties`, which compares ages too");
        }
        Ok(Arc::new(Self { after_attention: true, ..*self }))
    }
}

impl EvictionPolicy for LongFlow {
    fn rank(&self, observation: &Observation<'_>) -> Result<Option<(Tensor<3>, usize)>> {
        if self.heads_choose() { self.prompt_scores(observation) } else { Ok(None) }
    }

    fn scores(&self, observation: &Observation<'_>, slots: usize) -> Result<Tensor<3>> {
        let fitted = self.prefill.fitted(slots);
        let window = fitted.window.min(slots).max(1);
        self.scored(&SnapKv { window, ..fitted }, observation, slots)
    }

    fn heads_choose(&self) -> bool {
        self.scope == Scope::Head
    }

    fn protected(&self, slots: usize, decoding: bool) -> Result<[usize; 2]> {
        if decoding {
            return Ok(self.guarded());
        }
        let (_, ends) = self.fitted(slots)?;
        Ok(ends)
    }

    fn with_budget(&self, budget: Budget) -> Result<Arc<dyn EvictionPolicy>> {
        let policy = Self { budget, ..*self };
        policy.validate()?;
        Ok(Arc::new(policy))
    }
}
