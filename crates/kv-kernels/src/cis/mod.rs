//! Index sets: which tokens a decode step attends to. A step retrieves the tokens of highest
//! attention, or shares the set of an earlier step whose query was similar (PrHS, section IV-A:
//! CIS).
//!
//! On CubeCL devices `strategy.rs` chooses how a call is launched:
//!
//! - a range of few slots: one kernel of one cube a range (`step.rs`), or `score.rs` in parts
//!   before it;
//! - long ranges: the five kernels of `histogram_topk/`, in which many cubes share the work of a
//!   range;
//! - where attention is one cube a range, too: `fused.rs` selects and attends in one launch, behind
//!   `score.rs` where ranges may share.
//!
//! The phases of a step: `visible_range.rs` finds what the step sees, `match_cached_set.rs` whether
//! it shares a cached set, `score_rows.rs` scores slots (`score_mma.rs` by matrix instructions),
//! `select_topk.rs` selects the highest scores by the pivots of `radix_pivots.rs` and notes them in
//! a bitmask (`bitmask.rs`), `compact_bitmask.rs` lists their tokens, and `finish_step.rs` stores
//! the set and writes what the step reads. `sizes.rs` knows what all of it takes of shared memory,
//! `table.rs` how sets lie in memory.

mod args;
mod backend;
#[cfg(feature = "gpu")]
mod bitmask;
#[cfg(feature = "gpu")]
mod blueprint;
#[cfg(feature = "gpu")]
mod call;
#[cfg(feature = "gpu")]
mod compact_bitmask;
#[cfg(feature = "gpu")]
mod finish_step;
#[cfg(feature = "gpu")]
mod fused;
#[cfg(feature = "gpu")]
mod histogram_topk;
#[cfg(feature = "gpu")]
mod kernel_args;
#[cfg(feature = "gpu")]
mod launch;
#[cfg(feature = "gpu")]
mod log_sums;
#[cfg(feature = "gpu")]
mod match_cached_set;
#[cfg(feature = "gpu")]
mod radix_pivots;
mod reference;
#[cfg(feature = "gpu")]
mod score;
#[cfg(feature = "gpu")]
mod score_mma;
#[cfg(feature = "gpu")]
mod score_rows;
#[cfg(feature = "gpu")]
mod scratch;
#[cfg(feature = "gpu")]
mod select_topk;
mod sets;
mod shape;
#[cfg(feature = "gpu")]
mod sizes;
#[cfg(feature = "gpu")]
mod sorted_bounds;
mod steer;
#[cfg(feature = "gpu")]
mod step;
mod strategy;
mod table;
#[cfg(feature = "gpu")]
mod visible_range;

use burn::backend::Dispatch;
use burn::tensor::{Int, Tensor};

use crate::attention::decode::{self, DecodeConfig, DecodeStrategy, Features, ViewKind};
use crate::backend::check::Check;
use crate::{KernelError, Share, SlotRanges};
use args::Retrieval;
use backend::CisOps;
use shape::CisShape;

pub use crate::attention::decode::index_sets::IndexSets;
pub use sets::{RangeSets, SetRule};
pub use strategy::CisStrategy;

const OP: &str = "cis_select";

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
pub struct CisSelectOptions {
    /// Logit scale; `None` means `1 / sqrt(D)`.
    pub scale: Option<f32>,
    /// `r`: neighbours on each side that the best bring along.
    pub radius: usize,
    /// Which steps read the neighbours.
    pub dilation: Dilation,
    /// Steps of a block, within which sets are shared; 1 for never.
    pub block: usize,
    /// Which earlier steps of the block sets are shared with.
    pub earlier: Earlier,
    /// One score of a group's.
    pub reduction: ScoreReduction,
    /// One similarity of a group's.
    pub similarity: SimilarityReduction,
    /// The share of the tokens so far that are hidden, the first ones, but for sinks: see
    /// [`Share::first_seen`].
    pub hidden: Share,
    /// The most slots that any range holds, if known; by default the pool's.
    pub longest: Option<usize>,
    /// Whether [`cis_select`] scores all ranges, whether they retrieve or not, and returns the
    /// log-sum-exp of their queries; [`cis_attention`] measures nothing.
    pub measures: bool,
    /// Which kernels choose.
    pub strategy: CisStrategy,
}

impl CisSelectOptions {
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
/// Returns the log-sum-exp of each query over all visible tokens, `[B, Hq]`, f32, where
/// [`CisSelectOptions::measures`].
///
/// # Errors
/// [`KernelError`] where shapes, dtypes or devices do not fit, for sets that have no room, and for
/// a forced strategy that does not serve.
pub fn cis_select(
    query: Tensor<3>,
    vectors: Tensor<3>,
    keys: Tensor<2>,
    ranges: &SlotRanges,
    newest: Tensor<1, Int>,
    sets: &mut IndexSets,
    options: CisSelectOptions,
) -> Result<Option<Tensor<2>>, KernelError> {
    let [batch, query_heads, _] = query.dims();
    let pools = [&keys, &keys];
    let measures = options.measures;
    let attends = false;
    let step = Step { query, vectors, pools, ranges, newest, options, measures, attends };
    let retrieval = step.prepare(sets)?;
    let (table, set_vectors, log_sum_exp) = <Dispatch as CisOps>::cis_select(retrieval);
    sets.table = Tensor::from_dispatch(table);
    sets.vectors = Tensor::from_dispatch(set_vectors);
    let log_sum_exp = Tensor::<2>::from_dispatch(log_sum_exp);
    Ok(measures.then(|| log_sum_exp.reshape([batch, query_heads])))
}

/// [`cis_select`], and the attention to what it chooses, in one launch with the choice where
/// the device allows it.
///
/// # Shapes
/// As for [`cis_select`]; `values` `[S, D]`. Returns `[B, Hq, D]`.
///
/// # Errors
/// As for [`cis_select`].
pub fn cis_attention(
    query: Tensor<3>,
    vectors: Tensor<3>,
    [keys, values]: [Tensor<2>; 2],
    ranges: &SlotRanges,
    newest: Tensor<1, Int>,
    sets: &mut IndexSets,
    options: CisSelectOptions,
) -> Result<Tensor<3>, KernelError> {
    let pools = [&keys, &values];
    let (measures, attends) = (false, true);
    let step = Step { query, vectors, pools, ranges, newest, options, measures, attends };
    let retrieval = step.prepare(sets)?;
    let CisConfig { scale, longest, .. } = retrieval.config;
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
        strategy: DecodeStrategy::Auto,
    };
    let values = values.into_dispatch();
    let (table, set_vectors, output) =
        <Dispatch as CisOps>::cis_attention(retrieval, values, attention);
    sets.table = Tensor::from_dispatch(table);
    sets.vectors = Tensor::from_dispatch(set_vectors);
    Ok(Tensor::from_dispatch(output))
}

/// What a step chooses with.
struct Step<'a> {
    query: Tensor<3>,
    vectors: Tensor<3>,
    /// Keys and values; the keys twice where no values are read.
    pools: [&'a Tensor<2>; 2],
    ranges: &'a SlotRanges,
    newest: Tensor<1, Int>,
    options: CisSelectOptions,
    measures: bool,
    attends: bool,
}

impl Step<'_> {
    /// Checks the step, and takes the sets' tensors.
    fn prepare(self, sets: &mut IndexSets) -> Result<Retrieval<Dispatch>, KernelError> {
        let Self { query, vectors, pools: [keys, values], ranges, newest, .. } = self;
        let (options, measures) = (self.options, self.measures);
        let check = Check::new(OP, &query);
        let [batch, _, head_dim] = query.dims();
        let [total_kv_heads, parts, length] = vectors.dims();
        decode::check(&check, OP, &query, [keys, values], None, ranges)?;
        check.same_dtype("vectors", &vectors, "the query's dtype", query.dtype())?;
        let [_, kv_heads] = ranges.offsets.dims();
        check.shape("vectors", &vectors, &[batch * kv_heads, parts, length])?;
        check.shape("sets' vectors", &sets.vectors, &[total_kv_heads, sets.sets, parts, length])?;
        check.shape("sets", &sets.table, &[total_kv_heads, table::row(sets.sets, sets.width)])?;
        check.shape("newest", &newest, &[batch])?;
        check.int("newest", &newest)?;
        if options.block == 0 {
            return Err(check.unsupported("block", 0, "at least 1"));
        }
        if options.block > 1 && options.block > sets.sets {
            return Err(check.unsupported("sets", sets.sets, "as many as steps of a block"));
        }
        let [slots, _] = keys.dims();
        let config = CisConfig {
            scale: options.scale.unwrap_or_else(|| 1.0 / (head_dim as f32).sqrt()),
            options,
            sets: sets.sets,
            width: sets.width,
            longest: options.longest.unwrap_or(slots).min(slots),
            measures,
        };
        let attends = self.attends.then(|| config.longest.min(sets.most()));
        let group = query.dims()[1] / kv_heads;
        let shape = config.shape([head_dim, total_kv_heads, group], attends);
        check.strategy(options.strategy, query.dtype(), &shape)?;
        Ok(Retrieval {
            query: query.into_dispatch(),
            vectors: vectors.into_dispatch(),
            keys: keys.clone().into_dispatch(),
            offsets: ranges.offsets.clone().into_dispatch(),
            lengths: ranges.lengths.clone().into_dispatch(),
            newest: newest.into_dispatch(),
            table: check.take_ints(&mut sets.table).into_dispatch(),
            set_vectors: check.take(&mut sets.vectors).into_dispatch(),
            config,
        })
    }
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
    let [total_kv_heads, _] = sets.table.dims();
    let heads: usize = dropped.dims().iter().product();
    check.f32("dropped", &dropped)?;
    if total_kv_heads == 0 || heads == 0 || !heads.is_multiple_of(total_kv_heads) {
        check.shape("dropped", &dropped, &[total_kv_heads, 1])?;
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
    let dropped = dropped.reshape([total_kv_heads, heads / total_kv_heads]);
    let table = check.take_ints(&mut sets.table);
    let table =
        <Dispatch as CisOps>::steer_sets(table.into_dispatch(), dropped.into_dispatch(), options);
    sets.table = Tensor::from_dispatch(table);
    Ok(())
}

/// [`CisSelectOptions`] as the backends take them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct CisConfig {
    pub(crate) scale: f32,
    pub(crate) options: CisSelectOptions,
    pub(crate) sets: usize,
    pub(crate) width: usize,
    pub(crate) longest: usize,
    pub(crate) measures: bool,
}

impl CisConfig {
    /// What the choice of the kernels asks of a call that attends to so many slots, if any.
    fn shape(
        &self,
        [head_dim, total_kv_heads, group]: [usize; 3],
        attends: Option<usize>,
    ) -> CisShape {
        CisShape {
            head_dim,
            total_kv_heads,
            group,
            longest: self.longest,
            sets: self.sets,
            width: self.width,
            shares: self.options.block > 1,
            measures: self.measures,
            attends,
        }
    }
}
