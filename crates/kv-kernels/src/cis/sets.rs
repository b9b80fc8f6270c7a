//! Index sets on the host: their rules, their allocation, and reading them back from the device.

use burn::tensor::{DType, Device, Int, Tensor};

use super::table;
use crate::KernelError;
use crate::attention::decode::index_sets::IndexSets;
use crate::backend::check::Check;
use crate::components::sentinels::{ALL_SLOTS, NEW_SET, NO_BLOCK};
use crate::slots::scatter_rows::{assign_int_rows, assign_rows};

/// The parameters of CIS for one head range: how many tokens its steps retrieve, and when they
/// share a set.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SetRule {
    /// First tokens of the sequence, which every step attends to.
    pub sinks: usize,
    /// Last tokens, which every step attends to; the newest token counts, so at least 1.
    pub locals: usize,
    /// `k` of the paper's top-k: tokens between sinks and locals that a retrieval takes, at least
    /// 1.
    pub top: usize,
    /// `m / k`, the share of dilated tokens: the `m` highest scores, rounded down, bring their
    /// neighbours along ([`CisSelectOptions::radius`](crate::CisSelectOptions::radius) on each
    /// side).
    pub dilated: f32,
    /// `τ`, the similarity threshold: a step shares a set if the cosine is above it. At 1 or more
    /// no step shares, at −1 or less every step does.
    pub threshold: f32,
    /// The wanted number of tokens of a set, neighbours included. After each retrieval, `k` moves
    /// by half the difference from this number. `None` leaves `k` as it is.
    pub wanted: Option<usize>,
}

impl SetRule {
    /// `m`: how many of the highest scores bring their neighbours along.
    pub fn best(self) -> usize {
        best_of(self.top, self.dilated)
    }

    /// The most tokens of a set, `k + 2 r m`, with `radius` neighbours on each side.
    pub fn width(self, radius: usize) -> usize {
        self.top + 2 * radius * self.best()
    }
}

/// Counters of a range's steps, and the set that its last step read. [`IndexSets::read`] returns
/// it.
#[derive(Debug, Clone, PartialEq)]
pub struct RangeSets {
    /// Steps so far.
    pub steps: u64,
    /// Steps that retrieved.
    pub retrieved: u64,
    /// Tokens attended to, summed over all steps.
    pub tokens: u64,
    /// Whether the last step retrieved a set (`true`) or shared one (`false`); `None` where it read
    /// all tokens.
    pub retrieves: Option<bool>,
    /// The number, within the block, of the set that the last step retrieved or shared; `None`
    /// where the step read all tokens.
    pub number: Option<usize>,
    /// The tokens between sinks and locals that the last step read: indices, ascending.
    pub set: Vec<u32>,
    /// Slots at the start of the range that the last step read.
    pub sinks: usize,
    /// The first local slot of the last step, counted from the range's first slot. The step read it
    /// and all later slots.
    pub local: usize,
    /// The first slot after the sinks that the last step could see, counted from the range's first
    /// slot.
    pub seen: usize,
    /// By how much a token's index exceeds its slot: the number of tokens freed before it.
    pub freed: usize,
    /// `k`: tokens that the next retrieval takes.
    pub top: usize,
    /// The share of attention on visible tokens that the last measured step dropped, exactly, as a
    /// mean over the range's queries. 0 before the first such step, and where sizes are not
    /// steered.
    pub measured: f32,
}

impl RangeSets {
    /// Slots that the last step attended to, counted from the first slot of a range of `length`
    /// slots.
    pub fn slots(&self, length: usize) -> impl Iterator<Item = usize> + '_ {
        let listed = self.set.iter().map(|token| *token as usize - self.freed);
        (0..self.sinks.min(length)).chain(listed).chain(self.local..length)
    }
}

impl IndexSets {
    /// Allocates index sets, one head range for each of `rules`. A range has room for `sets` steps
    /// of a block, with a set of up to `width` tokens each, and `parts` vectors of `length` numbers
    /// by which steps are compared. A larger set loses its last tokens.
    pub fn new(
        rules: &[SetRule],
        sets: usize,
        width: usize,
        parts: usize,
        length: usize,
        device: &Device,
    ) -> Self {
        let (sets, width) = (sets.max(1), width.max(1));
        let (ranges, row) = (rules.len(), table::row(sets, width));
        let mut values = vec![0i32; ranges * row];
        for (own, rule) in values.chunks_exact_mut(row).zip(rules) {
            let count = |count: usize| i32::try_from(count).unwrap_or(i32::MAX);
            own[table::BLOCK] = NO_BLOCK;
            own[table::SINKS] = count(rule.sinks);
            own[table::LOCALS] = count(rule.locals.max(1));
            own[table::TOP] = count(rule.top.max(1));
            own[table::DILATED] = rule.dilated.to_bits() as i32;
            own[table::WANTED] = count(rule.wanted.unwrap_or_default());
            own[table::THRESHOLD] = rule.threshold.to_bits() as i32;
        }
        // The data is made flat: some devices pad the rows of a matrix.
        let values = Tensor::<1, Int>::from_data(values.as_slice(), (device, DType::I32));
        Self {
            table: values.reshape([ranges, row]),
            vectors: Tensor::zeros([ranges, sets, parts, length], (device, DType::F32)),
            sets,
            width,
            always: most(rules.iter().map(|rule| rule.sinks + rule.locals.max(1))),
            top: most(rules.iter().map(|rule| rule.top.max(rule.wanted.unwrap_or_default()))),
        }
    }

    /// Makes index sets from the saved contents of [`Self::tensors`]. `vectors` has the given
    /// shape. `tokens` has one number for each range: its sets name tokens below it.
    ///
    /// # Errors
    /// [`KernelError::Unsupported`] where the contents do not fit each other.
    pub fn from_saved(
        table: &[i32],
        vectors: &[f32],
        [ranges, sets, parts, length]: [usize; 4],
        tokens: &[usize],
        device: &Device,
    ) -> Result<Self, KernelError> {
        let row = table.len() / ranges.max(1);
        let width = table::width(sets, row);
        let fits = width > 0
            && tokens.len() == ranges
            && table.len() == ranges * table::row(sets, width)
            && Some(vectors.len())
                == [ranges, sets, parts, length].iter().try_fold(1usize, |a, b| a.checked_mul(*b))
            && table
                .chunks_exact(row)
                .zip(tokens)
                .all(|(own, tokens)| table::is_sound(own, sets, width, *tokens));
        if !fits {
            return Err(KernelError::Unsupported {
                op: "index_sets",
                argument: "saved sets",
                actual: format!("{} and {} numbers", table.len(), vectors.len()),
                supported: "ascending tokens of their ranges, and a vector for each set",
            });
        }
        let rows = || table.chunks_exact(row);
        let always =
            most(rows().map(|own| own[table::SINKS] as usize + own[table::LOCALS] as usize));
        let top = most(rows().map(|own| own[table::TOP].max(own[table::WANTED]) as usize));
        let table = Tensor::<1, Int>::from_data(table, (device, DType::I32));
        let vectors = Tensor::<1>::from_data(vectors, (device, DType::F32));
        Ok(Self {
            table: table.reshape([ranges, row]),
            vectors: vectors.reshape([ranges, sets, parts, length]),
            sets,
            width,
            always,
            top,
        })
    }

    /// The same sets with room for `width` tokens each, if that is more.
    #[must_use]
    pub fn widened(self, width: usize) -> Self {
        if width <= self.width {
            return self;
        }
        let [ranges, _] = self.table.dims();
        let head = table::FIELDS + self.sets * table::SET_FIELDS;
        // One list for each set, and one for the step's own choice.
        let lists = self.sets + 1;
        let tokens = self.table.clone().narrow(1, head, lists * self.width);
        let more = [ranges, lists, width - self.width];
        let more = Tensor::<3, Int>::zeros(more, (&self.table.device(), DType::I32));
        let tokens = Tensor::cat(vec![tokens.reshape([ranges, lists, self.width]), more], 2);
        let tokens = tokens.reshape([ranges, lists * width]);
        let table = Tensor::cat(vec![self.table.narrow(1, 0, head), tokens], 1);
        Self { table, width, ..self }
    }

    /// Joins the ranges of several index sets, in order.
    ///
    /// # Errors
    /// [`KernelError::Shape`] where the numbers of sets or the shapes of vectors differ.
    pub fn concat(parts: Vec<Self>) -> Result<Self, KernelError> {
        let width = parts.iter().map(|part| part.width).max().unwrap_or_default();
        let first = parts[0].vectors.dims();
        let check = Check::new("index_sets", &parts[0].table);
        for part in &parts {
            let expected = [part.vectors.dims()[0], first[1], first[2], first[3]];
            check.shape("vectors", &part.vectors, &expected)?;
        }
        let sets = parts[0].sets;
        let always = most(parts.iter().map(|part| part.always));
        let top = most(parts.iter().map(|part| part.top));
        let parts = parts.into_iter().map(|part| part.widened(width));
        let (tables, vectors) = parts.map(|part| (part.table, part.vectors)).unzip();
        Ok(Self {
            table: Tensor::cat(tables, 0),
            vectors: Tensor::cat(vectors, 0),
            sets,
            width,
            always,
            top,
        })
    }

    /// These sets with room for all ranges that `like` has room for: [`Self::accepts`] then takes
    /// every range that one of the two has taken before.
    #[must_use]
    pub fn widened_like(self, like: &Self) -> Self {
        let (always, top) = (self.always.max(like.always), self.top.max(like.top));
        Self { always, top, ..self.widened(like.width) }
    }

    /// Whether [`Self::replace`] can put these ranges in the place of some of its own: their
    /// vectors have equal shapes, and their sets and rules need no more room.
    pub fn accepts(&self, from: &Self) -> bool {
        self.vectors.dims()[1..] == from.vectors.dims()[1..]
            && from.vectors.dims()[0] <= self.vectors.dims()[0]
            && from.width <= self.width
            && from.always <= self.always
            && from.top <= self.top
    }

    /// Puts the ranges of other index sets in the place of those from `first` on, in place: steps
    /// that were recorded read and write the tensors of these sets.
    ///
    /// # Errors
    /// [`KernelError::Unsupported`] for sets that [`Self::accepts`] refuses, and for ranges that
    /// are not there.
    pub fn replace(&mut self, first: usize, from: Self) -> Result<(), KernelError> {
        let [ranges, ..] = self.vectors.dims();
        let behind = first.saturating_add(from.vectors.dims()[0]);
        if !self.accepts(&from) || behind > ranges {
            return Err(KernelError::Unsupported {
                op: "index_sets",
                argument: "ranges to put in",
                actual: format!(
                    "{first} to {behind}, {:?}, width {}",
                    from.vectors.dims(),
                    from.width
                ),
                supported: "ranges that are there, vectors of equal shapes, and no larger sets",
            });
        }
        let from = from.widened(self.width);
        assign_int_rows(&mut self.table, first, from.table)?;
        assign_rows(&mut self.vectors, first, from.vectors)
    }

    /// The contents to save: the table `[P, ..]`, 32-bit, and the vectors `[P, sets, parts,
    /// length]`, f32.
    pub fn tensors(&self) -> (&Tensor<2, Int>, &Tensor<4>) {
        (&self.table, &self.vectors)
    }

    /// These sets on another device.
    #[must_use]
    pub fn to_device(self, device: &Device) -> Self {
        Self {
            table: self.table.to_device(device),
            vectors: self.vectors.to_device(device),
            ..self
        }
    }

    /// A copy in buffers of its own, which kernels change without changing these sets.
    #[must_use]
    pub fn copied(&self) -> Self {
        let (table, vectors) =
            (self.table.clone().add_scalar(0), self.vectors.clone().mul_scalar(1.0));
        Self { table, vectors, ..*self }
    }

    /// Bytes on the device.
    pub fn bytes(&self) -> usize {
        let numbers: [usize; 2] =
            [self.table.dims().iter().product(), self.vectors.dims().iter().product()];
        numbers.iter().sum::<usize>() * size_of::<f32>()
    }

    /// Sets that a range has room for.
    pub fn sets(&self) -> usize {
        self.sets
    }

    /// The most tokens that a set has room for.
    pub fn width(&self) -> usize {
        self.width
    }

    /// The most tokens that a step attends to: sinks, locals, and a set. (A range with fewer tokens
    /// than a retrieval takes is read whole.)
    pub fn most(&self) -> usize {
        self.always + self.width.max(self.top)
    }

    /// Reads the counters and last sets of all ranges. Waits for the device.
    ///
    /// # Errors
    /// [`KernelError::Unsupported`] where the table does not hold 32-bit integers.
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
                ALL_SLOTS => None,
                decided => Some(decided == NEW_SET),
            },
            number: match row[table::DECIDED] {
                ALL_SLOTS => None,
                NEW_SET => (count(table::SETS) as usize).checked_sub(1),
                shared => usize::try_from(shared).ok(),
            },
            set: set.iter().map(|token| *token as u32).collect(),
            sinks: count(table::SINKS) as usize,
            local: count(table::LOCAL) as usize,
            seen: count(table::SEEN) as usize,
            freed: count(table::FREED) as usize,
            top: count(table::TOP) as usize,
            measured: number(table::MEASURED),
        }
    }
}

fn most(numbers: impl Iterator<Item = usize>) -> usize {
    numbers.max().unwrap_or_default()
}

/// How many of the `top` highest scores are dilated: `top * share`, rounded down after the f32
/// error of the product is made up for.
pub(crate) fn best_of(top: usize, share: f32) -> usize {
    ((top as f32 * share + table::ROUNDING) as usize).min(top)
}
