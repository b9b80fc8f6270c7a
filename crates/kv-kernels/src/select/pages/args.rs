//! The arguments and results of the ops on pages as backends take and return them.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType};

use super::PageOptions;

/// The pages whose bounds are computed.
#[derive(ExtensionType)]
pub(crate) struct PageBoundsArgs<B: Backend> {
    /// `[S, D]`
    pub(crate) keys: FloatTensor<B>,
    /// `[B, Hkv]`
    pub(crate) offsets: IntTensor<B>,
    /// `[B, Hkv]`
    pub(crate) lengths: IntTensor<B>,
    /// `[rows, D]`, written in place.
    pub(crate) bounds: FloatTensor<B>,
    /// Slots of a page.
    pub(crate) page: usize,
    /// The most pages of a range whose bounds are written.
    pub(crate) pages: usize,
    /// Whether only the bounds of each range's last page are written.
    pub(crate) last: bool,
}

/// The pages to score.
#[derive(ExtensionType)]
pub(crate) struct PageScoresArgs<B: Backend> {
    /// `[B, Hq, D]`
    pub(crate) query: FloatTensor<B>,
    /// `[rows, D]`
    pub(crate) bounds: FloatTensor<B>,
    /// `[B, Hkv]`
    pub(crate) offsets: IntTensor<B>,
    /// `[B, Hkv]`
    pub(crate) lengths: IntTensor<B>,
    /// `[B, H, 3]`
    pub(crate) budgets: IntTensor<B>,
    /// The most pages of a range.
    pub(crate) pages: usize,
    pub(crate) options: PageOptions,
}

/// The pages whose slots are listed.
#[derive(ExtensionType)]
pub(crate) struct PageSlotsArgs<B: Backend> {
    /// `[R, M]`
    pub(crate) pages: IntTensor<B>,
    /// How many pages each row has chosen, `[R]`.
    pub(crate) found: IntTensor<B>,
    /// `[B, Hkv]`
    pub(crate) offsets: IntTensor<B>,
    /// `[B, Hkv]`
    pub(crate) lengths: IntTensor<B>,
    /// Slots of a page.
    pub(crate) page: usize,
    /// Whether the slots of the last page are always listed.
    pub(crate) always_last: bool,
}
