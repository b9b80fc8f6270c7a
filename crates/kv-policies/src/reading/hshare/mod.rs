//! HShare: lists of critical tokens that queries, heads and layers share.

mod critical;
mod maps;
mod prompt;
mod shared;

use std::sync::{Arc, PoisonError};

use burn::tensor::Tensor;
use kv_core::{Budget, CacheOptions, LayerCache, Selection, read_i32};
use kv_kernels::LIST_HEADER;
use serde::{Deserialize, Serialize};

use crate::policy::check::Check;
use crate::policy::config::{Config, config_of};
use crate::policy::lists::SlotList;
use crate::policy::state_tensors::{check_countable, int_state};
use crate::reading::channels::{CHANNELS, Channels};
use crate::reading::set_parts::SetParts;
use crate::reading::subset::BUDGETS;
use crate::{
    Capabilities, LayerContext, Needs, Observation, OwnedObservation, Plan, Policy, Reads, Result,
    Step, StepPlan,
};

use shared::{SharedLists, Sharing};

pub use maps::{copies, share_map};

const NAME: &str = "hshare";
/// State of the source of each query head's list, `[B, Hq, 1 or 2]`: a head, and a layer.
const SOURCES: &str = "sources";
/// State of each sequence's prompt length, `[B, 1, 1]`; the tokens behind it count the steps.
const PROMPT: &str = "prompt";

/// HShare (Wu et al., ICLR 2025): the whole cache stays; a decode step attends to sinks, recents
/// and the critical tokens between them, which a few channels of queries and keys choose. Some
/// heads take the lists of other heads of their layer, some layers take the lists of earlier
/// layers, and lists stay for some steps. Heads and layers that have many critical tokens of the
/// prompt in common share a list.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HShare {
    /// Tokens attended to per query head, sinks and recents included.
    pub budget: Budget,
    /// `C_sink`, first tokens that are always attended to. By default `sqrt(budget / 2)`, the rule
    /// of CIS: 8 of 128 and 16 of 512.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sinks: Option<usize>,
    /// `C_local`, last tokens that are always attended to. By default four times the sinks, the
    /// rule of CIS: 32 of 128 and 64 of 512.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub recents: Option<usize>,
    /// Share of the layers that choose for themselves.
    pub layers: f64,
    /// Share of a layer's query heads that choose for themselves.
    pub heads: f64,
    /// Share of the decode steps that choose; 1 divided by a whole number.
    pub queries: f64,
    /// Channels of a query head; a quarter of the head dim, at most 32, by default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub labels: Option<usize>,
    /// Calibrated channels.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub channels: Option<Channels>,
    /// Last queries of the prompt whose critical tokens are compared, and which choose channels
    /// where none are calibrated.
    pub window: usize,
    /// First layers that attend to everything.
    pub dense_layers: usize,
}

impl HShare {
    /// The paper's shares, without calibrated channels.
    pub fn new(budget: Budget) -> Self {
        Self {
            budget,
            sinks: None,
            recents: None,
            layers: 0.75,
            heads: 0.75,
            queries: 0.5,
            labels: None,
            channels: None,
            // Ours: the paper compares the critical tokens of all queries.
            window: 64,
            dense_layers: 0,
        }
    }

    /// The policy with its channels read from their file.
    ///
    /// # Errors
    /// [`crate::PolicyError::InvalidConfig`].
    pub fn validated(self) -> Result<Self> {
        self.budget.validate()?;
        let check = Check(NAME);
        for (name, share) in
            [("layers", self.layers), ("heads", self.heads), ("queries", self.queries)]
        {
            check.that(name, share, share > 0.0 && share <= 1.0, "above 0, up to 1")?;
        }
        let steps = 1.0 / self.queries;
        let off = (steps - steps.round()).abs() > 1e-6 * steps;
        check.that("queries", self.queries, !off, "1, 1/2, 1/3 ...")?;
        check.positive("labels", self.labels.unwrap_or(1))?;
        check.positive("window", self.window)?;
        if let Budget::Tokens(budget) = self.budget {
            self.parts(budget)?;
        }
        let channels = self.channels.map(|channels| channels.read(NAME)).transpose()?;
        Ok(Self { channels, ..self })
    }

    /// The parts of a budget: PrHS compares HShare and CIS with equal parts (section V-C).
    fn parts(&self, budget: usize) -> Result<SetParts> {
        SetParts::of(NAME, self.budget, budget, [self.sinks, self.recents])
    }

    /// Steps between choices.
    fn period(&self) -> usize {
        (1.0 / self.queries).round() as usize
    }

    /// The number of lists that each query head has chosen so far, `[B * Hq]`, read to the host.
    /// Their sum over heads and layers, divided by all heads, layers and steps, is the retrieval
    /// ratio. Empty for layers that attend to everything.
    ///
    /// # Errors
    /// [`kv_core::Error::Read`].
    pub fn retrievals(cache: &LayerCache) -> Result<Vec<usize>> {
        let Some(SharedLists(lists)) = cache.policy_state() else { return Ok(Vec::new()) };
        let counts = read_i32("retrievals", lists.clone().narrow(2, LIST_HEADER - 1, 1))?;
        Ok(counts.into_iter().map(|count| count as usize).collect())
    }

    /// Reads of a layer that does not attend to everything, whether it takes another's lists or
    /// not. All steps count with the slots of the last one, which are `rows`. `None` for caches
    /// that HShare has not filled.
    pub(crate) fn reads(cache: &LayerCache, rows: &[Vec<usize>]) -> Result<Option<Reads>> {
        let (Some(_), Some(prompts)) =
            (cache.policy_state::<SharedLists>(), cache.int_state(PROMPT))
        else {
            return Ok(None);
        };
        let counts = Self::retrievals(cache)?;
        let prompts = read_i32("prompts", prompts.clone())?;
        let lengths = cache.layout().lengths();
        let mut reads =
            Reads { retrieved: counts.iter().sum::<usize>() as u64, ..Reads::default() };
        for (row, prompt) in prompts.iter().enumerate() {
            let of = |all: usize| row * all / prompts.len()..(row + 1) * all / prompts.len();
            let length = lengths[of(lengths.len()).start];
            let steps = length.saturating_sub(*prompt as usize) as u64;
            let own = &rows[of(rows.len())];
            reads.steps += steps * of(counts.len()).len() as u64;
            reads.slots += steps * own.iter().map(|row| row.len() as u64).sum::<u64>();
        }
        Ok(Some(reads))
    }

    /// The policy from its configuration.
    pub(crate) fn from_config(config: &mut Config) -> Result<Arc<dyn Policy>> {
        let policy = config.take_budgeted(NAME, Self::new)?;
        Ok(Arc::new(policy.validated()?))
    }
}

impl Policy for HShare {
    fn name(&self) -> &'static str {
        NAME
    }

    fn config(&self) -> serde_json::Value {
        config_of(NAME, self)
    }

    fn budget(&self) -> Option<Budget> {
        Some(self.budget)
    }

    /// Steps read a part of the prompt; all of it is kept.
    fn least_kept(&self, tokens: usize) -> usize {
        tokens
    }

    fn needs(&self) -> Needs {
        Needs { window: self.window, ..Needs::default() }
    }

    fn select(&self, observation: &Observation<'_>) -> Result<Plan> {
        check_countable(NAME, observation.tokens())?;
        self.parts(self.budget.behind(observation.tokens()))?;
        Ok(Plan::whole(observation))
    }

    /// A layer by itself: its heads share, layers do not.
    fn init_cache(
        &self,
        cache: &mut LayerCache,
        observation: &Observation<'_>,
        _selection: &Selection,
    ) -> Result<()> {
        if observation.layer.index < self.dense_layers {
            return Ok(());
        }
        let shares = self.shares(observation)?;
        self.install(cache, observation, &shares, &shares.heads, None)
    }

    fn restore(&self, cache: &mut LayerCache) -> Result<()> {
        cache.states_to_ints(&[SOURCES, PROMPT, BUDGETS, CHANNELS]);
        Ok(cache.restore_state::<SharedLists>()?)
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            needs_all_layers: self.layers < 1.0,
            changes_decode: true,
            reads_other_layers: true,
            compares_heads: true,
            ..Capabilities::default()
        }
    }

    fn prefill_layers(
        &self,
        layers: &[OwnedObservation],
        new_tokens: usize,
        options: CacheOptions,
    ) -> Result<Vec<LayerCache>> {
        self.prefill_together(layers, new_tokens, &options)
    }

    fn plan(&self, layer: LayerContext, cache: &LayerCache) -> Result<StepPlan<'_>> {
        let Some(own) = layer.index.checked_sub(self.dense_layers) else {
            return Ok(StepPlan::append());
        };
        let reads_others = int_state(NAME, cache, SOURCES)?.dims()[2] == 2;
        let plan = StepPlan::attend_with(move |cache, query, step| {
            let list = self.list(layer, cache, &query, step)?;
            Ok(list.attend(cache, query)?.output)
        });
        Ok(StepPlan { turn: reads_others.then_some(own), ..plan })
    }
}

impl HShare {
    /// The lists that a step's heads read: their own lists, or other heads' lists.
    fn list(
        &self,
        layer: LayerContext,
        cache: &mut LayerCache,
        query: &Tensor<3>,
        step: &Step,
    ) -> Result<SlotList> {
        let [channels, budgets, sources] = [
            int_state(NAME, cache, CHANNELS)?,
            int_state(NAME, cache, BUDGETS)?,
            int_state(NAME, cache, SOURCES)?,
        ];
        let mut board = step.board.lock().unwrap_or_else(PoisonError::into_inner);
        let reads_others = sources.dims()[2] == 2;
        let sharing = Sharing {
            layer: layer.index - self.dense_layers,
            layers: layer.count - self.dense_layers,
            period: self.period(),
            board: reads_others.then_some(&mut *board),
        };
        let ends = self.most_ends(cache)?;
        let parts = [&channels, &budgets, &sources];
        Ok(SharedLists::choose(cache, query.clone(), parts, ends, sharing)?)
    }

    /// Sinks and recents together, at most.
    fn most_ends(&self, cache: &LayerCache) -> Result<usize> {
        let parts = self.parts(self.budget.behind(cache.layout().most_capacity().max(1)))?;
        Ok(parts.sinks + parts.recents)
    }
}
