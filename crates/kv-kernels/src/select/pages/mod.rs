//! Quest's pages: the bounds of the keys of every page of slots, upper bounds of a query's logits
//! in each page, and the slots of the chosen pages.

mod args;
mod backend;
#[cfg(feature = "gpu")]
mod kernel;
#[cfg(feature = "gpu")]
mod launch;
mod reference;

use burn::backend::Dispatch;
use burn::tensor::{Int, Tensor};

use crate::backend::check::Check;
use crate::select::scored_rows::BUDGETS;
use crate::{KernelError, ScoredRows, SlotRanges};
use args::{PageBoundsArgs, PageScoresArgs, PageSlotsArgs};
use backend::PagesOps;

const BOUNDS: &str = "page_bounds";
const SCORES: &str = "page_scores";
const SLOTS: &str = "page_slots";

/// The pages whose bounds are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PageSpan {
    /// All pages of all ranges.
    All {
        /// An upper bound of the slots of a range.
        longest: usize,
    },
    /// Each range's last page.
    Last,
}

/// Which query heads choose their pages together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum PageHeads {
    /// Every query head chooses for itself.
    #[default]
    Query,
    /// The query heads of a group choose together, by their highest score of a page.
    Max,
    /// The query heads of a group choose together, by their mean score of a page.
    Mean,
}

/// How pages are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageOptions {
    /// Slots of a page.
    pub page: usize,
    /// Which query heads choose together.
    pub heads: PageHeads,
    /// Whether the last page is always read. It counts in the budget, and is not scored.
    pub always_last: bool,
}

/// Rows of bounds for a pool of `slots` slots in `total_kv_heads` ranges. Page `i` of range `p`,
/// whose first slot is `o`, has its minima in row `2 (o / page + p + i)` and its maxima in the row
/// after it.
pub fn page_rows(slots: usize, total_kv_heads: usize, page: usize) -> usize {
    2 * (slots / page + total_kv_heads + 1)
}

/// Writes the minima and maxima of the keys of pages, channel by channel, in place.
///
/// # Shapes
/// `keys` `[S, D]`; `bounds` `[page_rows(S, B * Hkv, page), D]`, of the keys' dtype; `ranges`
/// `[B, Hkv]`.
///
/// # Errors
/// [`KernelError`] where shapes, dtypes or devices do not fit.
pub fn page_bounds(
    keys: &Tensor<2>,
    ranges: &SlotRanges,
    bounds: &mut Tensor<2>,
    page: usize,
    span: PageSpan,
) -> Result<(), KernelError> {
    let check = Check::new(BOUNDS, keys);
    check.supported()?;
    check.float("keys", keys)?;
    check.filled("keys", keys)?;
    check.counted("keys", keys)?;
    let ([slots, head_dim], [batch, kv_heads]) = (keys.dims(), ranges.offsets.dims());
    check.ranges(ranges, batch, kv_heads)?;
    check_page(&check, page)?;
    let rows = page_rows(slots, batch * kv_heads, page);
    check.shape("bounds", bounds, &[rows, head_dim])?;
    check.same_dtype("bounds", bounds, "the keys' dtype", keys.dtype())?;
    let pages = match span {
        PageSpan::All { longest } => longest.min(slots).div_ceil(page),
        PageSpan::Last => 1,
    };
    if pages == 0 {
        return Ok(());
    }
    let args = PageBoundsArgs {
        keys: keys.clone().into_dispatch(),
        offsets: ranges.offsets.clone().into_dispatch(),
        lengths: ranges.lengths.clone().into_dispatch(),
        bounds: check.take(bounds).into_dispatch(),
        page,
        pages,
        last: span == PageSpan::Last,
    };
    *bounds = Tensor::from_dispatch(<Dispatch as PagesOps>::page_bounds(args));
    Ok(())
}

/// An upper bound of a query's products with the keys of each page, `sum_d max(q_d min_d, q_d
/// max_d)`: Quest (Tang et al., 2024), section 3.2.
///
/// A budget of `n` tokens wants `n / page` pages, but at least 3; or at least 1 with
/// [`PageOptions::always_last`], where the last page is one of them. A range of at most `n` slots
/// wants all its pages.
///
/// # Shapes
/// `query` `[B, Hq, D]`; `bounds` as in [`page_bounds`]; `budgets` `[B, H, 3]`, 32-bit, tokens
/// first, with `H = Hq`, or `H = Hkv` where a group chooses together; `pages` is the most pages of
/// a range. In the result, `R` is `B * H`.
///
/// # Errors
/// [`KernelError`] where shapes, dtypes or devices do not fit.
pub fn page_scores(
    query: Tensor<3>,
    bounds: &Tensor<2>,
    ranges: &SlotRanges,
    budgets: &Tensor<3, Int>,
    pages: usize,
    options: PageOptions,
) -> Result<ScoredRows, KernelError> {
    let check = Check::new(SCORES, &query);
    check.supported()?;
    check.float("query", &query)?;
    check.filled("query", &query)?;
    let ([batch, heads, head_dim], [_, kv_heads]) = (query.dims(), ranges.offsets.dims());
    check.ranges(ranges, batch, kv_heads)?;
    check_page(&check, options.page)?;
    if kv_heads == 0 || heads % kv_heads != 0 {
        return Err(KernelError::HeadGroups { op: SCORES, query_heads: heads, kv_heads });
    }
    check.shape("bounds", bounds, &[bounds.dims()[0], head_dim])?;
    check.same_dtype("bounds", bounds, "the query's dtype", query.dtype())?;
    if pages == 0 {
        return Err(check.unsupported("pages", 0, "at least 1"));
    }
    let rows = if options.heads == PageHeads::Query { heads } else { kv_heads };
    check.shape("budgets", budgets, &[batch, rows, BUDGETS])?;
    check.int("budgets", budgets)?;
    let scored = <Dispatch as PagesOps>::page_scores(PageScoresArgs {
        query: query.into_dispatch(),
        bounds: bounds.clone().into_dispatch(),
        offsets: ranges.offsets.clone().into_dispatch(),
        lengths: ranges.lengths.clone().into_dispatch(),
        budgets: budgets.clone().into_dispatch(),
        pages,
        options,
    });
    Ok(scored.into())
}

/// The slots of chosen pages, and with `always_last` of each range's last page. Returns slots in
/// order, `[R, W]`, 32-bit, with `-1` after the last, and the number of each row's slots, `[R]`.
///
/// # Shapes
/// `pages` `[R, M]`, 32-bit, ascending, of which the first `found` `[R]` count; `ranges` `[B,
/// Hkv]`, with `R` a multiple of `B * Hkv`. `W` is `M * page`, or `(M + 1) * page` with
/// `always_last`.
///
/// # Errors
/// [`KernelError`] where shapes, dtypes or devices do not fit.
pub fn page_slots(
    pages: Tensor<2, Int>,
    found: Tensor<1, Int>,
    ranges: &SlotRanges,
    page: usize,
    always_last: bool,
) -> Result<(Tensor<2, Int>, Tensor<1, Int>), KernelError> {
    let check = Check::new(SLOTS, &pages);
    check.supported()?;
    check.int("pages", &pages)?;
    check.filled("pages", &pages)?;
    let ([rows, _], [batch, kv_heads]) = (pages.dims(), ranges.offsets.dims());
    check.shape("found", &found, &[rows])?;
    check.int("found", &found)?;
    check.ranges(ranges, batch, kv_heads)?;
    check_page(&check, page)?;
    if batch * kv_heads == 0 || !rows.is_multiple_of(batch * kv_heads) {
        return Err(check.unsupported("rows", rows, "a multiple of the ranges"));
    }
    let (slots, counts) = <Dispatch as PagesOps>::page_slots(PageSlotsArgs {
        pages: pages.into_dispatch(),
        found: found.into_dispatch(),
        offsets: ranges.offsets.clone().into_dispatch(),
        lengths: ranges.lengths.clone().into_dispatch(),
        page,
        always_last,
    });
    Ok((Tensor::from_dispatch(slots), Tensor::from_dispatch(counts)))
}

fn check_page(check: &Check, page: usize) -> Result<(), KernelError> {
    if page == 0 { Err(check.unsupported("page", 0, "at least 1 slot")) } else { Ok(()) }
}
