//! The policy that keeps the highest scores, whatever gives them.

use std::sync::Arc;

use burn::tensor::Tensor;
use kv_core::{Budget, HeadAllocation, LayerAllocation, LayerCache, Room, Selection, read_f32};

use crate::keep_top::rescore::{last_of, remember, rescore};
use crate::policy::attention_scores::last_queries;
use crate::policy::check::Check;
use crate::policy::config::invalid;
use crate::policy::ends::{fit_ends, protected, warn_of_window};
use crate::policy::kept_tokens::KeptTokens;
use crate::{
    Capabilities, Decoding, EvictionPolicy, EvictionRule, KeepTopConfig, LayerContext, Needs,
    Observation, Plan, Policy, PolicyError, QUERIES, RAW_QUERIES, Result, SCORE, Scorer,
    StepAttention, StepPlan, StepUpdate, VALUE_NORMS,
};

/// A policy that keeps the highest scores.
#[derive(Debug, Clone)]
pub struct KeepTop<S> {
    options: KeepTopConfig,
    scorer: S,
    /// The registry's name, where a preset of options has one of its own.
    name: &'static str,
}

impl<S: Scorer> KeepTop<S> {
    /// # Errors
    /// [`PolicyError::InvalidConfig`] for an interval of 0 and shares outside `[0, 1]`;
    /// [`PolicyError::ProtectedOverBudget`] where that shows without a prompt.
    pub fn new(name: &'static str, options: KeepTopConfig, scorer: S) -> Result<Self> {
        let check = Check(name);
        check.positive("interval", options.interval)?;
        check.share("recent_share", options.recent_share)?;
        options.budget.validate()?;
        options.heads.validate()?;
        scorer.validate().map_err(|reason| invalid(name, reason))?;
        let policy = Self { options, scorer, name };
        if let Budget::Tokens(budget) = policy.options.budget {
            policy.ends(budget, budget)?;
        }
        Ok(policy)
    }

    /// The family's options.
    pub fn options(&self) -> &KeepTopConfig {
        &self.options
    }

    /// The scorer.
    pub fn scorer(&self) -> &S {
        &self.scorer
    }

    /// Sinks and recents of a layer's `budget`, where layers have `base` slots a head on average.
    fn ends(&self, budget: usize, base: usize) -> Result<[usize; 2]> {
        let sinks = match self.options.sinks {
            Some(sinks) => sinks,
            // The protected tokens of a cut window follow from the mean budget, as the window does.
            None => self.options.sinks_of(&self.scorer, base).min(budget / 4),
        };
        let ends = [sinks, self.options.recents_of(budget)];
        fit_ends(self.name, self.options.budget, budget, ends)
    }

    /// The scorer for a mean budget.
    fn fitted(&self, base: usize) -> S {
        let fitted = self.scorer.fitted(base);
        let (own, window) = (self.scorer.window(), fitted.window());
        if window < own {
            warn_of_window(self.name, base, own, window);
        }
        fitted
    }

    /// Whether steps evict.
    fn decoding(&self) -> Decoding {
        if self.options.decode { self.scorer.decoding() } else { Decoding::None }
    }

    /// Keeps the last `count` of a prompt's queries for decoding.
    fn keep_queries(
        &self,
        cache: &mut LayerCache,
        name: &str,
        queries: Option<&Tensor<4>>,
        count: usize,
    ) -> Result<()> {
        if count == 0 {
            return Ok(());
        }
        let missing =
            PolicyError::MissingObservation { policy: self.name, what: "the last queries" };
        let last = last_of(last_queries(queries.ok_or(missing)?, count), count);
        cache.set_state(name, last);
        Ok(())
    }

    /// A prompt's scores, +∞ for sinks and recents, and the numbers of sinks and recents.
    fn prompt_scores(
        &self,
        observation: &Observation<'_>,
        budget: usize,
    ) -> Result<(Tensor<3>, [usize; 2])> {
        let base = self.options.budget.resolve(observation.tokens());
        let scorer = self.fitted(base);
        let [sinks, recents] = self.ends(budget, base)?;
        let window = scorer.window().min(budget - sinks);
        let recents = recents.max(window).min(observation.tokens());
        let scores = protected(scorer.prefill(observation, budget)?, sinks, recents);
        Ok((scores, [sinks, recents]))
    }
}

impl<S: Scorer> Policy for KeepTop<S> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn config(&self) -> serde_json::Value {
        let mut config = serde_json::json!({ "policy": self.name });
        for part in [serde_json::to_value(&self.options), serde_json::to_value(&self.scorer)] {
            if let (Some(config), Ok(serde_json::Value::Object(part))) =
                (config.as_object_mut(), part)
            {
                config.extend(part);
            }
        }
        config
    }

    fn budget(&self) -> Option<Budget> {
        Some(self.options.budget)
    }

    fn most_kept(&self, _layer: LayerContext, tokens: usize) -> usize {
        match self.options.layers {
            LayerAllocation::Uniform => self.options.budget.resolve(tokens).min(tokens),
            // Layers divide the budget by the prompt.
            _ => tokens,
        }
    }

    fn needs(&self) -> Needs {
        self.scorer.needs()
    }

    fn select(&self, observation: &Observation<'_>) -> Result<Plan> {
        let [_, kv_heads, tokens, _] = observation.dims();
        let budget = self.options.layer_budget(&self.scorer, observation)?;
        if budget >= tokens {
            return Ok(Plan::whole(observation));
        }
        let (scores, [sinks, recents]) = self.prompt_scores(observation, budget)?;
        // Where heads compete, the host decides.
        let read = || read_f32("scores", scores.clone());
        Ok(match self.options.heads {
            HeadAllocation::Uniform => Selection::highest(scores, budget)?,
            HeadAllocation::Ada { floor } => {
                // The safeguard is a share of the other slots: heads keep protected tokens anyway.
                let fixed = (sinks + recents).min(budget);
                let floor = fixed + ((budget - fixed) as f64 * floor) as usize;
                Selection::ada(&read()?, tokens, kv_heads, budget, floor)
            }
            HeadAllocation::AdaOfficial { floor, normalize } => Selection::ada_official(
                &read()?,
                tokens,
                kv_heads,
                budget,
                recents,
                floor,
                normalize,
            ),
        }
        .into())
    }

    fn init_cache(
        &self,
        cache: &mut LayerCache,
        observation: &Observation<'_>,
        selection: &Selection,
    ) -> Result<()> {
        let decoding = self.decoding();
        if decoding == Decoding::None {
            return Ok(());
        }
        let limit = self.options.decode_budget(&self.scorer, observation)?;
        self.ends(limit, limit)?;
        let kept = selection.lengths().iter().map(|&kept| kept.max(limit));
        cache.set_limits(kept.collect())?;
        match decoding {
            Decoding::AfterAttention { accumulate: true, .. } => {
                let scores = self.scorer.prefill(observation, limit)?;
                let kept = KeptTokens::new(cache, selection, observation.tokens())?;
                kept.set_track(cache, SCORE, &scores.flatten(0, 1), 0.0)?;
                if self.scorer.weighs_values() {
                    cache.set_value_norms(VALUE_NORMS)?;
                }
            }
            Decoding::Rescore { window, raw_queries } => {
                let (last, raw) = (&observation.window, &observation.raw_queries);
                self.keep_queries(cache, QUERIES, last.as_ref(), window)?;
                self.keep_queries(cache, RAW_QUERIES, raw.as_ref(), raw_queries)?;
            }
            _ => {}
        }
        Ok(())
    }

    fn room(&self, observation: &Observation<'_>, new_tokens: usize) -> Result<Room> {
        if self.decoding() == Decoding::None {
            return Ok(Room::Extra(new_tokens));
        }
        let limit = self.options.decode_budget(&self.scorer, observation)?;
        Ok(Room::Limited { limit, over: self.options.interval, new_tokens })
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            changes_decode: self.decoding() != Decoding::None,
            compares_heads: !self.heads_choose(),
            draws: S::DRAWS,
            ..Capabilities::default()
        }
    }

    /// Steps are recordable once every head is at one limit: each then appends a slot and evicts
    /// one. Where slots are evicted many at a time, the steps in between are recordable, which only
    /// append.
    fn plan(&self, layer: LayerContext, cache: &LayerCache) -> Result<StepPlan<'_>> {
        let decoding = self.decoding();
        let Some(rule) = self.rule(decoding, layer) else { return Ok(StepPlan::append()) };
        let probabilities =
            matches!(decoding, Decoding::AfterAttention { probabilities: true, .. });
        let between = rule.interval > 1 && !rule.is_due(cache, 1);
        Ok(StepPlan {
            attention: StepAttention::Live { probabilities, logits: false },
            update: self.update(decoding),
            recordable: between || rule.is_steady(cache),
            eviction: Some(rule),
            ..StepPlan::append()
        })
    }

    fn into_eviction_policy(
        self: Arc<Self>,
    ) -> std::result::Result<Arc<dyn EvictionPolicy>, &'static str> {
        Ok(self)
    }
}

impl<S: Scorer> EvictionPolicy for KeepTop<S> {
    fn rank(&self, observation: &Observation<'_>) -> Result<Option<(Tensor<3>, usize)>> {
        let budget = self.options.layer_budget(&self.scorer, observation)?;
        if budget >= observation.tokens() || !self.heads_choose() {
            return Ok(None);
        }
        Ok(Some((self.prompt_scores(observation, budget)?.0, budget)))
    }

    fn scores(&self, observation: &Observation<'_>, slots: usize) -> Result<Tensor<3>> {
        let base = self.options.budget.resolve(observation.tokens());
        self.scorer.fitted(base).prefill(observation, slots)
    }

    fn accumulates(&self) -> Option<&'static str> {
        let accumulates =
            matches!(self.decoding(), Decoding::AfterAttention { accumulate: true, .. });
        accumulates.then_some(SCORE)
    }

    fn heads_choose(&self) -> bool {
        self.options.heads == HeadAllocation::Uniform && !self.scorer.heads_agree()
    }

    fn protected(&self, slots: usize, _decoding: bool) -> Result<[usize; 2]> {
        let [sinks, recents] = self.ends(slots, slots)?;
        let window = self.scorer.fitted(slots).window().min(slots - sinks);
        Ok([sinks, recents.max(window)])
    }

    fn with_budget(&self, budget: Budget) -> Result<Arc<dyn EvictionPolicy>> {
        let layers = LayerAllocation::Uniform;
        let options = KeepTopConfig { budget, layers, ..self.options.clone() };
        Ok(Arc::new(Self::new(self.name, options, self.scorer.clone())?))
    }
}

impl<S: Scorer> KeepTop<S> {
    /// The update of tracks by a step's attention.
    fn update(&self, decoding: Decoding) -> Option<StepUpdate<'_>> {
        let reduction = self.scorer.adds().into();
        match decoding {
            Decoding::AfterAttention { accumulate: true, .. } => {
                Some(match self.scorer.weighs_values() {
                    true => {
                        StepUpdate::AddContributions { sums: SCORE, norms: VALUE_NORMS, reduction }
                    }
                    false => StepUpdate::AddProbabilities { sums: SCORE, reduction },
                })
            }
            Decoding::Rescore { window, raw_queries } => {
                Some(StepUpdate::Own(Box::new(move |cache, step, output| {
                    if window > 0 {
                        remember(self.name, cache, QUERIES, &output.query)?;
                    }
                    if raw_queries > 0 {
                        remember(self.name, cache, RAW_QUERIES, &step.raw_query()?)?;
                    }
                    Ok(())
                })))
            }
            Decoding::None | Decoding::BeforeAttention | Decoding::AfterAttention { .. } => None,
        }
    }

    /// The eviction of a step; `None` where decoded tokens accumulate.
    fn rule(&self, decoding: Decoding, layer: LayerContext) -> Option<EvictionRule<'_>> {
        if decoding == Decoding::None {
            return None;
        }
        // Scores of slots as if they were a prompt depend on the slots' order.
        let rescores = matches!(decoding, Decoding::Rescore { .. });
        Some(EvictionRule {
            before_attention: decoding == Decoding::BeforeAttention,
            interval: self.options.interval,
            keeps_order: rescores,
            protected: Box::new(|limit| {
                let [sinks, recents] = self.ends(limit, limit)?;
                let window = self.scorer.fitted(limit).window().min(limit);
                Ok([sinks, recents.max(window)])
            }),
            scores: Box::new(move |view| match rescores {
                true => {
                    let group = view.query.dims()[1] / view.cache.layout().kv_heads();
                    rescore(&self.scorer, layer, view.cache, view.step, group)
                }
                false => self.scorer.decode(view),
            }),
        })
    }
}
