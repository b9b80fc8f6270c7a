//! Clustered index sharing (PrHS, section IV-A).

mod index;
mod labels;
mod options;
mod query_ring;
mod star;

use std::sync::Arc;

use burn::tensor::Tensor;
use kv_core::{Budget, LayerCache, Selection};
use kv_kernels::{IndexSets, ScoreReduction, SetRule, Share};

pub use index::{CisIndex, StepQueries};

use labels::LabelKeys;
use query_ring::QueryRing;

use crate::policy::check::Check;
use crate::policy::config::{Config, config_of, invalid};
use crate::reading::channels::{CHANNELS, ChannelsOf, channels};
use crate::{
    Capabilities, LayerContext, Needs, Observation, Plan, Policy, PolicyError, Result, Step,
    StepPlan,
};
use options::MOST_VOTERS;
pub use options::{CisOptions, SetsOf, Similarity};

const NAME: &str = "cis";

/// CIS: the whole cache stays, and each head attends to sinks, locals and a set of tokens in
/// between.
///
/// A step shares the set of the most recent step of its block whose query is similar (eq. 12): the
/// `k` tokens of highest attention of the step that retrieved the set, and the neighbours of the
/// best of them (eq. 13). A step without a similar one retrieves, and reads the `k` tokens without
/// neighbours.
///
/// The device makes all of a step's choices.
#[derive(Debug, Clone)]
pub struct Cis {
    name: &'static str,
    options: CisOptions,
    star: bool,
}

impl Cis {
    /// # Errors
    /// [`PolicyError::InvalidConfig`], [`PolicyError::ProtectedOverBudget`].
    pub fn new(options: CisOptions) -> Result<Self> {
        Self::named(NAME, options, false)
    }

    /// [`Self::new`] under another policy's name.
    pub(crate) fn named(name: &'static str, options: CisOptions, star: bool) -> Result<Self> {
        let options = options.validated(name)?;
        if let Some(target) = options.target.filter(|_| star) {
            // The target and CIS* would both change `k`.
            let reason = format!(
                "`target` is {target}, expected none, as sets are brought to the budget's size; \
                 `cis` has targets"
            );
            return Err(invalid(name, reason));
        }
        Ok(Self { name, options, star })
    }

    /// The options.
    pub fn options(&self) -> &CisOptions {
        &self.options
    }

    /// The policy from its configuration.
    pub(crate) fn from_config(config: &mut Config) -> Result<Arc<dyn Policy>> {
        Ok(Arc::new(Self::new(config.take_budgeted(NAME, CisOptions::new)?)?))
    }
}

impl Policy for Cis {
    fn name(&self) -> &'static str {
        self.name
    }

    fn config(&self) -> serde_json::Value {
        config_of(self.name, &self.options)
    }

    fn budget(&self) -> Option<Budget> {
        Some(self.options.budget)
    }

    /// Steps read a part of the prompt; all of it is kept.
    fn least_kept(&self, tokens: usize) -> usize {
        tokens
    }

    fn select(&self, observation: &Observation<'_>) -> Result<Plan> {
        self.options.parts(self.name, self.options.budget.behind(observation.tokens()))?;
        Ok(Plan::whole(observation))
    }

    fn needs(&self) -> Needs {
        let options = &self.options;
        let labels = options.labels.map_or(0, |_| options.label_window());
        // One query at least: it shows how many heads have vectors.
        Needs { window: options.vote.max(labels), ..Needs::default() }
    }

    fn init_cache(
        &self,
        cache: &mut LayerCache,
        observation: &Observation<'_>,
        _selection: &Selection,
    ) -> Result<()> {
        let budget = self.options.budget.behind(observation.tokens());
        cache.set_limits(vec![budget; cache.layout().head_ranges()])?;
        if self.options.votes() {
            let window = self.options.vote;
            let queries = observation.last_queries(self.name, window)?;
            let [batch, heads, count, head_dim] = queries.dims();
            let ranges = batch * self.options.sets_of(cache.layout().kv_heads(), heads);
            let group = batch * heads / ranges;
            let voters = group * window;
            let few = voters <= MOST_VOTERS;
            let most =
                format!("at most {MOST_VOTERS} queries of a set: {group} heads have {voters}");
            Check(self.name).that("vote", window, few, &most)?;
            let by_range = queries.reshape([ranges, group, count, head_dim]).swap_dims(1, 2);
            let by_range = by_range.reshape([ranges, count, group * head_dim]);
            let by_range = by_range.cast(cache.options().dtype);
            let last = observation.prompt_tokens.saturating_sub(1);
            cache.insert_policy_state(QueryRing::new(by_range, last, window));
        }
        if let Some(count) = self.options.label_count(cache.head_dim()) {
            let (own, window) = (self.options.channels.as_ref(), self.options.label_window());
            let of = ChannelsOf::KvHeads;
            let channels = channels(self.name, own, observation, of, count, window)?;
            cache.set_int_state(CHANNELS, channels);
            LabelKeys::keep(cache)?;
        }
        match self.shape_of_vectors(observation) {
            Some(shape) => Ok(CisIndex(self.index_sets(cache, shape)?).put_into(cache)?),
            None => Ok(()),
        }
    }

    fn restore(&self, cache: &mut LayerCache) -> Result<()> {
        cache.states_to_ints(&[CHANNELS]);
        cache.restore_state::<LabelKeys>()?;
        cache.restore_state::<QueryRing>()?;
        Ok(cache.restore_state::<CisIndex>()?)
    }

    fn capabilities(&self) -> Capabilities {
        let CisOptions { similarity, group_score, target, block, .. } = self.options;
        let compares_hidden = similarity == Similarity::Hidden;
        let sums = group_score == ScoreReduction::Sum && target.is_none() && !self.star;
        // A set of a vote is not the best of the step's own query, nor one that labels chose.
        let sums = sums && !self.options.votes() && self.options.labels.is_none();
        Capabilities {
            changes_decode: true,
            compares_hidden,
            target,
            block_of_sums: sums.then_some(block),
            ..Capabilities::default()
        }
    }

    fn plan(&self, _layer: LayerContext, cache: &LayerCache) -> Result<StepPlan<'_>> {
        Ok(self.plan_within(Share::default(), cache))
    }
}

impl Cis {
    /// The plan of a step, where `hidden` is the share of tokens that are out of sight.
    pub(crate) fn plan_within(&self, hidden: Share, cache: &LayerCache) -> StepPlan<'_> {
        let attend = move |cache: &mut LayerCache, query, step: &Step| {
            self.attend_within(hidden, cache, query, step)
        };
        StepPlan::attend_with(attend).recordable(self.is_steady(cache))
    }

    /// Whether all steps launch the same kernels: index sets are there, and there is no target.
    pub(crate) fn is_steady(&self, cache: &LayerCache) -> bool {
        self.options.target.is_none() && cache.policy_state::<CisIndex>().is_some()
    }

    /// A step whose tokens are appended, where `hidden` is the share of tokens that are out of
    /// sight.
    pub(crate) fn attend_within(
        &self,
        hidden: Share,
        cache: &mut LayerCache,
        query: Tensor<3>,
        step: &Step,
    ) -> Result<Tensor<3>> {
        let options = &self.options;
        let vectors = self.vectors(cache, step, &query)?;
        let capacity = cache.layout().most_capacity();
        match cache.policy_state::<CisIndex>().map(CisIndex::sets) {
            None => {
                CisIndex(self.index_sets(cache, vectors.dims())?).put_into(cache)?;
            }
            // The cache has grown since these sets were made.
            Some(sets) if sets.width() < capacity => {
                let width = options.width(self.widest(cache)?, capacity);
                if sets.width() < width {
                    CisIndex(sets.clone().widened(width)).put_into(cache)?;
                }
            }
            Some(_) => {}
        }
        let (newest, retrieval) = (step.position.clone(), options.retrieval(hidden));
        let seen = cache.layout().lengths().first().copied().unwrap_or_default();
        let measures = options.target.is_some() && seen.is_multiple_of(options.every);
        let votes = match options.votes() {
            true => {
                let queries = self.by_range(cache, query.clone());
                Some(QueryRing::push(cache, queries, &step.position, options.vote)?)
            }
            false => None,
        };
        let scored = match options.label_count(cache.head_dim()) {
            Some(count) => {
                let queries = votes.unwrap_or_else(|| query.clone());
                Some(LabelKeys::score(cache, queries, count)?)
            }
            None => votes.map(|votes| (votes, cache.keys().clone())),
        };
        let queries = StepQueries { query, scored, vectors };
        let (attention, all) = CisIndex::attend(cache, queries, newest, retrieval, measures)?;
        if let Some((read, all)) = attention.log_sum_exp.zip(all) {
            let width = cache.policy_state::<CisIndex>().map_or(1, |index| index.sets().width());
            let most = options.most(self.widest(cache)?, capacity).min(width);
            if let Some(steering) = options.steering(most) {
                CisIndex::steer(cache, read, all, steering)?;
            }
        }
        Ok(attention.output)
    }

    /// The vectors that steps are compared by, `[ranges, parts, length]`.
    fn vectors(&self, cache: &LayerCache, step: &Step, query: &Tensor<3>) -> Result<Tensor<3>> {
        let [batch, heads, head_dim] = query.dims();
        let kv_heads = cache.layout().kv_heads();
        let own = self.options.sets_of(kv_heads, heads);
        // A vector of each key-value head, or of each row, to each range.
        let spread = |vectors: Tensor<2>, count: usize| {
            let length = vectors.dims()[1];
            let each = vectors.reshape([batch * count, 1, length]);
            each.expand([batch * count, own / count, length]).reshape([batch * own, 1, length])
        };
        Ok(match self.options.similarity {
            // Blocks of one step share nothing, and need no comparison.
            Similarity::Query => self.by_range(cache, query.clone()),
            Similarity::RawQuery => self.by_range(cache, step.raw_query()?),
            Similarity::Key => {
                let [keys, _] = cache.newest();
                spread(keys.reshape([batch * kv_heads, head_dim]), kv_heads)
            }
            Similarity::Hidden => {
                let missing = self.missing("hidden states");
                spread(step.input.as_ref().ok_or(missing)?.normed()?, 1)
            }
        })
    }

    /// Queries `[B, Hq, D]` by the range whose set they use, `[ranges, G, D]`.
    fn by_range(&self, cache: &LayerCache, queries: Tensor<3>) -> Tensor<3> {
        let [batch, heads, head_dim] = queries.dims();
        let own = self.options.sets_of(cache.layout().kv_heads(), heads);
        queries.reshape([batch * own, heads / own, head_dim])
    }

    /// The rule of a head with a budget in tokens.
    fn rule(&self, budget: usize) -> Result<SetRule> {
        Ok(self.options.rule(self.options.parts(self.name, budget)?, self.star))
    }

    /// The budgets of heads.
    fn budgets<'a>(&self, cache: &'a LayerCache) -> Result<&'a [usize]> {
        cache.limits().ok_or_else(|| self.missing("a cache that this policy filled"))
    }

    /// The rule of the heads of the largest budget.
    fn widest(&self, cache: &LayerCache) -> Result<SetRule> {
        self.rule(self.budgets(cache)?.iter().max().copied().unwrap_or(1))
    }

    /// The shape of [`Self::vectors`] in the steps behind a prompt, `[ranges, parts, length]`.
    /// `None` for hidden states, which a prompt does not show, and for a prompt without a query:
    /// the first step tells.
    fn shape_of_vectors(&self, observation: &Observation<'_>) -> Option<[usize; 3]> {
        let [_, kv_heads, _, head_dim] = observation.keys.dims();
        let [batch, heads, _, _] = observation.window.as_ref()?.dims();
        let own = self.options.sets_of(kv_heads, heads);
        match self.options.similarity {
            Similarity::RawQuery | Similarity::Query => Some([batch * own, heads / own, head_dim]),
            Similarity::Key => Some([batch * own, 1, head_dim]),
            Similarity::Hidden => None,
        }
    }

    /// Index sets for every range of a cache, by the heads' own budgets, and for vectors of this
    /// shape.
    fn index_sets(&self, cache: &LayerCache, vectors: [usize; 3]) -> Result<IndexSets> {
        let [ranges, parts, length] = vectors;
        let (budgets, each) = (self.budgets(cache)?, ranges / cache.layout().head_ranges().max(1));
        let rules = (0..ranges).map(|range| self.rule(budgets[range / each]));
        let rules = rules.collect::<Result<Vec<_>>>()?;
        let width = self.options.width(self.widest(cache)?, cache.layout().most_capacity());
        let device = &cache.options().device;
        Ok(IndexSets::new(&rules, self.options.block, width, parts, length, device))
    }

    fn missing(&self, what: &'static str) -> PolicyError {
        PolicyError::MissingObservation { policy: self.name, what }
    }
}
