//! Index sets: the tokens that a decode step attends to (PrHS, section IV-A: CIS). A step attends
//! to the first tokens (sinks), to the last tokens (locals), and to a set between them. A step
//! *retrieves* its set: it scores all keys and takes the `k` highest scores. Or it *shares* the set
//! of an earlier step of its block, where a cosine between vectors of the two steps is above `τ`. A
//! set is *dilated*: the `m` highest scores bring `r` neighbours on each side along. In shapes, `P`
//! is `B * Hkv`, the head ranges.
//!
//! On CubeCL devices `strategy.rs` chooses how a call is launched:
//!
//! - short ranges: one kernel with one cube a range (`step.rs`), which scores too, or after
//!   `score.rs`, in which several cubes score a range;
//! - long ranges: the five kernels of `histogram_topk/`, in which several cubes share a range;
//! - where attention takes one cube a range: `fused.rs`, which selects and attends in one launch,
//!   after `score.rs` where steps may share sets.
//!
//! A step has these phases. `visible_range.rs` finds the slots that it sees. `match_cached_set.rs`
//! decides whether it shares a cached set. `score_rows.rs` scores slots, or `score_mma.rs` by
//! matrix instructions. `select_topk.rs` selects the highest scores with the pivots of
//! `radix_pivots.rs`, and notes them in a bitmask (`bitmask.rs`). `compact_bitmask.rs` lists their
//! tokens. `finish_step.rs` stores the set, and writes which slots the step attends to. `sizes.rs`
//! computes the shared memory of all phases, and `table.rs` lays out sets in memory.

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

use crate::attention::decode::{
    self, DecodeConfig, DecodeStrategy, Features, GroupLimit, ViewKind,
};
use crate::backend::check::Check;
use crate::{KernelError, Share, SlotRanges};
use args::Retrieval;
use backend::CisOps;
use shape::CisShape;

pub use crate::attention::decode::index_sets::IndexSets;
pub use sets::{RangeSets, SetRule};
pub use strategy::CisStrategy;

const OP: &str = "cis_select";

/// The most queries that score the keys of a range: the query heads of a key-value head, times the
/// queries of a vote.
const SCORING: GroupLimit = GroupLimit { count: 64, said: "1 to 64" };

/// How the scores of a group's query heads are reduced to one score a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ScoreReduction {
    /// The sum of the query heads' attention weights.
    Sum,
    /// The largest of the query heads' attention weights.
    Max,
}

/// How the cosines of a range's vectors are reduced to one similarity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SimilarityReduction {
    /// The mean of the cosines.
    Mean,
    /// The least of the cosines.
    Min,
}

/// The earlier steps of its block with which a step may share a set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Earlier {
    /// All earlier steps. A step that shared a set passes that set on.
    Any,
    /// The earlier steps that retrieved.
    Retrieved,
}

/// The steps that read the neighbours of a dilated set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dilation {
    /// Only the steps that share the set. The step that retrieves it reads the `k` highest scores
    /// alone.
    Shared,
    /// The steps that share the set, and the step that retrieves it.
    All,
}

/// What a step retrieves, and when it shares a set. The numbers of each range are in [`SetRule`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CisSelectOptions {
    /// Logit scale; `None` means `1 / sqrt(D)`.
    pub scale: Option<f32>,
    /// `r`, the dilation radius: neighbours on each side that each of the `m` highest scores adds.
    pub radius: usize,
    /// Which steps read the neighbours.
    pub dilation: Dilation,
    /// Decode steps of a block. Sets are shared within a block; 1 means never.
    pub block: usize,
    /// The earlier steps of the block with which a step may share.
    pub earlier: Earlier,
    /// Whether a step that shares a set also reads the tokens that have left the locals since the
    /// set was retrieved, at most `block − 1` of them. They were no candidates of the set. Ours.
    pub tail: bool,
    /// How the scores of a group's query heads become one.
    pub reduction: ScoreReduction,
    /// How the cosines of a range's vectors become one.
    pub similarity: SimilarityReduction,
    /// The share of the tokens so far that a step does not see, from the first token on, except
    /// sinks: see [`Share::first_seen`].
    pub hidden: Share,
    /// An upper bound of the slots of every range; `None` means the slots of the pool.
    pub longest: Option<usize>,
    /// Whether [`cis_select`] scores all ranges, even where they share, and returns the
    /// log-sum-exps of their queries. [`cis_attention`] ignores this.
    pub measures: bool,
    /// The kernels that choose.
    pub strategy: CisStrategy,
}

impl CisSelectOptions {
    /// Whether steps that retrieve read the `k` highest scores alone, not their dilated set.
    pub(crate) fn reads_choice(&self) -> bool {
        self.dilation == Dilation::Shared && self.radius > 0
    }

    /// The most tokens that a step reads because they have left the locals since the retrieval.
    pub fn longest_tail(&self) -> usize {
        if self.tail { self.block.saturating_sub(1) } else { 0 }
    }
}

/// Chooses the slots that a decode step attends to, and writes them into `sets`. For each range,
/// the step shares the set of the most recent step of the block whose similarity is above `τ`.
/// Where there is none, it retrieves: it takes the `k` tokens of highest attention between sinks
/// and locals, ties by the lowest index, and adds the neighbours of the `m` highest to the set for
/// steps that share. A range with at most `k` tokens between sinks and locals is read whole.
/// [`crate::SlotView::Sets`] makes [`decode_attention`](crate::decode_attention) read the result.
///
/// A range's slots hold its tokens in order. The first tokens after the sinks may have been freed.
///
/// # Shapes
/// - `query`: `[B, Hq, D]`; `vectors`: `[P, parts, length]`, in the query's dtype, the vectors
///   whose cosines make the similarity, with `P = B * Hkv`. Where several queries choose together,
///   `query` has them side by side, as further query heads: up to 64 for each key-value head
/// - `keys`: `[S, D]`; `newest`: `[B]`, 32-bit, the index of each sequence's newest token
///
/// Returns the log-sum-exp of each query over all visible tokens, `[B, Hq]`, f32, if
/// [`CisSelectOptions::measures`].
///
/// # Errors
/// [`KernelError`] where shapes, dtypes or devices do not fit, for a `block` of 0 or of more steps
/// than `sets` has room for, and for a forced strategy that cannot run the call.
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

/// Chooses slots as [`cis_select`] does, and attends to them: in one launch where the device and
/// the ranges allow it.
///
/// # Shapes
/// The shapes of [`cis_select`], and `values` `[S, D]`. Returns the attention output, `[B, Hq, D]`.
///
/// # Errors
/// The errors of [`cis_select`].
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
        longest: longest.min(sets.most() + options.longest_tail()),
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

/// The arguments of a step, before they are checked.
struct Step<'a> {
    query: Tensor<3>,
    vectors: Tensor<3>,
    /// Keys and values. Where no values are read, the keys twice.
    pools: [&'a Tensor<2>; 2],
    ranges: &'a SlotRanges,
    newest: Tensor<1, Int>,
    options: CisSelectOptions,
    measures: bool,
    attends: bool,
}

impl Step<'_> {
    /// Checks the arguments, and takes the tensors out of `sets`.
    fn prepare(self, sets: &mut IndexSets) -> Result<Retrieval<Dispatch>, KernelError> {
        let Self { query, vectors, pools: [keys, values], ranges, newest, .. } = self;
        let (options, measures) = (self.options, self.measures);
        let check = Check::new(OP, &query);
        let [batch, _, head_dim] = query.dims();
        let [total_kv_heads, parts, length] = vectors.dims();
        let most = if self.attends { decode::ATTENDING } else { SCORING };
        decode::check(&check, OP, &query, [keys, values], None, ranges, most)?;
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
        let most = sets.most() + options.longest_tail();
        let attends = self.attends.then(|| config.longest.min(most));
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

/// How [`steer_sets`] changes the sizes of sets.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SteerOptions {
    /// The share of attention that steps shall drop, between 0 and 1.
    pub target: f32,
    /// The change of a size's logarithm for each unit of the relative error `dropped / target − 1`.
    pub gain: f32,
    /// The largest `k`.
    pub most: usize,
}

/// Changes the number `k` of tokens that the next retrieval of each range finds, in place: `k ← k ·
/// exp(e)`, with `e = gain · (dropped / target − 1)` limited to −1 ≤ e ≤ 1. `dropped` counts as a
/// mean over the range's queries. Sets grow where a step has dropped more than the target.
///
/// # Shapes
/// `dropped` `[B, Hq]`, f32: the share of attention on the tokens that the step did not read.
///
/// # Errors
/// [`KernelError`] where shapes, dtypes or devices do not fit, for a target outside `(0, 1)`, and
/// for a `most` of 0 or of more tokens than a set has room for.
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
    /// The shape by which kernels are chosen. `attends` is an upper bound of the slots that the
    /// call attends to, if it attends.
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
