//! The arguments and results of the ops that move slots as backends take and return them.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType};

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
