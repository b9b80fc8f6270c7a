//! Bounds of the keys of every page of slots, and the pages that a query may attend to most.

use burn::tensor::{Device, Int, Tensor};
use kv_core::{
    CacheOptions, Error, HostState, LayerCache, LoadState, PolicyState, Result, SavedState,
    StateBytes, packed, states_of, zero_rows,
};
use kv_kernels::{
    Choice, PageOptions, PageSpan, page_bounds, page_rows, page_scores, page_slots, top_slots,
};

use crate::policy::lists::{SlotList, missing};

/// Minima and maxima of the keys of every page of slots.
#[derive(Debug)]
struct Pages {
    /// Slots of a page.
    page: usize,
    /// Bounds in the layout of [`page_bounds`].
    bounds: Tensor<2>,
}

impl Pages {
    fn to_device(&self, device: &Device) -> Self {
        Self { page: self.page, bounds: packed(self.bounds.clone().to_device(device)) }
    }

    /// Bytes on the device.
    fn bytes(&self) -> usize {
        self.bounds.dims().iter().product::<usize>() * self.bounds.dtype().size()
    }
}

impl Clone for Pages {
    /// A copy: bounds are written in place.
    fn clone(&self) -> Self {
        Self { page: self.page, bounds: packed(self.bounds.clone().mul_scalar(1.0)) }
    }
}

impl Pages {
    /// Bounds of all pages of a cache.
    fn of(cache: &LayerCache, page: usize) -> Result<Self> {
        let rows =
            page_rows(cache.positions().dims()[0], cache.layout().head_ranges(), page.max(1));
        let CacheOptions { device, dtype, .. } = cache.options();
        let mut bounds = zero_rows(rows, cache.head_dim(), device, *dtype);
        let span = PageSpan::All { longest: cache.layout().most_capacity() };
        page_bounds(cache.keys(), cache.ranges(), &mut bounds, page, span)?;
        Ok(Self { page, bounds })
    }
}

/// Bounds of the keys of a cache's pages. Sequences of a batch may have pages of different sizes:
/// there are bounds of the pages of every size.
#[derive(Debug, Clone, Default)]
pub struct PageBounds(Vec<Pages>);

impl PageBounds {
    /// Keeps bounds of the keys of every `page` slots of a cache from now on, beside the bounds of
    /// other page sizes; steps update them by [`Self::update`].
    ///
    /// # Errors
    /// The errors of [`page_bounds`].
    pub fn keep(cache: &mut LayerCache, page: usize) -> Result<()> {
        let pages = Pages::of(cache, page)?;
        let mut all = cache.take_policy_state::<Self>().unwrap_or_default();
        match all.0.iter_mut().find(|own| own.page == page) {
            Some(own) => *own = pages,
            None => all.0.push(pages),
        }
        cache.insert_policy_state(all);
        Ok(())
    }

    /// Slots of a page, one number for each size of pages that a cache has bounds of.
    pub fn sizes(cache: &LayerCache) -> Vec<usize> {
        let all = cache.policy_state::<Self>();
        all.map(|all| all.0.iter().map(|pages| pages.page).collect()).unwrap_or_default()
    }

    /// Brings the bounds of each head's last pages up to date, in place, after a token was
    /// appended.
    ///
    /// # Errors
    /// [`Error::InvalidPlan`] for caches without pages.
    pub fn update(cache: &mut LayerCache) -> Result<()> {
        let updated = cache.with_policy_state(|all: &mut Self, cache| {
            let (keys, ranges) = (cache.keys(), cache.ranges());
            all.0.iter_mut().try_for_each(|Pages { page, bounds }| {
                page_bounds(keys, ranges, bounds, *page, PageSpan::Last)
            })
        });
        Ok(updated.ok_or_else(|| missing("pages"))??)
    }

    /// The slots of the pages that each head's query may attend to most, as [`page_scores`] says;
    /// `tokens` is the most that any budget has.
    ///
    /// # Shapes
    /// `query` `[B, Hq, D]`; `budgets` `[B, H, 3]`, 32-bit.
    ///
    /// # Errors
    /// [`Error::InvalidPlan`] for caches without pages of this size, [`Error::Kernel`].
    pub fn choose(
        cache: &LayerCache,
        query: Tensor<3>,
        budgets: &Tensor<3, Int>,
        tokens: usize,
        options: PageOptions,
    ) -> Result<SlotList> {
        let PageOptions { page, always_last, .. } = options;
        let pages = cache.policy_state::<Self>();
        let pages = pages.and_then(|all| all.0.iter().find(|pages| pages.page == page));
        let bounds = &pages.ok_or_else(|| missing("pages of this size"))?.bounds;
        let all = cache.layout().most_capacity().div_ceil(page).max(1);
        let ranges = cache.ranges();
        let scored = page_scores(query, bounds, ranges, budgets, all, options)?;
        // At least three pages are read whatever the budget, and at most the pages of a head range.
        let most = tokens.div_ceil(page).max(3).min(all);
        let choice = Choice::Top(scored.wanted);
        let chosen = top_slots(scored.scores, Some(scored.candidates), choice, most)?;
        let (indices, found) = (chosen.indices, chosen.counts);
        let (slots, counts) = page_slots(indices, found, ranges, page, always_last)?;
        Ok(SlotList { slots, counts })
    }
}

impl PolicyState for PageBounds {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn copied(&self) -> Option<Box<dyn PolicyState>> {
        Some(Box::new(self.clone()))
    }

    fn to_device(&self, device: &Device) -> Option<Box<dyn PolicyState>> {
        Some(Box::new(Self(self.0.iter().map(|pages| pages.to_device(device)).collect())))
    }

    /// Pages of every size that any of the caches has. Their bounds are made where the batch's
    /// slots are there.
    fn joined(&self, others: &[&dyn PolicyState]) -> Result<Box<dyn PolicyState>> {
        let mut joined = Self::default();
        for pages in states_of::<Self>(self, others)?.into_iter().flat_map(|own| &own.0) {
            if joined.0.iter().all(|own| own.page != pages.page) {
                joined.0.push(pages.clone());
            }
        }
        joined.0.sort_by_key(|pages| pages.page);
        Ok(Box::new(joined))
    }

    /// The sizes alone: bounds follow from the keys.
    fn to_host(&self) -> Result<Option<HostState>> {
        let sizes: Vec<usize> = self.0.iter().map(|pages| pages.page).collect();
        let saved = SavedState::of::<Self>(sizes.into(), Default::default());
        Ok(Some(HostState::Saved(saved)))
    }

    fn bytes(&self, _cache: &LayerCache) -> StateBytes {
        let device = self.0.iter().map(Pages::bytes).sum();
        StateBytes { device, ..StateBytes::default() }
    }

    fn slots_moved(&mut self, cache: &LayerCache) -> Result<()> {
        for pages in &mut self.0 {
            *pages = Pages::of(cache, pages.page)?;
        }
        Ok(())
    }
}

impl LoadState for PageBounds {
    const NAME: &'static str = "pages";

    fn load(saved: SavedState, cache: &LayerCache, _seen: &[usize]) -> Result<Self> {
        let invalid = |reason: String| Error::InvalidPlan { what: "pages", reason };
        let sizes: Vec<usize> =
            serde_json::from_value(saved.header).map_err(|error| invalid(error.to_string()))?;
        if sizes.contains(&0) {
            return Err(invalid("pages of 0 slots".into()));
        }
        let pages = sizes.into_iter().map(|page| Pages::of(cache, page));
        Ok(Self(pages.collect::<Result<_>>()?))
    }
}
