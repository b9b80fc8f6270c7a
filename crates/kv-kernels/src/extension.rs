//! The backend extension: one method an op, implemented for the CPU (`flex.rs`) by the references
//! and for CubeCL devices (`gpu.rs`) by the kernels. Public functions validate first; an
//! implementation may rely on shapes, dtypes and devices.

use burn::backend::Backend;
use burn::backend::DType;
use burn::backend::tensor::{FloatTensor, IntTensor};
#[allow(unused_imports)]
use burn::backend::{Dispatch, ExtensionType, backend_extension};

use crate::Share;
use crate::add_probabilities::GroupReduction;
use crate::argmin_slots::Protection;
use crate::average_scores::AverageWeights;
use crate::balance::WalkConfig;
use crate::count_sketch::SketchConfig;
use crate::decode_attention::DecodeConfig;
use crate::evicting_attention::EvictionConfig;
use crate::heads::{HeadConfig, Place};
use crate::merge_nearest::NearestConfig;
use crate::merge_slots::MergeConfig;
use crate::pages::PageOptions;
#[cfg(feature = "cuda")]
use crate::prefill_attention::PrefillConfig;
use crate::reading::Reading;
use crate::retrieve_slots::{RetrieveConfig, SteerOptions};
use crate::revise_sketch::ReviseOptions;
use crate::sample::DrawConfig;

/// New tokens as projected; what `config` does not use is any tensor.
#[derive(ExtensionType)]
pub(crate) struct Projection<B: Backend> {
    /// `[N, (Hq + 2 Hkv) D]`
    pub(crate) projected: FloatTensor<B>,
    /// `[N]`
    pub(crate) positions: IntTensor<B>,
    /// `[P, D / 2]`
    pub(crate) cos: FloatTensor<B>,
    /// `[P, D / 2]`
    pub(crate) sin: FloatTensor<B>,
    /// `[D]`
    pub(crate) query_norm: FloatTensor<B>,
    /// `[D]`
    pub(crate) key_norm: FloatTensor<B>,
    pub(crate) config: HeadConfig,
}

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

/// Up to [`SCALARS`] pools of one number a slot, written in place, as an extension takes no lists; those
/// from `count` on are any tensor.
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

/// Pools that one launch takes.
pub(crate) const SCALARS: usize = 6;

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

/// Where new tokens go; what `place` does not use is any tensor.
#[derive(ExtensionType)]
pub(crate) struct Places<B: Backend> {
    /// `[B, Hkv]`; the slots themselves where they are given.
    pub(crate) offsets: IntTensor<B>,
    /// `[B, Hkv]`, grown in place.
    pub(crate) lengths: IntTensor<B>,
    /// `[B, Hkv]`
    pub(crate) next: IntTensor<B>,
    /// `[S]`, written in place.
    pub(crate) log_norms: FloatTensor<B>,
    pub(crate) place: Place,
}

/// What writing new tokens returns.
#[derive(ExtensionType)]
pub(crate) struct Written<B: Backend> {
    /// `[B, Hq, D]`
    pub(crate) query: FloatTensor<B>,
    #[extension_type]
    pub(crate) pools: SlotPools<B>,
    /// `[B, Hkv]`
    pub(crate) lengths: IntTensor<B>,
    /// `[S]`
    pub(crate) log_norms: FloatTensor<B>,
}

/// What an eviction looks at; what its configuration does not use is any tensor.
#[derive(ExtensionType)]
pub(crate) struct Eviction<B: Backend> {
    /// `[S]`
    pub(crate) log_norms: FloatTensor<B>,
    /// `[B, Hkv]`
    pub(crate) offsets: IntTensor<B>,
    /// `[B, Hkv]`
    pub(crate) lengths: IntTensor<B>,
    /// `[B, Hkv]`
    pub(crate) limits: IntTensor<B>,
    /// `[B, Hkv]`, written in place.
    pub(crate) places: IntTensor<B>,
    /// `[S]`
    pub(crate) positions: IntTensor<B>,
    /// `[B]`
    pub(crate) now: IntTensor<B>,
}

/// What halves lists; what its configuration does not use is any tensor.
#[derive(ExtensionType)]
pub(crate) struct Walk<B: Backend> {
    /// `[P, N]`
    pub(crate) lists: IntTensor<B>,
    /// `[P]`
    pub(crate) counts: IntTensor<B>,
    /// `[P]`
    pub(crate) log_gamma: FloatTensor<B>,
    /// `[P * centres * D]`
    pub(crate) means: FloatTensor<B>,
    /// `[P * N]`
    pub(crate) weights: FloatTensor<B>,
    /// `[P * 2]`
    pub(crate) seeds: IntTensor<B>,
    /// `[P * N]`
    pub(crate) numbers: FloatTensor<B>,
}

/// What halving returns, as [`crate::Balanced`] has it.
#[derive(ExtensionType)]
pub(crate) struct Classes<B: Backend> {
    pub(crate) signs: IntTensor<B>,
    pub(crate) kept: IntTensor<B>,
    pub(crate) failed: IntTensor<B>,
}

/// What is merged into what, as [`crate::MergeLists`] has it.
#[derive(ExtensionType)]
pub(crate) struct Merges<B: Backend> {
    /// `[Sv, D]`, like the values, where victims are in a pool of their own.
    pub(crate) from_keys: FloatTensor<B>,
    pub(crate) from_values: FloatTensor<B>,
    pub(crate) victims: IntTensor<B>,
    pub(crate) victim_counts: IntTensor<B>,
    pub(crate) targets: IntTensor<B>,
    pub(crate) victim_weights: FloatTensor<B>,
    pub(crate) kept: IntTensor<B>,
    pub(crate) kept_counts: IntTensor<B>,
    pub(crate) kept_weights: FloatTensor<B>,
    /// `[P, D]`, where there are queries.
    pub(crate) queries: FloatTensor<B>,
}

/// Merged pools, and what the kept slots weigh.
#[derive(ExtensionType)]
pub(crate) struct MergedPools<B: Backend> {
    /// `[S, D]`
    pub(crate) keys: FloatTensor<B>,
    /// `[S, D]`
    pub(crate) values: FloatTensor<B>,
    /// `[P, M, 2]`
    pub(crate) weights: FloatTensor<B>,
    /// `[P, M]`
    pub(crate) guarded: IntTensor<B>,
}

/// What [`crate::MergingSlots`] has, written in place.
#[derive(ExtensionType)]
pub(crate) struct MergingPools<B: Backend> {
    /// `[S, D]`
    pub(crate) keys: FloatTensor<B>,
    /// `[S, D]`
    pub(crate) values: FloatTensor<B>,
    pub(crate) log_weights: FloatTensor<B>,
    pub(crate) log_scores: FloatTensor<B>,
    pub(crate) log_samples: FloatTensor<B>,
    pub(crate) votes: FloatTensor<B>,
    pub(crate) votes_high: FloatTensor<B>,
}

/// Sketches, as [`crate::SketchSource`] has them.
#[derive(ExtensionType)]
pub(crate) struct SketchTensors<B: Backend> {
    /// `[N, D]`
    pub(crate) keys: FloatTensor<B>,
    /// `[N, D]`
    pub(crate) values: FloatTensor<B>,
    /// `[P, 6]`
    pub(crate) heads: IntTensor<B>,
    /// `[P, r * 4]`, or `[1, r * T]` where they are tabled.
    pub(crate) hashes: IntTensor<B>,
    pub(crate) most_entries: usize,
    pub(crate) config: SketchConfig,
}

/// Tokens in sketches, as [`crate::SketchedTokens`] has them.
#[derive(ExtensionType)]
pub(crate) struct SketchTokens<B: Backend> {
    #[extension_type]
    pub(crate) sketch: SketchTensors<B>,
    /// `[T]`
    pub(crate) scores: FloatTensor<B>,
    /// `[B]`
    pub(crate) newest: IntTensor<B>,
    pub(crate) longest: usize,
}

/// What attention over slots and sketched tokens returns.
#[derive(ExtensionType)]
pub(crate) struct SketchAttended<B: Backend> {
    /// `[B, Hq, D]`
    pub(crate) output: FloatTensor<B>,
    /// `[B, Hq]`
    pub(crate) log_sum_exp: FloatTensor<B>,
    /// `[S, G]`
    pub(crate) slot_logits: FloatTensor<B>,
    /// `[T, G]`
    pub(crate) token_logits: FloatTensor<B>,
}

/// A step's end for slots and sketches, as [`crate::revise_sketch`] takes it.
#[derive(ExtensionType)]
pub(crate) struct Revision<B: Backend> {
    #[extension_type]
    pub(crate) sketch: SketchTensors<B>,
    #[extension_type]
    pub(crate) pool: SlotPools<B>,
    /// `[B, Hkv]`
    pub(crate) offsets: IntTensor<B>,
    /// `[B, Hkv]`
    pub(crate) lengths: IntTensor<B>,
    /// `[S]`
    pub(crate) slot_scores: FloatTensor<B>,
    /// `[T]`
    pub(crate) token_scores: FloatTensor<B>,
    /// `[P, 2]`
    pub(crate) moved: IntTensor<B>,
    /// `[S, G]`; `[T, G]` where `by_token`.
    pub(crate) slot_logits: FloatTensor<B>,
    /// `[T, G]`
    pub(crate) token_logits: FloatTensor<B>,
    /// `[B, Hq]`
    pub(crate) log_sum_exp: FloatTensor<B>,
    /// `[B]`
    pub(crate) newest: IntTensor<B>,
    pub(crate) by_token: bool,
    pub(crate) options: ReviseOptions,
}

/// What a revision has changed in place.
#[derive(ExtensionType)]
pub(crate) struct Revised<B: Backend> {
    #[extension_type]
    pub(crate) sketch: SketchTensors<B>,
    #[extension_type]
    pub(crate) pool: SlotPools<B>,
    pub(crate) lengths: IntTensor<B>,
    pub(crate) slot_scores: FloatTensor<B>,
    pub(crate) token_scores: FloatTensor<B>,
    pub(crate) moved: IntTensor<B>,
}

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

/// A batch's draws: settings, and what is changed in place.
#[derive(ExtensionType)]
pub(crate) struct SampleTensors<B: Backend> {
    /// Temperature, top p, min p, `[B * 3]`.
    pub(crate) floats: FloatTensor<B>,
    /// Top k, seed (two), whether positions advance, `[B * 4]`.
    pub(crate) ints: IntTensor<B>,
    /// `[B]`
    pub(crate) draws: IntTensor<B>,
    /// `[B]`
    pub(crate) positions: IntTensor<B>,
    /// `[B]`
    pub(crate) tokens: IntTensor<B>,
}

/// What a draw returns, `[B]` each.
#[derive(ExtensionType)]
pub(crate) struct Drawn<B: Backend> {
    pub(crate) drawn: IntTensor<B>,
    pub(crate) draws: IntTensor<B>,
    pub(crate) positions: IntTensor<B>,
    pub(crate) tokens: IntTensor<B>,
}

/// What scores by channels look at, as [`crate::label_scores`] takes it; what is not used is any tensor.
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

/// What a product adds to its sums; what is not used is any tensor.
#[derive(ExtensionType)]
pub(crate) struct Epilogue<B: Backend> {
    /// `[M]`
    pub(crate) bias: FloatTensor<B>,
    /// `[N, M]`, or `[N, M / 2]` where `gated`.
    pub(crate) residual: FloatTensor<B>,
    pub(crate) config: EpilogueConfig,
}

/// An [`Epilogue`] without its tensors: bias first, then the gate, then the residual.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct EpilogueConfig {
    pub(crate) biased: bool,
    /// Whether `silu` of the first half of the outputs multiplies the second.
    pub(crate) gated: bool,
    pub(crate) adds: bool,
}

impl EpilogueConfig {
    /// Outputs of the weight matrix that make one output.
    pub(crate) fn parts(self) -> usize {
        if self.gated { 2 } else { 1 }
    }
}

#[backend_extension(Cube: cfg(feature = "gpu"), Flex: cfg(feature = "flex"))]
pub(crate) trait SlotOps: Backend {
    /// Returns output `[B, Hq, D]`, log-sum-exp `[B, Hq]` and probabilities `[S, G]`; the last two
    /// are placeholders of one element where `config` does not ask for them.
    #[allow(clippy::too_many_arguments)]
    fn decode_attention(
        query: FloatTensor<Self>,
        keys: FloatTensor<Self>,
        values: FloatTensor<Self>,
        log_weights: FloatTensor<Self>,
        numerators: FloatTensor<Self>,
        offsets: IntTensor<Self>,
        lengths: IntTensor<Self>,
        view: IntTensor<Self>,
        config: DecodeConfig,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);

    /// Returns output `[B, Hq, D]`, the next tokens' places `[B, Hkv]` and log-importances `[S]`, a
    /// placeholder where `config` does not ask for them.
    fn evicting_attention(
        query: FloatTensor<Self>,
        keys: FloatTensor<Self>,
        values: FloatTensor<Self>,
        log_weights: FloatTensor<Self>,
        #[extension_type] eviction: Eviction<Self>,
        config: EvictionConfig,
    ) -> (FloatTensor<Self>, IntTensor<Self>, FloatTensor<Self>);

    /// Walks every block of every list.
    fn balance(
        keys: FloatTensor<Self>,
        values: FloatTensor<Self>,
        #[extension_type] walk: Walk<Self>,
        config: WalkConfig,
    ) -> Classes<Self>;

    /// Places among `among` `[P, M]` whose keys are most alike to those of `of` `[P, N]`, and cosines.
    fn nearest_slots(
        keys: FloatTensor<Self>,
        of: IntTensor<Self>,
        of_counts: IntTensor<Self>,
        among: IntTensor<Self>,
        among_counts: IntTensor<Self>,
        earlier: bool,
    ) -> (IntTensor<Self>, FloatTensor<Self>);

    /// Merges victims into kept slots of `keys` and `values` `[S, D]`, in place.
    fn merge_slots(
        keys: FloatTensor<Self>,
        values: FloatTensor<Self>,
        #[extension_type] merges: Merges<Self>,
        config: MergeConfig,
    ) -> MergedPools<Self>;

    /// Merges one victim of every range into its most similar slot, in place.
    #[allow(clippy::too_many_arguments)]
    fn merge_nearest(
        #[extension_type] pools: MergingPools<Self>,
        offsets: IntTensor<Self>,
        lengths: IntTensor<Self>,
        victims: IntTensor<Self>,
        goes: IntTensor<Self>,
        queries: FloatTensor<Self>,
        config: NearestConfig,
    ) -> MergingPools<Self>;

    /// Takes scores of logits `[S, G]` into averages `[S]`, in place.
    fn average_scores(
        log_scores: FloatTensor<Self>,
        log_samples: FloatTensor<Self>,
        logits: FloatTensor<Self>,
        log_weights: FloatTensor<Self>,
        weighted: bool,
        weights: AverageWeights,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// Adds tokens `[P, M]`, `sign` times each, to sketches, in place; returns their keys and values.
    fn sketch_insert(
        #[extension_type] sketch: SketchTensors<Self>,
        tokens: IntTensor<Self>,
        keys: FloatTensor<Self>,
        values: FloatTensor<Self>,
        sign: f32,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// Estimated keys and values `[P, M, D]` of tokens `[P, M]`.
    fn sketch_query(
        #[extension_type] sketch: SketchTensors<Self>,
        tokens: IntTensor<Self>,
        dtype: DType,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// Attention over slots and over tokens in sketches.
    #[allow(clippy::too_many_arguments)]
    fn sketch_attention(
        query: FloatTensor<Self>,
        keys: FloatTensor<Self>,
        values: FloatTensor<Self>,
        offsets: IntTensor<Self>,
        lengths: IntTensor<Self>,
        #[extension_type] tokens: SketchTokens<Self>,
        scale: f32,
        longest: usize,
    ) -> SketchAttended<Self>;

    /// Adds a step's probabilities to scores and moves tokens between slots and sketches, in place.
    fn revise_sketch(#[extension_type] revision: Revision<Self>) -> Revised<Self>;

    /// Chooses what a step attends to: changes table and vectors in place, returned with log-sums `[P, G]`.
    fn retrieve_slots(
        #[extension_type] retrieval: Retrieval<Self>,
    ) -> (IntTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);

    /// The same, and attends to it: table, vectors and output `[B, Hq, D]`.
    fn retrieving_attention(
        #[extension_type] retrieval: Retrieval<Self>,
        values: FloatTensor<Self>,
        attention: DecodeConfig,
    ) -> (IntTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);

    /// Asks for integers `[N]`.
    fn begin_read(tensor: IntTensor<Self>) -> Reading;

    /// Changes the sizes of sets in their table `[P, row]`, in place, given what was dropped `[P, G]`.
    fn steer_sets(
        table: IntTensor<Self>,
        dropped: FloatTensor<Self>,
        options: SteerOptions,
    ) -> IntTensor<Self>;

    /// Adds probabilities of logits `[S, G]` to `sums` `[S]`, in place.
    fn add_probabilities(
        sums: FloatTensor<Self>,
        logits: FloatTensor<Self>,
        log_sum_exp: FloatTensor<Self>,
        offsets: IntTensor<Self>,
        lengths: IntTensor<Self>,
        reduction: GroupReduction,
    ) -> FloatTensor<Self>;

    /// `x` `[N, K]` times the transpose of `weight` `[M, K]`, for few rows.
    fn skinny_product(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        #[extension_type] epilogue: Epilogue<Self>,
    ) -> FloatTensor<Self>;

    /// `silu` of the left half of `[N, 2 I]` times the right one.
    fn swiglu(x: FloatTensor<Self>) -> FloatTensor<Self>;

    /// `x` (plus `delta`, where `adds`) with normalised rows, and the sum, else any tensor.
    fn rms_norm(
        x: FloatTensor<Self>,
        delta: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        epsilon: f32,
        adds: bool,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// Queries, keys and values `[B, H, T, D]` of `tokens` tokens a sequence.
    fn split_heads(
        #[extension_type] projection: Projection<Self>,
        tokens: usize,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);

    /// Writes one token a sequence in place.
    fn write_heads(
        #[extension_type] projection: Projection<Self>,
        #[extension_type] pools: SlotPools<Self>,
        #[extension_type] places: Places<Self>,
    ) -> Written<Self>;

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

    /// Moves the last slot of each range into its victim's place, in place.
    fn drop_slots(
        #[extension_type] pools: SlotPools<Self>,
        #[extension_type] drops: Drops<Self>,
    ) -> SlotPools<Self>;

    /// The same for pools of one number a slot; the lengths, also returned, become one less where it
    /// `shrinks`.
    fn drop_scalars(
        #[extension_type] pools: Scalars<Self>,
        #[extension_type] drops: Drops<Self>,
        shrinks: bool,
    ) -> (Scalars<Self>, IntTensor<Self>);

    /// Sets every range's last slot in pools of one number a slot, in place.
    fn reset_last(
        #[extension_type] pools: Scalars<Self>,
        initial: Vec<f32>,
        offsets: IntTensor<Self>,
        lengths: IntTensor<Self>,
    ) -> Scalars<Self>;

    /// Draws a token for every row of `logits` `[B, V]`.
    fn draw(
        logits: FloatTensor<Self>,
        #[extension_type] state: SampleTensors<Self>,
        config: DrawConfig,
    ) -> Drawn<Self>;

    /// Ascending indices `[R, most]` of the best among the first `lengths` scores of every row, `-1`
    /// behind them, and their number `[R]`: the highest `counts`, or all from `bounds` on.
    fn top_slots(
        scores: FloatTensor<Self>,
        lengths: IntTensor<Self>,
        counts: IntTensor<Self>,
        bounds: FloatTensor<Self>,
        most: usize,
        by_bound: bool,
    ) -> (IntTensor<Self>, IntTensor<Self>);

    /// Writes the bounds of up to `pages` pages of every range, of its last one where `last`, in place.
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

    /// A number in `[0, 1)` for each of `seeds` `[N, 2]` and `draws` `[N]`.
    fn uniforms(seeds: IntTensor<Self>, draws: IntTensor<Self>) -> FloatTensor<Self>;

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

    /// The first slot of each range at or behind the start of its sequence's window.
    fn window_starts(
        positions: IntTensor<Self>,
        offsets: IntTensor<Self>,
        lengths: IntTensor<Self>,
        newest: IntTensor<Self>,
        share: Share,
    ) -> IntTensor<Self>;
}

/// Kernels for Hopper GPUs alone; [`crate::check::Check::on_hopper`] says where they serve.
#[cfg(feature = "cuda")]
#[backend_extension(Cube)]
pub(crate) trait HopperOps: Backend {
    /// [`SlotOps::skinny_product`] in f16 or bf16; where there is an `epsilon`, of normalised rows times `gain` `[K]`.
    fn streamed_product(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        gain: FloatTensor<Self>,
        epsilon: Option<f32>,
        #[extension_type] epilogue: Epilogue<Self>,
    ) -> FloatTensor<Self>;

    /// `x` `[N, K]` times the transpose of `weight` `[M, K]`, in f16 or bf16.
    fn wide_product(x: FloatTensor<Self>, weight: FloatTensor<Self>) -> FloatTensor<Self>;

    /// Causal attention of `query` `[B, Hq, N, D]` over `[B, Hkv, T, D]`, the last query at the last
    /// key; returns output, log-sum-exp `[B, Hq, N]` and, where asked for, column sums `[B, Hq, T]`.
    fn causal_attention(
        query: FloatTensor<Self>,
        keys: FloatTensor<Self>,
        values: FloatTensor<Self>,
        config: PrefillConfig,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);
}
