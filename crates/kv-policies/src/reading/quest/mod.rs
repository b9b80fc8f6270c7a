//! Quest (<https://arxiv.org/abs/2406.10774>): decode steps attend to the pages of slots that may
//! matter most, by bounds of their keys. `Quest::list` is the step's choice; [`pages`] keeps the
//! bounds.

mod pages;

use std::sync::Arc;

use burn::tensor::{Bool, Int, Tensor};
use kv_core::{Budget, LayerCache, Selection, counted};
use kv_kernels::{NO_SLOT, PageHeads, PageOptions};
use serde::{Deserialize, Serialize};

pub use pages::PageBounds;

use crate::policy::check::Check;
use crate::policy::config::{Config, config_of, invalid};
use crate::policy::lists::SlotList;
use crate::policy::notice::warn_once;
use crate::policy::spelling;
use crate::policy::state_tensors::{int_numbers, int_state};
use crate::reading::subset::{BUDGETS, set_budgets};
use crate::{
    Capabilities, LayerContext, Needs, Observation, Policy, PolicyError, Result, StepPlan,
};

const NAME: &str = "quest";
/// State of each sequence's slots of a page, `[B, 1, 1]`.
const PAGE: &str = "page";
/// Pages that a budget holds at least, where pages are fitted to it: the last one, and three that
/// are chosen, which the authors' evaluation reads at least.
const LEAST_PAGES: usize = 4;

/// Quest (Tang et al., 2024, section 3.2): the whole cache stays, in pages of consecutive slots,
/// with the minimum and the maximum of each channel of a page's keys. A decode step attends to the
/// pages of the highest `sum_d max(q_d min_d, q_d max_d)`, which no product with a key of the page
/// exceeds. The first layers attend to everything, and so do all layers while a prompt is read.
///
/// A budget of one or two pages leaves nothing to choose: the last page takes one. So pages are
/// halved until the budget holds 4 of them (`fit_page`).
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Quest {
    /// Tokens attended to per head, in whole pages.
    pub budget: Budget,
    /// Slots of a page.
    pub page: usize,
    /// Whether pages are halved until a sequence's budget holds 4 of them; `false` is the paper's
    /// form.
    pub fit_page: bool,
    /// Which heads choose pages: every query head for itself, as in the paper, or the query heads
    /// of a group together.
    #[serde(with = "spelling::Choosers")]
    pub heads: PageHeads,
    /// How the last page is read.
    pub last_page: LastPage,
    /// First layers that attend to everything.
    pub dense_layers: usize,
}

/// How the last page is read, which may not be full.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LastPage {
    /// It is read in any case, as one of the budget's pages, as in the authors' kernels.
    #[default]
    Always,
    /// It is scored like other pages, and at least three pages are read, as in the authors'
    /// evaluation.
    Scored,
}

impl Quest {
    /// The paper's page size, fitted to the budget; its evaluation reads the first two layers
    /// whole.
    pub fn new(budget: Budget) -> Self {
        let (heads, last_page) = (PageHeads::Query, LastPage::Always);
        Self { budget, page: 16, fit_page: true, heads, last_page, dense_layers: 2 }
    }

    /// # Errors
    /// [`PolicyError::InvalidConfig`] for pages of no slots, and for budgets below a page that is
    /// not fitted.
    pub fn validate(&self) -> Result<()> {
        self.budget.validate()?;
        let page = self.page;
        Check(NAME).positive("page", page)?;
        match self.budget {
            Budget::Tokens(tokens) if tokens < page && !self.fit_page => {
                let reason = format!(
                    "a budget of {tokens} tokens is below a page, expected at least {page}"
                );
                Err(invalid(NAME, reason))
            }
            _ => Ok(()),
        }
    }

    /// The slots of a page under a budget of `tokens` tokens, and the tokens to read: at least one
    /// page, where a share of a short prompt is less.
    fn fitted(&self, tokens: usize) -> [usize; 2] {
        let mut page = self.page;
        while self.fit_page && page > 1 && tokens / page < LEAST_PAGES {
            page /= 2;
        }
        if page < self.page {
            let own = self.page;
            warn_once(NAME, "fitted page", || {
                format!(
                    "a budget of {tokens} tokens holds fewer than {LEAST_PAGES} pages of {own}: \
                     its pages have {page} (`fit_page`)"
                )
            });
        }
        if tokens < page {
            warn_once(NAME, "page", || {
                let tokens = counted(tokens, "token");
                format!("a budget of {tokens} is below a page: it reads a page of {page}")
            });
        }
        [page, tokens.max(page)]
    }

    /// The list of slots that each query reads. Where sequences of a batch have pages of different
    /// sizes, each sequence has the list of its own size.
    fn list(&self, cache: &LayerCache, query: &Tensor<3>) -> Result<SlotList> {
        let budgets = int_state(NAME, cache, BUDGETS)?;
        let most = self.budget.resolve(cache.layout().most_capacity());
        let choose = |page: usize| {
            let (query, most) = (query.clone(), most.max(page));
            let list = PageBounds::choose(cache, query, &budgets, most, self.options(page));
            list.map_err(PolicyError::from)
        };
        let mut sizes = PageBounds::sizes(cache).into_iter();
        let first = sizes.next().unwrap_or(self.page);
        sizes.try_fold(choose(first)?, |list, page| {
            let rows = list.counts.dims()[0];
            let batch = cache.layout().batch();
            let own = int_state(NAME, cache, PAGE)?.equal_elem(page as i32).reshape([batch, 1]);
            let own = own.expand([batch, rows / batch.max(1)]).reshape([rows]);
            Ok(either(own, choose(page)?, list))
        })
    }

    fn options(&self, page: usize) -> PageOptions {
        PageOptions { page, heads: self.heads, always_last: self.last_page == LastPage::Always }
    }

    /// The policy from its configuration.
    pub(crate) fn from_config(config: &mut Config) -> Result<Arc<dyn Policy>> {
        let policy = config.take_budgeted(NAME, Self::new)?;
        policy.validate()?;
        Ok(Arc::new(policy))
    }
}

/// The rows of `list` where `own` is true, the rows of `other` elsewhere.
fn either(own: Tensor<1, Bool>, list: SlotList, other: SlotList) -> SlotList {
    let [rows] = list.counts.dims();
    let width = list.slots.dims()[1].max(other.slots.dims()[1]);
    let filled = |slots: Tensor<2, Int>| {
        let missing = width - slots.dims()[1];
        if missing == 0 {
            return slots;
        }
        let none = Tensor::full([rows, missing], NO_SLOT, (&slots.device(), slots.dtype()));
        Tensor::cat(vec![slots, none], 1)
    };
    let wide = own.clone().unsqueeze_dim::<2>(1).expand([rows, width]);
    SlotList {
        slots: filled(other.slots).mask_where(wide, filled(list.slots)),
        counts: other.counts.mask_where(own, list.counts),
    }
}

impl Policy for Quest {
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

    /// One query, whose shape has the number of query heads.
    fn needs(&self) -> Needs {
        Needs { window: 1, ..Needs::default() }
    }

    fn init_cache(
        &self,
        cache: &mut LayerCache,
        observation: &Observation<'_>,
        _selection: &Selection,
    ) -> Result<()> {
        if observation.layer.index < self.dense_layers {
            return Ok(());
        }
        let heads = match self.heads {
            PageHeads::Query => observation.last_queries(NAME, 1)?.dims()[1],
            PageHeads::Max | PageHeads::Mean => cache.layout().kv_heads(),
        };
        let [page, tokens] = self.fitted(self.budget.behind(observation.tokens()));
        set_budgets(cache, heads, [tokens, 0, 0]);
        let batch = cache.layout().batch();
        let pages = int_numbers(vec![page; batch], [batch, 1, 1], &cache.options().device);
        cache.set_int_state(PAGE, pages);
        Ok(PageBounds::keep(cache, page)?)
    }

    fn restore(&self, cache: &mut LayerCache) -> Result<()> {
        cache.states_to_ints(&[BUDGETS, PAGE]);
        Ok(cache.restore_state::<PageBounds>()?)
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { changes_decode: true, ..Capabilities::default() }
    }

    fn plan(&self, layer: LayerContext, _cache: &LayerCache) -> Result<StepPlan<'_>> {
        if layer.index < self.dense_layers {
            return Ok(StepPlan::append());
        }
        Ok(StepPlan::attend_with(|cache, query, _| {
            PageBounds::update(cache)?;
            let list = self.list(cache, &query)?;
            Ok(list.attend(cache, query)?.output)
        }))
    }
}
