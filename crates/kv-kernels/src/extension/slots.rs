//! Slots: copied, dropped, chosen, written.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType, backend_extension};

use crate::argmin_slots::Protection;
use crate::reading::Reading;

/// A cache's tensors, written in place.
#[derive(ExtensionType)]
pub(crate) struct SlotPools<B: Backend> {
    /// `[S, D]`
    pub(crate) keys: FloatTensor<B>,
    /// `[S, D]`
    pub(crate) values: FloatTensor<B>,
    /// `[S]`
    pub(crate) positions: IntTensor<B>,
    /// `[S]` where `weighted`.
    pub(crate) log_weights: FloatTensor<B>,
    /// Whether there are weights.
    pub(crate) weighted: bool,
}

/// Lists of kept slots, as [`crate::KeepLists`] has them.
#[derive(ExtensionType)]
pub(crate) struct Lists<B: Backend> {
    pub(crate) kept: IntTensor<B>,
    pub(crate) starts: IntTensor<B>,
    pub(crate) counts: IntTensor<B>,
    pub(crate) most: usize,
}

/// One victim a range, `[B, Hkv]` each.
#[derive(ExtensionType)]
pub(crate) struct Drops<B: Backend> {
    pub(crate) offsets: IntTensor<B>,
    pub(crate) lengths: IntTensor<B>,
    pub(crate) victims: IntTensor<B>,
    /// 0 where nothing goes.
    pub(crate) goes: IntTensor<B>,
}

/// Up to [`SCALARS`] pools of one number a slot, written in place, as an extension takes no lists;
/// those from `count` on are any tensor.
#[derive(ExtensionType)]
pub(crate) struct Scalars<B: Backend> {
    pub(crate) first: FloatTensor<B>,
    pub(crate) second: FloatTensor<B>,
    pub(crate) third: FloatTensor<B>,
    pub(crate) fourth: FloatTensor<B>,
    pub(crate) fifth: FloatTensor<B>,
    pub(crate) sixth: FloatTensor<B>,
    pub(crate) count: usize,
}

impl<B: Backend> Scalars<B> {
    /// `pools`, at most [`SCALARS`], and any tensor.
    pub(crate) fn new(pools: Vec<FloatTensor<B>>, any: FloatTensor<B>) -> Self {
        let count = pools.len();
        let mut pools = pools.into_iter();
        let mut next = || pools.next().unwrap_or_else(|| any.clone());
        Self {
            first: next(),
            second: next(),
            third: next(),
            fourth: next(),
            fifth: next(),
            sixth: next(),
            count,
        }
    }

    /// The pools.
    pub(crate) fn into_pools(self) -> Vec<FloatTensor<B>> {
        let all = [self.first, self.second, self.third, self.fourth, self.fifth, self.sixth];
        all.into_iter().take(self.count).collect()
    }

    /// The same with changed pools.
    pub(crate) fn map(
        self,
        change: impl FnOnce(Vec<FloatTensor<B>>) -> Vec<FloatTensor<B>>,
    ) -> Self {
        let any = self.sixth.clone();
        Self::new(change(self.into_pools()), any)
    }
}

/// Pools that one launch takes.
pub(crate) const SCALARS: usize = 6;

#[backend_extension(Cube: cfg(feature = "gpu"), Flex: cfg(feature = "flex"))]
pub(crate) trait SlotOps: Backend {
    /// Asks for integers `[N]`.
    fn begin_read(tensor: IntTensor<Self>) -> Reading;

    /// Copies row `rows[n]` of `from` to row `slots[n]` of `to`, in place; where only `to` has
    /// weights, the rows weigh 1.
    fn copy_slots(
        #[extension_type] from: SlotPools<Self>,
        rows: IntTensor<Self>,
        #[extension_type] to: SlotPools<Self>,
        slots: IntTensor<Self>,
    ) -> SlotPools<Self>;

    /// Moves the kept slots of each range to its beginning, in place.
    fn compact_slots(
        #[extension_type] pools: SlotPools<Self>,
        offsets: IntTensor<Self>,
        #[extension_type] lists: Lists<Self>,
    ) -> SlotPools<Self>;

    /// Moves the last slot of each range into its victim's place, in place: the `whole` slot, after
    /// which the lengths, also returned, are one less, or its scalars alone.
    fn drop_slots(
        #[extension_type] pools: SlotPools<Self>,
        #[extension_type] scalars: Scalars<Self>,
        #[extension_type] drops: Drops<Self>,
        whole: bool,
    ) -> (SlotPools<Self>, Scalars<Self>, IntTensor<Self>);

    /// Sets every range's last slot in pools of one number a slot, in place.
    fn reset_last(
        #[extension_type] pools: Scalars<Self>,
        initial: Vec<f32>,
        offsets: IntTensor<Self>,
        lengths: IntTensor<Self>,
    ) -> Scalars<Self>;

    /// Ascending indices `[R, most]` of the best among the first `lengths` scores of every row,
    /// `-1` behind them, and their number `[R]`: the highest `counts`, or all from `bounds` on.
    fn top_slots(
        scores: FloatTensor<Self>,
        lengths: IntTensor<Self>,
        counts: IntTensor<Self>,
        bounds: FloatTensor<Self>,
        most: usize,
        by_bound: bool,
    ) -> (IntTensor<Self>, IntTensor<Self>);

    /// Writes row `n` of `rows` `[N, D]` into row `slots[n]` of `pool` `[S, D]`, in place.
    fn scatter_rows(
        pool: FloatTensor<Self>,
        slots: IntTensor<Self>,
        rows: FloatTensor<Self>,
    ) -> FloatTensor<Self>;

    /// The same for a pool of integers `[S]`.
    fn scatter_ints(
        pool: IntTensor<Self>,
        slots: IntTensor<Self>,
        values: IntTensor<Self>,
    ) -> IntTensor<Self>;

    /// Copies `from` into the buffer of `to`.
    fn assign(to: FloatTensor<Self>, from: FloatTensor<Self>) -> FloatTensor<Self>;

    /// The same for integers.
    fn assign_ints(to: IntTensor<Self>, from: IntTensor<Self>) -> IntTensor<Self>;

    /// The slot of each range's lowest score, unprotected ones first; `-1` for an empty range.
    fn argmin_slots(
        scores: FloatTensor<Self>,
        offsets: IntTensor<Self>,
        lengths: IntTensor<Self>,
        positions: IntTensor<Self>,
        newest: IntTensor<Self>,
        protection: Option<Protection>,
    ) -> IntTensor<Self>;
}
