//! A prompt's merges: which tokens stay, and what goes into them.

use burn::tensor::Tensor;
use kv_core::{LayerCache, Selection, rank, read_f32};
use rayon::prelude::*;

use super::scores::{LOG_SAMPLES, LOG_SCORES, NOTHING, mean_queries, weigh};
use super::{KeepKv, NAME, Order, Predictor, votes, window};
use crate::merge_groups::{Groups, leaders};
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

    /// What stays of a prompt where groups of similar tokens compete as one: a token that resembles one
    /// that ranks higher hands its score on, and is chosen last. Those that always stay do not.
    pub(super) fn by_groups(
        &self,
        observation: &Observation<'_>,
        scores: Tensor<3>,
        budget: usize,
    ) -> Result<Selection> {
        let [batch, kv_heads, tokens, head_dim] = observation.dims();
        let scores = read_f32("scores", scores)?;
        let ranked: Vec<Vec<u32>> = scores.par_chunks(tokens).map(rank).collect();
        let rows = batch * kv_heads * tokens;
        let keys = observation.keys.clone().reshape([rows, head_dim]);
        let leaders = leaders(&keys, &ranked, tokens, self.options.threshold)?;
        let heads = ranked.par_iter().zip(leaders.par_chunks(tokens)).enumerate();
        let kept = heads.map(|(pair, (ranked, leaders))| {
            let own = &scores[pair * tokens..][..tokens];
            let mut sums: Vec<f32> = ranked.iter().map(|&token| own[token as usize]).collect();
            let joins = |place: usize| {
                let leader = usize::try_from(leaders[place]).ok();
                leader.filter(|_| own[ranked[place] as usize].is_finite())
            };
            // From the lowest rank up: a leader has what joined it when its own turn comes.
            let mut joined = vec![false; tokens];
            for place in (0..tokens).rev() {
                if let Some(leader) = joins(place) {
                    // Scores that are no masses may be negative: they add nothing.
                    sums[leader] += sums[place].max(0.0);
                    joined[place] = true;
                }
            }
            let mut order: Vec<usize> = (0..tokens).collect();
            if let Some(last) = budget.checked_sub(1) {
                order.select_nth_unstable_by(last, |&a, &b| {
                    joined[a].cmp(&joined[b]).then(sums[b].total_cmp(&sums[a])).then(a.cmp(&b))
                });
            }
            let mut kept: Vec<u32> = order[..budget].iter().map(|&place| ranked[place]).collect();
            kept.sort_unstable();
            kept
        });
        Ok(Selection::new(kept.collect())?)
    }

    /// Merges what is not kept of a prompt into what is.
    pub(super) fn merge_prompt(
        &self,
        cache: &mut LayerCache,
        observation: &Observation<'_>,
        selection: &Selection,
    ) -> Result<()> {
        let [batch, kv_heads, tokens, head_dim] = observation.dims();
        let prompt = self.prompt_scores(observation)?;
        let groups = Groups::of_prompts(selection.kept(), tokens, &observation.keys.device());
        let flat = |tensor: &Tensor<4>| {
            let rows = tensor.clone().reshape([batch * kv_heads * tokens, head_dim]);
            rows.cast(cache.options().dtype)
        };
        let (keys, values) = (flat(observation.keys), flat(observation.values));
        let first = |pair: usize| pair * tokens;
        let targets = groups.targets(&keys, self.options.threshold)?;

        let live = |of: &[f32]| -> Vec<f32> {
            let kept = selection.kept().iter().enumerate();
            kept.flat_map(|(pair, kept)| kept.iter().map(move |&at| of[first(pair) + at as usize]))
                .collect()
        };
        cache.set_live_track(LOG_SCORES, &live(&prompt.scores), NOTHING)?;
        // Far behind a prompt's start the absolute step corrects nothing.
        let fresh = if self.options.absolute_step { 0.0 } else { NOTHING };
        cache.set_live_track(LOG_SAMPLES, &live(&prompt.samples), fresh)?;
        votes::prime(cache, &groups, &targets)?;
        if self.options.predictor == Predictor::Window {
            window::prime(cache, &groups, &targets, &prompt.rows, self.options.window)?;
        }
        let queries = observation.last_queries(NAME, 1)?.squeeze_dim(2);
        let merged = groups.merge(
            cache,
            Some([&keys, &values]),
            &targets,
            |pair, at| [0.0, self.with_epsilon(prompt.log_score(first(pair) + at as usize))],
            self.merging(Some(mean_queries(queries, kv_heads))),
        )?;
        if cache.log_weights().is_none() {
            // There from the start, so that steps make nothing new.
            cache.set_live_log_weights(&vec![0.0; selection.total()])?;
        }
        let before = self.weights_before(cache);
        if let Some((slots, weights)) = merged {
            weigh(cache, &slots, weights)?;
        }
        self.remember_merges(cache, before)
    }

    /// `ln(ŝ + ε)`
    fn with_epsilon(&self, log_score: f32) -> f32 {
        if self.options.epsilon == 0.0 {
            return log_score;
        }
        let (a, b) = (f64::from(log_score), self.options.epsilon.ln());
        (a.max(b) + (-(a - b).abs()).exp().ln_1p()) as f32
    }
}
