//! Bounds of the keys of every page of slots, and the pages that a query may attend to most.

use burn::tensor::{Device, Tensor};
use kv_kernels::{
    Choice, PageOptions, PageSpan, page_bounds, page_rows, page_scores, page_slots, top_slots,
};

use super::SlotList;
use super::listed::missing;
use crate::tensors::{packed, zero_rows};
use crate::{CacheOptions, LayerCache, Result};

/// Minima and maxima of the keys of every page of slots.
#[derive(Debug)]
pub(crate) struct Pages {
    /// Slots of a page.
    pub(crate) page: usize,
    /// As [`page_bounds`] has them.
    pub(crate) bounds: Tensor<2>,
}

impl Pages {
    pub(super) fn to_device(&self, device: &Device) -> Self {
        Self { page: self.page, bounds: packed(self.bounds.clone().to_device(device)) }
    }

    /// Bytes on the device.
    pub(crate) fn bytes(&self) -> usize {
        self.bounds.dims().iter().product::<usize>() * self.bounds.dtype().size()
    }
}

impl Clone for Pages {
    /// A copy: bounds are written in place.
    fn clone(&self) -> Self {
        Self { page: self.page, bounds: packed(self.bounds.clone().mul_scalar(1.0)) }
    }
}

impl LayerCache {
    /// Keeps bounds of the keys of every `page` slots from now on, beside those of pages of other
    /// sizes; steps bring them up to date by [`Self::update_pages`].
    ///
    /// # Errors
    /// Those of [`page_bounds`].
    pub fn set_pages(&mut self, page: usize) -> Result<()> {
        let rows = page_rows(self.slots(), self.layout.pairs(), page.max(1));
        let CacheOptions { device, dtype, .. } = &self.options;
        let mut bounds = zero_rows(rows, self.head_dim(), device, *dtype);
        let span = PageSpan::All { longest: self.longest_capacity() };
        page_bounds(&self.keys, &self.ranges, &mut bounds, page, span)?;
        match self.pages.iter_mut().find(|pages| pages.page == page) {
            Some(pages) => pages.bounds = bounds,
            None => self.pages.push(Pages { page, bounds }),
        }
        Ok(())
    }

    /// Slots of a page, one number for each size of pages that the cache keeps bounds of.
    pub fn page_sizes(&self) -> Vec<usize> {
        self.pages.iter().map(|pages| pages.page).collect()
    }

    /// Brings the bounds of each head's last pages up to date, in place, after a token was
    /// appended.
    ///
    /// # Errors
    /// [`crate::Error::InvalidPlan`] for caches without pages.
    pub fn update_pages(&mut self) -> Result<()> {
        if self.pages.is_empty() {
            return Err(missing("pages"));
        }
        for Pages { page, bounds } in &mut self.pages {
            page_bounds(&self.keys, &self.ranges, bounds, *page, PageSpan::Last)?;
        }
        Ok(())
    }

    /// The slots of the pages that each head's query may attend to most, as [`page_scores`] says;
    /// `tokens` is the most that any budget has.
    ///
    /// # Shapes
    /// `query` `[B, Hq, D]`; `budgets` `[B, H, 3]`, f32.
    ///
    /// # Errors
    /// [`crate::Error::InvalidPlan`] for caches without pages of this size,
    /// [`crate::Error::Kernel`].
    pub fn choose_pages(
        &self,
        query: Tensor<3>,
        budgets: &Tensor<3>,
        tokens: usize,
        options: PageOptions,
    ) -> Result<SlotList> {
        let PageOptions { page, always_last, .. } = options;
        let pages = self.pages.iter().find(|pages| pages.page == page);
        let bounds = &pages.ok_or_else(|| missing("pages of this size"))?.bounds;
        let all = self.longest_capacity().div_ceil(page).max(1);
        let scored = page_scores(query, bounds, &self.ranges, budgets, all, options)?;
        // Three pages are read whatever the budget, and all of a range that it holds.
        let most = tokens.div_ceil(page).max(3).min(all);
        let choice = Choice::Top(scored.wanted);
        let chosen = top_slots(scored.scores, Some(scored.candidates), choice, most)?;
        let (indices, found) = (chosen.indices, chosen.counts);
        let (slots, counts) = page_slots(indices, found, &self.ranges, page, always_last)?;
        Ok(SlotList { slots, counts })
    }

    /// Slots that the longest head has room for.
    pub(super) fn longest_capacity(&self) -> usize {
        self.layout.capacities().iter().max().copied().unwrap_or_default()
    }

    /// Makes the bounds of pages anew, if the cache keeps them, after slots have moved.
    pub(crate) fn renew_pages(&mut self) -> Result<()> {
        self.page_sizes().into_iter().try_for_each(|page| self.set_pages(page))
    }
}
