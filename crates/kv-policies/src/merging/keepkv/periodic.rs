//! Rebuilding the compressed cache from all tokens, which are in host memory.

use burn::tensor::{DType, Tensor};
use kv_core::{Budget, LayerCache, Room, Selection, counted};

use super::archive::{Archive, Complete};
use super::{KeepKv, NAME};
use crate::keep_top::rescore::remember;
use crate::policy::attention_scores::{last_queries, window_weights};
use crate::policy::config::invalid;
use crate::{LayerContext, Observation, PolicyError, Result, Step};

/// State of the last queries, as many as the window has, `[B, Hq, W * D]`.
const LAST_QUERIES: &str = "keepkv-queries";

impl KeepKv {
    /// Whether all tokens are kept in host memory.
    pub(super) fn rebuilds(&self) -> bool {
        self.options.period > 0 || self.options.rebuild_above > 0.0
    }

    /// Begins to keep all tokens, from a prompt on.
    pub(super) fn archive(
        &self,
        cache: &mut LayerCache,
        observation: &Observation<'_>,
    ) -> Result<()> {
        let Observation { keys, values, positions, .. } = observation;
        let archive = Archive::new(keys, values, positions, cache.options().dtype)?;
        cache.insert_policy_state(archive);
        let window = self.options.window;
        let queries = observation.last_queries(NAME, window)?;
        let [batch, heads, given, head_dim] = queries.dims();
        // Shorter prompts repeat their first query, so that all sequences have equally many.
        let filled = match window - given {
            0 => queries,
            missing => {
                let first = queries.clone().narrow(2, 0, 1).repeat_dim(2, missing);
                Tensor::cat(vec![first, queries], 2)
            }
        };
        let filled = filled.cast(DType::F32).reshape([batch, heads, window * head_dim]);
        cache.set_state(LAST_QUERIES, filled);
        Ok(())
    }

    /// Keeps a step's token, which is each head's newest slot, and its query.
    pub(super) fn keep_newest(
        &self,
        cache: &mut LayerCache,
        step: &Step,
        query: &Tensor<3>,
    ) -> Result<()> {
        let [keys, values] = cache.newest();
        if let Some(archive) = cache.policy_state_mut::<Archive>() {
            archive.push(keys, values, step.position.clone())?;
        }
        remember(NAME, cache, LAST_QUERIES, query)
    }

    /// Whether the cache is rebuilt at the step that makes `pushed` tokens behind the prompt.
    /// Layers take turns, so that a step waits for the copies of a few of them at most.
    fn is_due(&self, layer: LayerContext, pushed: usize) -> bool {
        let period = self.options.period;
        let turn =
            if self.options.staggered { layer.index * period / layer.count.max(1) } else { 0 };
        period > 0 && (pushed + turn).is_multiple_of(period)
    }

    /// Whether the next step rebuilds the cache. It does not while all tokens fit.
    pub(super) fn due_now(&self, layer: LayerContext, cache: &LayerCache) -> bool {
        let due = |archive: &Archive| self.is_due(layer, archive.pushed() + 1);
        cache.policy_state().is_some_and(due) && self.over(cache, 1)
    }

    /// Whether any head's tokens, and `more`, are over its limit.
    fn over(&self, cache: &LayerCache, more: usize) -> bool {
        let kv_heads = cache.layout().kv_heads();
        let (Some(limits), Some(archive)) = (cache.limits(), cache.policy_state::<Archive>())
        else {
            return false;
        };
        let rows = archive.tokens().into_iter().zip(limits.chunks(kv_heads));
        rows.into_iter().any(|(tokens, limits)| limits.iter().any(|limit| tokens + more > *limit))
    }

    /// Asks for all tokens, if the step to come is to rebuild the cache.
    pub(super) fn prefetch_if_due(&self, layer: LayerContext, cache: &mut LayerCache) {
        if self.due_now(layer, cache)
            && let Some(archive) = cache.policy_state_mut::<Archive>()
        {
            archive.prefetch();
        }
    }

    /// Compresses all tokens anew, with the scores that the last queries give them.
    pub(super) fn rebuild(
        &self,
        layer: LayerContext,
        cache: &mut LayerCache,
        step: &Step,
    ) -> Result<()> {
        let limits = cache.limits().map(<[usize]>::to_vec).unwrap_or_default();
        let kv_heads = cache.layout().kv_heads();
        if !self.over(cache, 0) {
            return Ok(());
        }
        let missing = |what| PolicyError::MissingObservation { policy: NAME, what };
        let queries = cache.state(LAST_QUERIES).cloned();
        let queries = queries.ok_or_else(|| missing("the last queries"))?;
        let archive = cache.policy_state_mut::<Archive>().ok_or_else(|| missing("all tokens"))?;
        let complete = archive.fetch()?;

        let (mut parts, mut first) = (Vec::new(), 0);
        for run in complete {
            let own = queries.clone().narrow(0, first, run.rows);
            let limits = &limits[first * kv_heads..(first + run.rows) * kv_heads];
            first += run.rows;
            parts.push(self.compressed(layer, cache, step, &run, own, limits)?);
        }
        let mut fresh = LayerCache::concat(parts)?;
        fresh.resize(cache.layout().capacities().to_vec())?;
        fresh.set_limits(limits)?;
        fresh.set_state(LAST_QUERIES, queries);
        if let Some(archive) = cache.take_policy_state::<Archive>() {
            fresh.insert_policy_state(archive);
        }
        *cache = fresh;
        Ok(())
    }

    /// Sequences of equally many tokens compressed to their limits.
    fn compressed(
        &self,
        layer: LayerContext,
        cache: &LayerCache,
        step: &Step,
        run: &Complete,
        queries: Tensor<3>,
        limits: &[usize],
    ) -> Result<LayerCache> {
        let [_, _, tokens, head_dim] = run.keys.dims();
        let [rows, heads, width] = queries.dims();
        let window = queries.reshape([rows, heads, width / head_dim, head_dim]);
        let window = last_queries(&window, tokens);
        let sums = match self.evictor.needs().column_sums {
            true => Some(window_weights(&window, &run.keys)?.sum_dim(2).squeeze_dim(2)),
            false => None,
        };
        let observation = Observation::new(&run.keys, &run.values, &run.positions)
            .of_layer(layer)
            .with_column_sums(sums)
            .with_window(window.clone())
            .with_frequencies(&step.inverse_frequencies)
            .during_decode();
        let selection = self.select_within(&observation, limits)?;
        let options = cache.options().clone();
        let mut fresh = observation.cache(&selection, Room::Extra(0), options)?;
        self.evictor.init_cache(&mut fresh, &observation, &selection)?;
        self.merge_prompt(&mut fresh, &observation, &selection)?;
        Ok(fresh)
    }

    /// The tokens that heads keep within their limits, whatever share of a prompt the budget is.
    fn select_within(&self, observation: &Observation<'_>, limits: &[usize]) -> Result<Selection> {
        let [rows, kv_heads, tokens, _] = observation.dims();
        let most = limits.iter().copied().min().unwrap_or(tokens);
        let alike = limits.iter().all(|&limit| limit == most);
        if most >= tokens {
            return Ok(Selection::all(rows * kv_heads, tokens));
        }
        // A share of the prompt is no share of what came behind it, nor are the tokens protected
        // under it.
        let mean = limits.iter().sum::<usize>() / limits.len().max(1);
        let evictor = self.evictor.with_budget(Budget::Tokens(mean))?;
        let selection = match evictor.rank(observation)?.filter(|_| alike) {
            Some((scores, _)) => self.highest(observation, scores, most)?,
            None => evictor.select(observation)?.selection,
        };
        let lengths = selection.lengths().iter();
        match lengths.zip(limits).find(|(length, limit)| length > limit) {
            Some((length, limit)) => {
                let (tokens, slots) = (counted(tokens, "token"), counted(*length, "slot"));
                let reason = format!(
                    "rebuilt of {tokens}, a head would hold {slots} of {limit}: expected heads \
                     that choose for themselves"
                );
                Err(invalid(NAME, reason))
            }
            None => Ok(selection),
        }
    }
}
