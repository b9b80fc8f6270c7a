//! Which tokens a decode step attends to: those of highest attention, retrieved or shared with an earlier step
//! of similar query (PrHS, section IV-A).
//!
//! On CubeCL devices a call is one kernel where a cube takes a range, else two: `score.rs` in parts, then
//! `choose.rs` a cube a range. `decide.rs` says which ranges share, `radix.rs` finds the highest.

#[cfg(feature = "gpu")]
mod choose;
#[cfg(feature = "gpu")]
mod decide;
#[cfg(feature = "gpu")]
mod kernel;
#[cfg(feature = "gpu")]
pub(crate) mod launch;
#[cfg(feature = "gpu")]
mod radix;
pub(crate) mod reference;
#[cfg(feature = "gpu")]
mod score;
pub(crate) mod table;

use burn::backend::Dispatch;
use burn::tensor::{DType, Device, Int, Tensor};

use crate::check::Check;
use crate::decode_attention;
use crate::extension::{Retrieval, SlotOps};
use crate::{KernelError, SlotRanges};

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

/// Index sets of a layer's ranges, and of each set the vectors that later steps are compared with.
#[derive(Debug, Clone)]
pub struct IndexSets {
    pub(crate) table: Tensor<2, Int>,
    pub(crate) vectors: Tensor<4>,
    sets: usize,
    width: usize,
}

/// What the sets of a range have come to ([`IndexSets::read`]).
#[derive(Debug, Clone, PartialEq)]
pub struct RangeSets {
    /// Steps so far.
    pub steps: u64,
    /// Steps that retrieved.
    pub retrieved: u64,
    /// Tokens attended to, over all steps.
    pub tokens: u64,
    /// Whether the last step retrieved a set; `None` where it read all tokens.
    pub retrieves: Option<bool>,
    /// The last step's set: token indices, ascending, those that are no longer read left out.
    pub set: Vec<u32>,
    /// First slot that the last step read from behind the set, counted from the range's first.
    pub local: usize,
    /// The norm of the largest difference between the last step's vectors and its set's; 0 where it
    /// retrieved.
    pub distance: f32,
    /// The largest norm of a key that was seen when the set was retrieved.
    pub key_norm: f32,
    /// The most attention that any query of the set's own does not give to what the block's steps surely
    /// attend to.
    pub dropped: f32,
}

impl IndexSets {
    /// Room for up to `sets` sets a block of steps, of up to `width` tokens each, for `ranges` ranges whose
    /// steps are compared by `parts` vectors of `length` numbers.
    pub fn new(
        ranges: usize,
        sets: usize,
        width: usize,
        parts: usize,
        length: usize,
        device: &Device,
    ) -> Self {
        let (sets, width) = (sets.max(1), width.max(1));
        let row = table::row(sets, width);
        let mut values = vec![0i32; ranges * row];
        values.iter_mut().step_by(row).for_each(|block| *block = -1);
        // Flat first: some devices pad the rows of what they are given as a matrix.
        let values = Tensor::<1, Int>::from_data(values.as_slice(), (device, DType::I32));
        Self {
            table: values.reshape([ranges, row]),
            vectors: Tensor::zeros([ranges, sets, parts, length], (device, DType::F32)),
            sets,
            width,
        }
    }

    /// From saved tensors ([`Self::tensors`]).
    ///
    /// # Errors
    /// [`KernelError::Shape`], [`KernelError::Dtype`] where they do not fit each other.
    pub fn from_tensors(table: Tensor<2, Int>, vectors: Tensor<4>) -> Result<Self, KernelError> {
        let [ranges, row] = table.dims();
        let [_, sets, parts, length] = vectors.dims();
        let check = Check::new("index_sets", &table);
        check.int("table", &table)?;
        check.f32("vectors", &vectors)?;
        check.shape("vectors", &vectors, &[ranges, sets, parts, length])?;
        let width = row.saturating_sub(table::FIELDS) / sets.max(1);
        let width = width.saturating_sub(table::SET_FIELDS);
        if width == 0 || row != table::row(sets, width) {
            let expected = vec![ranges, table::row(sets.max(1), width.max(1))];
            return Err(KernelError::Shape {
                op: "index_sets",
                argument: "table",
                expected,
                actual: vec![ranges, row],
            });
        }
        Ok(Self { table, vectors, sets, width })
    }

    /// The table `[P, ..]`, 32-bit, and the vectors `[P, sets, parts, length]`, f32, to be saved.
    pub fn tensors(&self) -> (&Tensor<2, Int>, &Tensor<4>) {
        (&self.table, &self.vectors)
    }

    /// Sets that a range remembers.
    pub fn sets(&self) -> usize {
        self.sets
    }

    /// The most tokens of a set.
    pub fn width(&self) -> usize {
        self.width
    }

    /// What the sets of every range have come to. Waits for the device.
    ///
    /// # Errors
    /// [`KernelError::Unsupported`] for a table that does not hold integers.
    pub fn read(&self) -> Result<Vec<RangeSets>, KernelError> {
        let values = self.table.to_data().try_to_vec::<i32>();
        let values = values.map_err(|error| KernelError::Unsupported {
            op: "index_sets",
            argument: "table",
            actual: format!("{error:?}"),
            supported: "32-bit integers",
        })?;
        let rows = values.chunks_exact(table::row(self.sets, self.width));
        Ok(rows.map(|row| self.read_row(row)).collect())
    }

    fn read_row(&self, row: &[i32]) -> RangeSets {
        let count = |field: usize| u64::try_from(row[field]).unwrap_or(0);
        let first = count(table::FIRST) as usize;
        let set = row.get(first..first + count(table::READ) as usize).unwrap_or(&[]);
        let number = |field: usize| f32::from_bits(row[field] as u32);
        RangeSets {
            steps: count(table::STEPS),
            retrieved: count(table::RETRIEVED),
            tokens: (count(table::TOKENS_HIGH) << table::TOKEN_BITS) + count(table::TOKENS),
            retrieves: match row[table::DECIDED] {
                table::ALL => None,
                decided => Some(decided == table::RETRIEVES),
            },
            set: set.iter().map(|token| *token as u32).collect(),
            local: count(table::LOCAL) as usize,
            distance: number(table::DISTANCE),
            key_norm: number(table::OWN_KEY_NORM),
            dropped: number(table::OWN_DROPPED),
        }
    }
}

/// What a step retrieves and when it shares.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RetrieveOptions {
    /// Logit scale; `None` means `1 / sqrt(D)`.
    pub scale: Option<f32>,
    /// `k`: tokens between sinks and locals that a retrieval finds.
    pub top: usize,
    /// `m`: how many of them, the highest, bring their neighbours along.
    pub dilated: usize,
    /// `r`: neighbours on each side.
    pub radius: usize,
    /// First tokens, always attended to.
    pub sinks: usize,
    /// Last tokens, always attended to; at least the newest.
    pub locals: usize,
    /// Steps of a block, within which sets are shared; 1 for never.
    pub block: usize,
    /// `τ`: sets are shared whose vectors' cosine is above it. From 1 on none is, from -1 down all are.
    pub threshold: f32,
    /// One score of a group's.
    pub reduction: ScoreReduction,
    /// One similarity of a group's.
    pub similarity: SimilarityReduction,
    /// The share of the tokens so far, in units of 2⁻³², whose first ones are out of sight, but for sinks:
    /// token number `t` sees from number `share * t` on.
    pub hidden: u32,
    /// Whether to note what bounds on the dropped attention take.
    pub certified: bool,
    /// The most slots that any range holds, if known; by default the pool's.
    pub longest: Option<usize>,
}

impl RetrieveOptions {
    /// The most tokens of a set.
    pub fn width(&self) -> usize {
        self.top + 2 * self.radius * self.dilated.min(self.top)
    }
}

/// Chooses what a step attends to, in place: shares the most recent set of the block whose vectors are similar to
/// the step's, else retrieves the `top` tokens of highest attention between sinks and locals, ties by the lowest
/// index, and with them the neighbours of the best. [`crate::SlotView::Sets`] attends to it.
///
/// A range's slots are its tokens in order, but for first ones behind the sinks that may have been freed.
///
/// # Shapes
/// - `query`: `[B, Hq, D]`; `vectors`: `[P, parts, length]`, in the query's dtype, what similarity is of
/// - `keys`: `[S, D]`; `newest`: `[B]`, 32-bit, the newest tokens' indices
///
/// Returns the log-sum-exp of each query over all tokens in sight, `[B, Hq]`, f32, where `measures`: then all
/// ranges are scored, whether they retrieve or not.
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
    let check = Check::new(OP, &query);
    let [batch, query_heads, head_dim] = query.dims();
    let [pairs, parts, length] = vectors.dims();
    decode_attention::check(&check, OP, &query, [&keys, &keys], None, ranges)?;
    check.same_dtype("vectors", &vectors, "the query's dtype", query.dtype())?;
    let [_, kv_heads] = ranges.offsets.dims();
    check.shape("vectors", &vectors, &[batch * kv_heads, parts, length])?;
    check.shape("sets' vectors", &sets.vectors, &[pairs, sets.sets, parts, length])?;
    check.shape("sets", &sets.table, &[pairs, table::row(sets.sets, sets.width)])?;
    check.shape("newest", &newest, &[batch])?;
    check.int("newest", &newest)?;
    if options.width() > sets.width {
        return Err(check.unsupported("tokens of a set", options.width(), "what the sets hold"));
    }
    for (argument, value) in
        [("top", options.top), ("locals", options.locals), ("block", options.block)]
    {
        if value == 0 {
            return Err(check.unsupported(argument, 0, "at least 1"));
        }
    }
    if options.block > 1 && options.block > sets.sets {
        return Err(check.unsupported("sets", sets.sets, "as many as steps of a block"));
    }
    if options.threshold.is_nan() {
        return Err(KernelError::Unsupported {
            op: OP,
            argument: "threshold",
            actual: "NaN".into(),
            supported: "numbers",
        });
    }
    let [slots, _] = keys.dims();
    let longest = options.longest.unwrap_or(slots).min(slots);
    let retrieval = Retrieval {
        query: query.into_dispatch(),
        vectors: vectors.into_dispatch(),
        keys: keys.into_dispatch(),
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
    };
    let (table, set_vectors, log_sum_exp) = <Dispatch as SlotOps>::retrieve_slots(retrieval);
    sets.table = Tensor::from_dispatch(table);
    sets.vectors = Tensor::from_dispatch(set_vectors);
    let log_sum_exp = Tensor::<2>::from_dispatch(log_sum_exp);
    Ok(measures.then(|| log_sum_exp.reshape([batch, query_heads])))
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
