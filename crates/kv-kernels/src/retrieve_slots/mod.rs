//! Which tokens a decode step attends to: those of highest attention, retrieved or shared with an
//! earlier step of similar query (PrHS, section IV-A).
//!
//! On CubeCL devices a call is one kernel (`kernel.rs`) where a cube takes a range, else two:
//! `score.rs` in parts, then the choice a cube a range. Long ranges have five kernels of their own
//! (`sift/`), between which many cubes share what is to be done. `decide.rs` says which ranges
//! share, `rows.rs` scores, or `tiles.rs` by matrix instructions where there are any, `choose.rs`
//! makes sets, `radix.rs` finds the highest scores, `marks.rs` notes them bit by bit, `list.rs`
//! lists them, `conclude.rs` writes down what is read of a set, and `room.rs` knows what all of it
//! takes of shared memory. Where the attention is a cube a range, too, `fused.rs` chooses and
//! attends in one launch, behind one for the scores where ranges may share.

#[cfg(feature = "gpu")]
mod call;
#[cfg(feature = "gpu")]
mod choose;
#[cfg(feature = "gpu")]
mod conclude;
#[cfg(feature = "gpu")]
mod decide;
#[cfg(feature = "gpu")]
mod ends;
#[cfg(feature = "gpu")]
pub(crate) mod fused;
#[cfg(feature = "gpu")]
mod kernel;
#[cfg(feature = "gpu")]
pub(crate) mod launch;
#[cfg(feature = "gpu")]
mod list;
#[cfg(feature = "gpu")]
mod log_sums;
#[cfg(feature = "gpu")]
mod marks;
#[cfg(feature = "gpu")]
mod radix;
pub(crate) mod reference;
#[cfg(feature = "gpu")]
mod room;
#[cfg(feature = "gpu")]
mod rows;
#[cfg(feature = "gpu")]
mod score;
#[cfg(feature = "gpu")]
mod scratch;
mod sets;
#[cfg(feature = "gpu")]
mod sift;
#[cfg(feature = "gpu")]
mod sight;
pub(crate) mod steer;
pub(crate) mod table;
#[cfg(feature = "gpu")]
mod tiles;

use burn::backend::Dispatch;
use burn::tensor::{Int, Tensor};

#[cfg(feature = "gpu")]
pub(crate) use conclude::Chosen;
pub use sets::{IndexSets, RangeSets, SetRule};

use crate::check::Check;
use crate::decode_attention::{self, DecodeConfig, Features, ViewKind};
use crate::extension::{Retrieval, SubsetOps};
use crate::{KernelError, Share, SlotRanges};

const OP: &str = "retrieve_slots";

/// How the scores of a group's query heads become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ScoreReduction {
    /// The sum of their attention weights.
    Sum,
    /// The largest of their attention weights.
    Max,
}

/// How the similarities of a group's vectors become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SimilarityReduction {
    /// Their mean.
    Mean,
    /// The least of them.
    Min,
}

/// Which earlier steps of its block a step may share a set with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Earlier {
    /// All of them, those that shared included: they hand on the set that they shared.
    Any,
    /// Those that retrieved.
    Retrieved,
}

/// Which steps read the neighbours that the best of a set bring along.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dilation {
    /// Steps that share the set. The step that retrieves it reads the highest scores alone.
    Shared,
    /// The step that retrieves the set, too.
    All,
}

/// What a step retrieves and when it shares.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RetrieveOptions {
    /// Logit scale; `None` means `1 / sqrt(D)`.
    pub scale: Option<f32>,
    /// `r`: neighbours on each side that the best bring along.
    pub radius: usize,
    /// Who reads them.
    pub dilation: Dilation,
    /// Steps of a block, within which sets are shared; 1 for never.
    pub block: usize,
    /// Which earlier steps of the block sets are shared with.
    pub earlier: Earlier,
    /// One score of a group's.
    pub reduction: ScoreReduction,
    /// One similarity of a group's.
    pub similarity: SimilarityReduction,
    /// The share of the tokens so far that are out of sight, the first ones, but for sinks: see
    /// [`Share::first_seen`].
    pub hidden: Share,
    /// Whether to note what bounds on the dropped attention take.
    pub certified: bool,
    /// The most slots that any range holds, if known; by default the pool's.
    pub longest: Option<usize>,
}

impl RetrieveOptions {
    /// Whether steps that retrieve read something else than their sets.
    pub(crate) fn reads_choice(&self) -> bool {
        self.dilation == Dilation::Shared && self.radius > 0
    }
}

/// Chooses what a step attends to, in place: shares the set of the most recent step of the block
/// whose vectors are similar to the step's, else retrieves the tokens of highest attention between
/// sinks and locals, ties by the lowest index, and with them, for steps that share the set, the
/// neighbours of the best. [`crate::SlotView::Sets`] attends to it.
///
/// A range's slots are its tokens in order, but for first ones behind the sinks that may have been
/// freed.
///
/// # Shapes
/// - `query`: `[B, Hq, D]`; `vectors`: `[P, parts, length]`, in the query's dtype, what similarity
///   is of
/// - `keys`: `[S, D]`; `newest`: `[B]`, 32-bit, the newest tokens' indices
///
/// Returns the log-sum-exp of each query over all tokens in sight, `[B, Hq]`, f32, where
/// `measures`: then all ranges are scored, whether they retrieve or not.
///
/// # Errors
/// [`KernelError`] where shapes, dtypes or devices do not fit, and for sets that have no room.
#[allow(clippy::too_many_arguments)]
pub fn retrieve_slots(
    query: Tensor<3>,
    vectors: Tensor<3>,
    keys: Tensor<2>,
    ranges: &SlotRanges,
    newest: Tensor<1, Int>,
    sets: &mut IndexSets,
    options: RetrieveOptions,
    measures: bool,
) -> Result<Option<Tensor<2>>, KernelError> {
    let [batch, query_heads, _] = query.dims();
    let retrieval =
        prepare(query, vectors, [&keys, &keys], ranges, newest, sets, options, measures)?;
    let (table, set_vectors, log_sum_exp) = <Dispatch as SubsetOps>::retrieve_slots(retrieval);
    sets.table = Tensor::from_dispatch(table);
    sets.vectors = Tensor::from_dispatch(set_vectors);
    let log_sum_exp = Tensor::<2>::from_dispatch(log_sum_exp);
    Ok(measures.then(|| log_sum_exp.reshape([batch, query_heads])))
}

/// [`retrieve_slots`], and the attention to what it chooses, in one launch with the choice where
/// the device allows it.
///
/// # Shapes
/// As for [`retrieve_slots`]; `values` `[S, D]`. Returns `[B, Hq, D]`.
///
/// # Errors
/// As for [`retrieve_slots`].
#[allow(clippy::too_many_arguments)]
pub fn retrieving_attention(
    query: Tensor<3>,
    vectors: Tensor<3>,
    [keys, values]: [Tensor<2>; 2],
    ranges: &SlotRanges,
    newest: Tensor<1, Int>,
    sets: &mut IndexSets,
    options: RetrieveOptions,
) -> Result<Tensor<3>, KernelError> {
    let retrieval =
        prepare(query, vectors, [&keys, &values], ranges, newest, sets, options, false)?;
    let RetrieveConfig { scale, longest, .. } = retrieval.config;
    let attention = DecodeConfig {
        scale,
        features: Features {
            weighted: false,
            numerators: false,
            log_sum_exp: false,
            scores: false,
            view: ViewKind::Sets,
        },
        longest: longest.min(sets.most()),
        sinks: 0,
        raw: false,
    };
    let values = values.into_dispatch();
    let (table, set_vectors, output) =
        <Dispatch as SubsetOps>::retrieving_attention(retrieval, values, attention);
    sets.table = Tensor::from_dispatch(table);
    sets.vectors = Tensor::from_dispatch(set_vectors);
    Ok(Tensor::from_dispatch(output))
}

/// Checks what a step takes, and takes the sets' tensors.
#[allow(clippy::too_many_arguments)]
fn prepare(
    query: Tensor<3>,
    vectors: Tensor<3>,
    [keys, values]: [&Tensor<2>; 2],
    ranges: &SlotRanges,
    newest: Tensor<1, Int>,
    sets: &mut IndexSets,
    options: RetrieveOptions,
    measures: bool,
) -> Result<Retrieval<Dispatch>, KernelError> {
    let check = Check::new(OP, &query);
    let [batch, _, head_dim] = query.dims();
    let [pairs, parts, length] = vectors.dims();
    decode_attention::check(&check, OP, &query, [keys, values], None, ranges)?;
    check.same_dtype("vectors", &vectors, "the query's dtype", query.dtype())?;
    let [_, kv_heads] = ranges.offsets.dims();
    check.shape("vectors", &vectors, &[batch * kv_heads, parts, length])?;
    check.shape("sets' vectors", &sets.vectors, &[pairs, sets.sets, parts, length])?;
    check.shape("sets", &sets.table, &[pairs, table::row(sets.sets, sets.width)])?;
    check.shape("newest", &newest, &[batch])?;
    check.int("newest", &newest)?;
    if options.block == 0 {
        return Err(check.unsupported("block", 0, "at least 1"));
    }
    if options.block > 1 && options.block > sets.sets {
        return Err(check.unsupported("sets", sets.sets, "as many as steps of a block"));
    }
    let [slots, _] = keys.dims();
    let longest = options.longest.unwrap_or(slots).min(slots);
    Ok(Retrieval {
        query: query.into_dispatch(),
        vectors: vectors.into_dispatch(),
        keys: keys.clone().into_dispatch(),
        offsets: ranges.offsets.clone().into_dispatch(),
        lengths: ranges.lengths.clone().into_dispatch(),
        newest: newest.into_dispatch(),
        table: check.take_ints(&mut sets.table).into_dispatch(),
        set_vectors: check.take(&mut sets.vectors).into_dispatch(),
        config: RetrieveConfig {
            scale: options.scale.unwrap_or_else(|| 1.0 / (head_dim as f32).sqrt()),
            options,
            sets: sets.sets,
            width: sets.width,
            longest,
            measures,
        },
    })
}

/// Where sizes of sets are steered to.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SteerOptions {
    /// The share of attention that steps are to drop.
    pub target: f32,
    /// By how much the logarithm of a size changes where twice the target is dropped.
    pub gain: f32,
    /// The largest size.
    pub most: usize,
}

/// Changes what the next retrievals of every range find, in place: more where a step has dropped
/// more than the target, in the mean over its queries, fewer where less.
///
/// # Shapes
/// `dropped` `[B, Hq]`, f32: the share of attention that the step did not give to what it read.
///
/// # Errors
/// [`KernelError`] where shapes, dtypes or devices do not fit, for targets outside `(0, 1)`, and
/// where the largest size has no room in the sets.
pub fn steer_sets(
    sets: &mut IndexSets,
    dropped: Tensor<2>,
    options: SteerOptions,
) -> Result<(), KernelError> {
    const OP: &str = "steer_sets";
    let check = Check::new(OP, &sets.table);
    let [pairs, _] = sets.table.dims();
    let heads: usize = dropped.dims().iter().product();
    check.f32("dropped", &dropped)?;
    if pairs == 0 || heads == 0 || !heads.is_multiple_of(pairs) {
        check.shape("dropped", &dropped, &[pairs, 1])?;
    }
    if !(options.target > 0.0 && options.target < 1.0) {
        return Err(KernelError::Unsupported {
            op: OP,
            argument: "target",
            actual: options.target.to_string(),
            supported: "shares between 0 and 1",
        });
    }
    if options.most == 0 || options.most > sets.width {
        return Err(check.unsupported("largest size", options.most, "what the sets hold"));
    }
    let dropped = dropped.reshape([pairs, heads / pairs]);
    let table = check.take_ints(&mut sets.table);
    let table = <Dispatch as SubsetOps>::steer_sets(
        table.into_dispatch(),
        dropped.into_dispatch(),
        options,
    );
    sets.table = Tensor::from_dispatch(table);
    Ok(())
}

/// [`RetrieveOptions`] as the backends take them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct RetrieveConfig {
    pub(crate) scale: f32,
    pub(crate) options: RetrieveOptions,
    pub(crate) sets: usize,
    pub(crate) width: usize,
    pub(crate) longest: usize,
    pub(crate) measures: bool,
}
