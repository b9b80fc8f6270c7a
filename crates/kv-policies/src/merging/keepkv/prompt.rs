//! A prompt's merges: which tokens stay, and what goes into them.

use burn::tensor::Tensor;
use kv_core::{LayerCache, Selection};
use kv_kernels::{group_priority_ranks, rankings};

use super::scores::{LOG_SAMPLES, LOG_SCORES, PromptScores, mean_queries};
use super::takes::TAKES;
use super::{KeepKv, NAME, Order, Predictor, votes, window};
use crate::merging::merge_groups::{Groups, leaders, one_vote_each};
use crate::policy::kept_tokens::KeptTokens;
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
        let kept = KeptTokens::new(cache, selection, tokens)?;
        let PromptScores { scores, samples } = self.prompt_scores(observation)?;
        kept.set_track(cache, LOG_SCORES, &scores, LOG_OF_NO_SCORE)?;
        // Far behind a prompt's start the absolute step corrects nothing.
        let fresh = if self.options.absolute_step { 0.0 } else { LOG_OF_NO_SCORE };
        kept.set_track(cache, LOG_SAMPLES, &samples, fresh)?;
        votes::init_cache(cache)?;
        let mut groups = Groups::of_prompts(selection, tokens, &kept)?;
        let slots = selection.lengths().iter().copied().min().unwrap_or_default();
        if self.options.spare_protected && !groups.is_empty() {
            groups = groups.sparing_ends(self.evictor.protected(slots, false)?);
        }
        self.choose_takers(cache, observation, selection)?;
        if let Some(takes) = cache.track(TAKES) {
            groups = groups.taking(takes, &kept.slots);
        }
        let flat = |tensor: &Tensor<4>| {
            tensor.clone().reshape([rows, head_dim]).cast(cache.options().dtype)
        };
        let (keys, values) = (flat(observation.keys), flat(observation.values));
        let targets = groups.targets(&keys, self.options.threshold)?;
        if self.options.predictor == Predictor::Window {
            let each = self.prompt_scores_of_each(observation)?;
            window::init_cache(cache, &groups.read(&targets)?, &each, self.options.window)?;
        }
        let queries = observation.last_queries(NAME, 1)?.squeeze_dim(2);
        let predicted = self.add_epsilon((scores - samples).reshape([rows]));
        let predicted = groups.values(&predicted.reshape([batch * kv_heads, tokens]));
        let mut weights = predicted.map(one_vote_each);
        if self.options.inherit {
            let inherited = self.evictor.scores(observation, slots)?.flatten(0, 1);
            let inherited = groups.values(&inherited).map(|own| own.unsqueeze_dim(2));
            let [victims, kept] = weights;
            let [of_victims, of_kept] = inherited;
            weights = [[victims, of_victims], [kept, of_kept]]
                .map(|columns| Tensor::cat(columns.to_vec(), 2));
        }
        let options = self.merging(Some(mean_queries(queries, kv_heads)));
        let merged = groups.merge(cache, Some([&keys, &values]), targets, weights, options)?;
        let before = self.weights_before(cache);
        self.weigh(cache, merged)?;
        self.remember_merges(cache, before)
    }
}
