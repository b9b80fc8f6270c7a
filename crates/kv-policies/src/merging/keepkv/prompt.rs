//! A prompt's merges: which tokens stay, and what goes into them.

use burn::tensor::Tensor;
use kv_core::{LayerCache, Selection};
use kv_kernels::{group_priority_ranks, rankings};

use super::scores::{LOG_SAMPLES, LOG_SCORES, PromptScores, mean_queries};
use super::takes::TAKES;
use super::{KeepKv, NAME, Order, Predictor, votes, window};
use crate::merging::merge_groups::{Groups, leaders};
use crate::policy::sentinels::LOG_OF_NO_SCORE;
use crate::{Observation, Result};

impl KeepKv {
    /// The `budget` tokens of each head that rank highest.
    pub(super) fn highest(
        &self,
        observation: &Observation<'_>,
        scores: Tensor<3>,
        budget: usize,
    ) -> Result<Selection> {
        match self.options.order {
            Order::MergeFirst => self.by_groups(observation, scores, budget),
            Order::EvictFirst => Ok(Selection::highest(scores, budget)?),
        }
    }

    /// The tokens that stay of a prompt where groups of similar tokens compete as one. A token adds
    /// its score to a similar token that ranks higher, and is itself chosen last. Tokens that
    /// always stay join no group, and no token joins a pristine one.
    pub(super) fn by_groups(
        &self,
        observation: &Observation<'_>,
        scores: Tensor<3>,
        budget: usize,
    ) -> Result<Selection> {
        let [batch, kv_heads, tokens, head_dim] = observation.dims();
        let total_kv_heads = batch * kv_heads;
        let mut scores = scores.reshape([total_kv_heads, tokens]);
        let mut order = scores.clone();
        let mut spared = match self.options.spare_protected {
            true => self.evictor.protected(budget, false)?.iter().sum(),
            false => 0,
        };
        if self.options.pristine > 0.0 {
            let highest =
                Selection::highest(scores.clone().reshape([batch, kv_heads, tokens]), budget)?;
            let pristine = self.pristine(observation, &highest)?;
            spared = pristine.lengths().iter().copied().max().unwrap_or_default();
            let marks = pristine.marks(tokens, &scores.device())?.equal_scalar(1.0);
            // Pristine tokens always stay, and rank before all others that always stay.
            order = scores.clone().clamp_max(f32::MAX).mask_fill(marks.clone(), f32::INFINITY);
            scores = scores.mask_fill(marks, f32::INFINITY);
        }
        let ranked = rankings(order).map_err(kv_core::Error::from)?;
        let keys = observation.keys.clone().reshape([total_kv_heads * tokens, head_dim]);
        let leaders = leaders(&keys, &ranked, self.options.threshold, spared)?;
        let turns = group_priority_ranks(scores, ranked, leaders).map_err(kv_core::Error::from)?;
        Ok(Selection::highest(turns.reshape([batch, kv_heads, tokens]), budget)?)
    }

    /// Merges a prompt's dropped tokens into its kept ones.
    pub(super) fn merge_prompt(
        &self,
        cache: &mut LayerCache,
        observation: &Observation<'_>,
        selection: &Selection,
    ) -> Result<()> {
        let [batch, kv_heads, tokens, head_dim] = observation.dims();
        let rows = batch * kv_heads * tokens;
        let PromptScores { scores, samples, rows: each } = self.prompt_scores(observation)?;
        cache.set_kept_track(LOG_SCORES, scores.clone(), selection, LOG_OF_NO_SCORE)?;
        // Far behind a prompt's start the absolute step corrects nothing.
        let fresh = if self.options.absolute_step { 0.0 } else { LOG_OF_NO_SCORE };
        cache.set_kept_track(LOG_SAMPLES, samples.clone(), selection, fresh)?;
        votes::init_cache(cache)?;
        if cache.log_weights().is_none() {
            // The weights are there from the start, so that steps allocate nothing.
            cache.set_live_log_weights(&vec![0.0; selection.total()])?;
        }
        let mut groups = Groups::of_prompts(selection, tokens, &observation.keys.device())?;
        let slots = selection.lengths().iter().copied().min().unwrap_or_default();
        if self.options.spare_protected && !groups.is_empty() {
            groups = groups.sparing_ends(self.evictor.protected(slots, false)?);
        }
        self.choose_takers(cache, observation, selection)?;
        if let Some(takes) = cache.track(TAKES) {
            groups = groups.taking(takes, &cache.first_slots(selection.lengths())?);
        }
        let flat = |tensor: &Tensor<4>| {
            tensor.clone().reshape([rows, head_dim]).cast(cache.options().dtype)
        };
        let (keys, values) = (flat(observation.keys), flat(observation.values));
        let targets = groups.targets(&keys, self.options.threshold)?;
        if self.options.predictor == Predictor::Window {
            window::init_cache(cache, &groups.read(&targets)?, &each, self.options.window)?;
        }
        let queries = observation.last_queries(NAME, 1)?.squeeze_dim(2);
        let predicted = self.add_epsilon((scores - samples).reshape([rows]));
        let zeros = || predicted.zeros_like();
        let mut columns = vec![zeros(), predicted.clone(), zeros().add_scalar(1.0), zeros()];
        if self.options.inherit {
            columns.push(self.evictor.scores(observation, slots)?.reshape([rows]));
        }
        let weights = Tensor::stack::<2>(columns, 1);
        let options = self.merging(Some(mean_queries(queries, kv_heads)));
        let (from, weights) = (Some([&keys, &values]), groups.weights(&weights));
        let merged = groups.merge(cache, from, targets, weights, options)?;
        let before = self.weights_before(cache);
        self.weigh(cache, merged)?;
        self.remember_merges(cache, before)
    }
}
