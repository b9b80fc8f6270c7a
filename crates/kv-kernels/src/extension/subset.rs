//! What a step reads of a whole cache.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType, backend_extension};

use crate::Share;
use crate::decode_attention::DecodeConfig;
use crate::pages::PageOptions;
use crate::retrieve_slots::{RetrieveConfig, SteerOptions};

/// A step's choice of what to attend to, as [`crate::retrieve_slots`] takes it.
#[derive(ExtensionType)]
pub(crate) struct Retrieval<B: Backend> {
    /// `[B, Hq, D]`
    pub(crate) query: FloatTensor<B>,
    /// `[P, parts, length]`
    pub(crate) vectors: FloatTensor<B>,
    /// `[S, D]`
    pub(crate) keys: FloatTensor<B>,
    /// `[B, Hkv]`
    pub(crate) offsets: IntTensor<B>,
    /// `[B, Hkv]`
    pub(crate) lengths: IntTensor<B>,
    /// `[B]`
    pub(crate) newest: IntTensor<B>,
    /// `[P, row]`
    pub(crate) table: IntTensor<B>,
    /// `[P, sets, parts, length]`
    pub(crate) set_vectors: FloatTensor<B>,
    pub(crate) config: RetrieveConfig,
}

/// What scores by channels look at, as [`crate::label_scores`] takes it; what is not used is any
/// tensor.
#[derive(ExtensionType)]
pub(crate) struct LabelTensors<B: Backend> {
    /// `[B, Hq, r]`
    pub(crate) channels: FloatTensor<B>,
    /// `[B, Hq, 3]`
    pub(crate) budgets: FloatTensor<B>,
    /// `[B, Hq, 3 + M]`
    pub(crate) lists: FloatTensor<B>,
    /// `[B, Hq, 1 or 2]`
    pub(crate) sources: FloatTensor<B>,
    /// Whether rows share lists.
    pub(crate) shares: bool,
    pub(crate) layer: usize,
    pub(crate) period: usize,
}

#[backend_extension(Cube: cfg(feature = "gpu"), Flex: cfg(feature = "flex"))]
pub(crate) trait SubsetOps: Backend {
    /// Chooses what a step attends to: changes table and vectors in place, returned with log-sums
    /// `[P, G]`.
    fn retrieve_slots(
        #[extension_type] retrieval: Retrieval<Self>,
    ) -> (IntTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);

    /// The same, and attends to it: table, vectors and output `[B, Hq, D]`.
    fn retrieving_attention(
        #[extension_type] retrieval: Retrieval<Self>,
        values: FloatTensor<Self>,
        attention: DecodeConfig,
    ) -> (IntTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);

    /// Changes the sizes of sets in their table `[P, row]`, in place, given what was dropped `[P,
    /// G]`.
    fn steer_sets(
        table: IntTensor<Self>,
        dropped: FloatTensor<Self>,
        options: SteerOptions,
    ) -> IntTensor<Self>;

    /// Writes the bounds of up to `pages` pages of every range, of its last one where `last`, in
    /// place.
    fn page_bounds(
        keys: FloatTensor<Self>,
        offsets: IntTensor<Self>,
        lengths: IntTensor<Self>,
        bounds: FloatTensor<Self>,
        page: usize,
        pages: usize,
        last: bool,
    ) -> FloatTensor<Self>;

    /// Scores of pages `[R, pages]`, candidates `[R]`, and how many are wanted `[R]`.
    fn page_scores(
        query: FloatTensor<Self>,
        bounds: FloatTensor<Self>,
        offsets: IntTensor<Self>,
        lengths: IntTensor<Self>,
        budgets: FloatTensor<Self>,
        pages: usize,
        options: PageOptions,
    ) -> (FloatTensor<Self>, IntTensor<Self>, IntTensor<Self>);

    /// Slots of chosen pages `[R, W]`, and their number `[R]`.
    fn page_slots(
        pages: IntTensor<Self>,
        found: IntTensor<Self>,
        offsets: IntTensor<Self>,
        lengths: IntTensor<Self>,
        page: usize,
        always_last: bool,
    ) -> (IntTensor<Self>, IntTensor<Self>);

    /// Scores by channels `[R, T]`, candidates `[R]`, and how many are wanted `[R]`.
    fn label_scores(
        query: FloatTensor<Self>,
        keys: FloatTensor<Self>,
        offsets: IntTensor<Self>,
        lengths: IntTensor<Self>,
        #[extension_type] labels: LabelTensors<Self>,
        columns: usize,
    ) -> (FloatTensor<Self>, IntTensor<Self>, IntTensor<Self>);

    /// Takes over lists that are wanted, in place, and copies all to a layer's part of `board`.
    #[allow(clippy::too_many_arguments)]
    fn keep_lists(
        lists: FloatTensor<Self>,
        indices: IntTensor<Self>,
        found: IntTensor<Self>,
        wanted: IntTensor<Self>,
        budgets: FloatTensor<Self>,
        lengths: IntTensor<Self>,
        board: FloatTensor<Self>,
        layer: Option<usize>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// Slots that lists name `[R, width]`, and their number `[R]`.
    fn list_slots(
        table: FloatTensor<Self>,
        sources: FloatTensor<Self>,
        budgets: FloatTensor<Self>,
        offsets: IntTensor<Self>,
        lengths: IntTensor<Self>,
        width: usize,
    ) -> (IntTensor<Self>, IntTensor<Self>);

    /// The first slot of each range at or behind the start of its sequence's window.
    fn window_starts(
        positions: IntTensor<Self>,
        offsets: IntTensor<Self>,
        lengths: IntTensor<Self>,
        newest: IntTensor<Self>,
        share: Share,
    ) -> IntTensor<Self>;
}
