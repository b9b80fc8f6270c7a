//! The arguments and results of the ops that move slots as backends take and return them.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType};

use crate::backend::optional::OptionalFloat;

/// Lists of kept slots ([`crate::KeepLists`]).
#[derive(ExtensionType)]
pub(crate) struct Lists<B: Backend> {
    pub(crate) kept: IntTensor<B>,
    pub(crate) starts: IntTensor<B>,
    pub(crate) counts: IntTensor<B>,
    pub(crate) most: usize,
}

/// One victim for each range, `[B, Hkv]`.
#[derive(ExtensionType)]
pub(crate) struct Drops<B: Backend> {
    pub(crate) offsets: IntTensor<B>,
    pub(crate) lengths: IntTensor<B>,
    pub(crate) victims: IntTensor<B>,
    /// 0 for a range that drops nothing.
    pub(crate) goes: IntTensor<B>,
}

/// Up to [`SCALARS`] pools of one number a slot, written in place. A backend extension takes no
/// lists, so each pool is a field.
#[derive(ExtensionType)]
pub(crate) struct Scalars<B: Backend> {
    #[extension_type]
    pub(crate) first: OptionalFloat<B>,
    #[extension_type]
    pub(crate) second: OptionalFloat<B>,
    #[extension_type]
    pub(crate) third: OptionalFloat<B>,
    #[extension_type]
    pub(crate) fourth: OptionalFloat<B>,
    #[extension_type]
    pub(crate) fifth: OptionalFloat<B>,
    #[extension_type]
    pub(crate) sixth: OptionalFloat<B>,
}

impl<B: Backend> Scalars<B> {
    /// Fills the fields with `pools`, at most [`SCALARS`].
    pub(crate) fn new(pools: Vec<FloatTensor<B>>) -> Self {
        let mut pools = pools.into_iter();
        let mut next = || pools.next().map_or(OptionalFloat::Absent, OptionalFloat::Present);
        Self {
            first: next(),
            second: next(),
            third: next(),
            fourth: next(),
            fifth: next(),
            sixth: next(),
        }
    }

    /// The pools.
    pub(crate) fn into_pools(self) -> Vec<FloatTensor<B>> {
        let all = [self.first, self.second, self.third, self.fourth, self.fifth, self.sixth];
        all.into_iter().filter_map(OptionalFloat::into_option).collect()
    }

    /// Changes every pool with a function.
    pub(crate) fn map(
        self,
        change: impl FnOnce(Vec<FloatTensor<B>>) -> Vec<FloatTensor<B>>,
    ) -> Self {
        Self::new(change(self.into_pools()))
    }
}

/// The most pools of a launch.
pub(crate) const SCALARS: usize = 6;
