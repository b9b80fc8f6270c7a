use burn::tensor::Tensor;
use kv_core::{Budget, LayerCache, PageHeads, PageOptions, Selection, counted};
use serde::{Deserialize, Serialize};

use crate::notice::warn_once;
use crate::subset::{BUDGETS, dense, most_tokens, set_budgets, state, tokens_of};
use crate::{LayerContext, Needs, Observation, Plan, Policy, PolicyError, Result, Step};

const NAME: &str = "quest";

/// Quest (Tang et al., 2024, section 3.2): the whole cache stays, in pages of consecutive slots,
/// with the minimum and the maximum of each channel of a page's keys. A decode step attends to the
/// pages of the highest `sum_d max(q_d min_d, q_d max_d)`, which no product with a key of the page
/// exceeds. The first layers attend to everything, and so do all while a prompt is read.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Quest {
    /// Tokens attended to per head, in whole pages.
    pub budget: Budget,
    /// Slots of a page.
    #[serde(default = "sixteen")]
    pub page: usize,
    /// Who chooses pages.
    #[serde(default)]
    pub heads: Choosers,
    /// What becomes of the last page.
    #[serde(default)]
    pub last_page: LastPage,
    /// First layers that attend to everything.
    #[serde(default = "two")]
    pub dense_layers: usize,
}

/// Who chooses pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Choosers {
    /// Every query head for itself, as in the paper.
    #[default]
    Query,
    /// The query heads of a group together, by the highest of their scores.
    Max,
    /// The query heads of a group together, by the mean of their scores.
    Mean,
}

/// What becomes of the last page, which may not be full.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LastPage {
    /// It is read in any case, as one of the budget's pages: the authors' kernels.
    #[default]
    Always,
    /// It is scored like the others, and three pages are read at least: their evaluation.
    Scored,
}

fn sixteen() -> usize {
    16
}

fn two() -> usize {
    2
}

impl Quest {
    /// # Errors
    /// [`PolicyError::InvalidConfig`] for pages of no slots, and for budgets below a page.
    pub fn validate(&self) -> Result<()> {
        self.budget.validate()?;
        let invalid = |reason| Err(PolicyError::InvalidConfig { policy: NAME.into(), reason });
        if self.page == 0 {
            return invalid("`page` is 0, expected at least 1".into());
        }
        match self.budget {
            Budget::Tokens(tokens) if tokens < self.page => invalid(format!(
                "a budget of {} is below a page, expected at least {}",
                counted(tokens, "token"),
                self.page
            )),
            _ => Ok(()),
        }
    }

    /// What a budget has come to: at least a page, where a share of a short prompt is less.
    fn whole_page(&self, tokens: usize) -> usize {
        let page = self.page;
        if tokens < page {
            warn_once(NAME, "page", || {
                let tokens = counted(tokens, "token");
                format!("a budget of {tokens} is below a page: it reads a page of {page}")
            });
        }
        tokens.max(page)
    }

    fn options(&self) -> PageOptions {
        PageOptions {
            page: self.page,
            heads: match self.heads {
                Choosers::Query => PageHeads::Query,
                Choosers::Max => PageHeads::Max,
                Choosers::Mean => PageHeads::Mean,
            },
            always_last: self.last_page == LastPage::Always,
        }
    }
}

impl Policy for Quest {
    fn name(&self) -> &'static str {
        NAME
    }

    fn config(&self) -> serde_json::Value {
        crate::registry::config_of(NAME, self)
    }

    /// One query, which says how many heads there are.
    fn needs(&self) -> Needs {
        Needs { window: 1, ..Needs::default() }
    }

    fn select(&self, observation: &Observation<'_>) -> Result<Plan> {
        let [batch, kv_heads, tokens, _] = observation.dims();
        Ok(Selection::all(batch * kv_heads, tokens).into())
    }

    fn prime(
        &self,
        cache: &mut LayerCache,
        observation: &Observation<'_>,
        _selection: &Selection,
    ) -> Result<()> {
        if observation.layer.index < self.dense_layers {
            return Ok(());
        }
        let heads = match self.heads {
            Choosers::Query => observation.last_queries(NAME, 1)?.dims()[1],
            Choosers::Max | Choosers::Mean => cache.layout().kv_heads(),
        };
        let tokens = self.whole_page(tokens_of(self.budget, observation));
        set_budgets(cache, heads, [tokens, 0, 0]);
        Ok(cache.set_pages(self.page)?)
    }

    fn changes_decode(&self) -> bool {
        true
    }

    fn records(&self, cache: &LayerCache) -> bool {
        !cache.options().growable
    }

    fn attend_appended(
        &self,
        layer: LayerContext,
        cache: &mut LayerCache,
        query: Tensor<3>,
        _step: &Step,
    ) -> Result<Tensor<3>> {
        if layer.index < self.dense_layers {
            return dense(cache, query);
        }
        cache.update_page()?;
        let budgets = state(NAME, cache, BUDGETS)?;
        let most = most_tokens(self.budget, cache).max(self.page);
        let list = cache.choose_pages(query.clone(), &budgets, most, self.options())?;
        Ok(cache.attend_listed(query, list)?.output)
    }
}
