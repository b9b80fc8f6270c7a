//! Causal attention of prompts on CPUs, by matrix products and vector instructions, on all cores.
//!
//! A core takes [`BLOCK`] queries of one head at a time:
//!
//! 1. The logits of the keys that any of the queries sees are a matrix product.
//! 2. Each query's hidden keys get −∞, and the exponentials of its row are taken relative to the
//!    row's largest logit, and summed.
//! 3. A second product weights the values. Its rows are divided by the sums.

use std::ops::Range;

use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

use super::Mask;
use crate::components::host_product::{Factor, Rows, product};
use crate::components::host_vectors::{exponentials, maximum, sum};

/// Queries that a core takes at a time. More would make more logits behind the diagonal, which
/// count for nothing; fewer would read keys and values more often.
const BLOCK: usize = 64;

/// One call's arguments, as slices in row-major order.
#[derive(Debug, Clone, Copy)]
pub(super) struct Prompt<'a> {
    /// `[B, Hq, N, D]`
    pub(super) query: &'a [f32],
    /// `[B, Hkv, T, D]`
    pub(super) keys: &'a [f32],
    /// `[B, Hkv, T, D]`
    pub(super) values: &'a [f32],
    /// `N`
    pub(super) queries: usize,
    /// `T`
    pub(super) tokens: usize,
    /// `Hq / Hkv`
    pub(super) group: usize,
    /// `D`
    pub(super) head_dim: usize,
    /// Factor of `q · k`.
    pub(super) scale: f32,
    /// The keys that queries see.
    pub(super) mask: Mask,
    /// How many of the last queries count in column sums.
    pub(super) counted: usize,
}

/// The results of a call.
#[derive(Debug)]
pub(super) struct Attended {
    /// `[B, Hq, N, D]`
    pub(super) output: Vec<f32>,
    /// `[B, Hq, N]`
    pub(super) log_sum_exp: Vec<f32>,
    /// `[B, Hq, T]`
    pub(super) column_sums: Vec<f32>,
}

impl Prompt<'_> {
    /// Attends.
    pub(super) fn attend(&self) -> Attended {
        let Self { queries, tokens, head_dim, .. } = *self;
        let heads = self.query.len() / (queries * head_dim);
        let mut output = vec![0.0; self.query.len()];
        let mut log_sum_exp = vec![0.0; heads * queries];
        let rows = output
            .chunks_mut(queries * head_dim)
            .zip(log_sum_exp.chunks_mut(queries))
            .enumerate()
            .flat_map(|(head, (output, sums))| {
                let blocks = output.chunks_mut(BLOCK * head_dim).zip(sums.chunks_mut(BLOCK));
                blocks.enumerate().map(move |(block, (output, log_sum_exp))| {
                    let start = block * BLOCK;
                    Block { prompt: self, head, start, output, log_sum_exp }
                })
            });
        let blocks: Vec<Block<'_>> = rows.collect();
        let arch = Arch::new();
        let counted: Vec<(usize, Vec<RangeSums>)> = blocks
            .into_par_iter()
            .with_max_len(1)
            .map(|block| (block.head, arch.dispatch(block)))
            .collect();
        // In the order of the blocks, whichever core was first.
        let mut column_sums = vec![0.0; heads * tokens];
        for (head, ranges) in counted {
            for (range, sums) in ranges {
                let own = &mut column_sums[head * tokens..][range];
                own.iter_mut().zip(sums).for_each(|(to, sum)| *to += sum);
            }
        }
        Attended { output, log_sum_exp, column_sums }
    }
}

/// Column sums of the keys in a range.
type RangeSums = (Range<usize>, Vec<f32>);

/// Some queries of a head.
struct Block<'a> {
    prompt: &'a Prompt<'a>,
    /// Of all heads of all sequences.
    head: usize,
    /// The first query.
    start: usize,
    /// `[rows, D]`
    output: &'a mut [f32],
    /// `[rows]`
    log_sum_exp: &'a mut [f32],
}

impl WithSimd for Block<'_> {
    /// Column sums of the counted queries, by ranges of keys.
    type Output = Vec<RangeSums>;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> Self::Output {
        let Prompt { queries, tokens, group, head_dim, scale, mask, counted, .. } = *self.prompt;
        let rows = self.log_sum_exp.len();
        let first = tokens - queries + self.start;
        let ranges = mask.seen(first..first + rows);
        let seen: usize = ranges.iter().map(Range::len).sum();
        let pair = self.head / group * tokens * head_dim;
        let rows_of = |elements| Rows { elements, stride: head_dim };
        let elements =
            |range: &Range<usize>| pair + range.start * head_dim..pair + range.end * head_dim;

        let query = &self.prompt.query[(self.head * queries + self.start) * head_dim..];
        let query = rows_of(&query[..rows * head_dim]);
        let mut logits = vec![0.0; rows * seen];
        let mut column = 0;
        for range in &ranges {
            let keys = rows_of(&self.prompt.keys[elements(range)]);
            let shape = [rows, range.len(), head_dim];
            let to = (&mut logits[column..], seen);
            product(shape, to, false, query, Factor::Transposed(keys), scale);
            column += range.len();
        }

        let uncounted = queries.saturating_sub(counted + self.start).min(rows);
        let mut sums = vec![0.0; if uncounted < rows { seen } else { 0 }];
        let mut totals = vec![0.0; rows];
        for (row, logits) in logits.chunks_mut(seen).enumerate() {
            hide(&mask, first + row, &ranges, logits);
            let top = maximum(simd, logits);
            exponentials(simd, logits, top);
            totals[row] = sum(simd, logits);
            self.log_sum_exp[row] = top + totals[row].ln();
            if row >= uncounted {
                let total = totals[row];
                sums.iter_mut().zip(&*logits).for_each(|(sum, weight)| *sum += weight / total);
            }
        }

        let mut column = 0;
        for range in &ranges {
            let values = rows_of(&self.prompt.values[elements(range)]);
            let shape = [rows, head_dim, range.len()];
            let weights = Rows { elements: &logits[column..], stride: seen };
            let to = (&mut *self.output, head_dim);
            product(shape, to, column > 0, weights, Factor::Plain(values), 1.0);
            column += range.len();
        }
        for (output, total) in self.output.chunks_mut(head_dim).zip(&totals) {
            output.iter_mut().for_each(|x| *x /= total);
        }

        let mut column = 0;
        let mut by_range = Vec::new();
        for range in ranges.into_iter().filter(|_| !sums.is_empty()) {
            by_range.push((range.clone(), sums[column..][..range.len()].to_vec()));
            column += range.len();
        }
        by_range
    }
}

/// Gives −∞ to the logits of keys that the query at key `at` does not see. The logits are those of
/// the keys in `ranges`.
fn hide(mask: &Mask, at: usize, ranges: &[Range<usize>], logits: &mut [f32]) {
    let start = mask.window.start(at);
    let mut rest = logits;
    for range in ranges {
        let (own, behind) = rest.split_at_mut(range.len());
        rest = behind;
        let place = |key: usize| key.clamp(range.start, range.end) - range.start;
        let sinks = mask.sinks.min(at + 1);
        own[place(at + 1)..].fill(f32::NEG_INFINITY);
        let window = place(sinks)..place(start.max(sinks));
        own[window].fill(f32::NEG_INFINITY);
    }
}
