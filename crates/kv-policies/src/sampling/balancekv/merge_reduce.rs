//! MergeAndReduce (Algorithm 4), for all instances of a layer at once.

use std::collections::BTreeMap;

use burn::tensor::{DType, Int, Tensor};
use kv_core::read_i32;
use kv_kernels::{BalanceOptions, BalanceStrategy, Centre, Draws, balance};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::walk::report_failures;
use crate::Result;

/// A batch is halved in blocks where it is longer.
const LONGEST_BLOCK: usize = 256;

/// A token of a pool.
#[derive(Debug, Clone, Copy)]
pub(super) struct Token {
    pub(super) slot: u32,
    /// The token's position in its sequence.
    pub(super) position: u32,
}

/// One instance: its levels, of which level `l` stands for `2^l` times as many tokens.
#[derive(Debug, Clone, Default)]
pub(super) struct Instance {
    pub(super) levels: Vec<Vec<Token>>,
}

/// The instances of one head range.
#[derive(Debug, Clone, Default)]
pub(super) struct Instances {
    /// The instance of the denominator; of the numerator too, where it is the only one.
    pub(super) denominator: Instance,
    /// The instances of the numerator, by the exponent `i` of values with `2^{i-1} <= ‖v‖ <= 2^i`.
    pub(super) numerators: BTreeMap<i32, Instance>,
    /// Tokens that are halved together, `t`.
    pub(super) batch: usize,
    /// Seeds the draws.
    pub(super) seed: u64,
}

/// How full levels are halved.
#[derive(Debug, Clone, Copy)]
pub(super) struct Reduction {
    /// The stream's length, which makes `log₂(n / t)` the last level, never halved; none if levels
    /// grow with the stream.
    pub(super) max_tokens: Option<usize>,
    pub(super) form: StreamForm,
    /// The number added to the values' products where one instance serves numerator and
    /// denominator.
    pub(super) joint: Option<f32>,
}

/// How a token's probability is computed.
#[derive(Debug, Clone, Copy)]
pub(super) enum StreamForm {
    /// Algorithm 2 with keys no longer than `radius`, failing with probability `delta`.
    Exact {
        delta: f64,
        radius: f64,
    },
    Practical {
        gamma: f64,
    },
}

/// Keys and values `[S, D]`.
pub(super) struct Pool<'a> {
    pub(super) keys: &'a Tensor<2>,
    pub(super) values: &'a Tensor<2>,
}

/// The smallest `i` with `norm <= 2^i`.
pub(super) fn bucket(norm: f32) -> i32 {
    // Zeros share the smallest bucket of normal numbers.
    norm.max(f32::MIN_POSITIVE).log2().ceil() as i32
}

impl Instance {
    pub(super) fn push(&mut self, level: usize, token: Token) {
        if self.levels.len() <= level {
            self.levels.resize_with(level + 1, Vec::new);
        }
        self.levels[level].push(token);
    }
}

impl Instances {
    fn of(&mut self, kind: Option<i32>) -> &mut Instance {
        match kind {
            None => &mut self.denominator,
            Some(bucket) => self.numerators.entry(bucket).or_default(),
        }
    }

    /// Adds one token of the stream.
    pub(super) fn push(&mut self, token: Token, norm: f32, joint: bool) {
        self.denominator.push(0, token);
        if !joint {
            self.of(Some(bucket(norm))).push(0, token);
        }
    }
}

impl Reduction {
    /// Halves all whole batches of full levels, one level after the other.
    pub(super) fn reduce(&self, pool: &Pool<'_>, all: &mut [Instances]) -> Result<()> {
        for level in 0.. {
            let mut full: Vec<(usize, Option<i32>, Vec<Token>)> = Vec::new();
            for (range, instances) in all.iter_mut().enumerate() {
                let batch = instances.batch;
                let last = self.max_tokens.map(|tokens| tokens.div_ceil(batch));
                if last.is_some_and(|batches| level >= batches.next_power_of_two().ilog2() as usize)
                {
                    continue;
                }
                let kinds = instances.numerators.keys().copied().map(Some);
                for kind in std::iter::once(None).chain(kinds).collect::<Vec<_>>() {
                    let instance = instances.of(kind);
                    let Some(tokens) = instance.levels.get_mut(level) else { continue };
                    // Tokens behind the last whole batch wait for the next one.
                    let whole: Vec<Token> = tokens.drain(..tokens.len() / batch * batch).collect();
                    full.extend(whole.chunks(batch).map(|own| (range, kind, own.to_vec())));
                }
            }
            if full.is_empty() {
                return Ok(());
            }
            let (denominators, numerators): (Vec<_>, Vec<_>) =
                full.into_iter().partition(|(_, kind, _)| kind.is_none());
            for (lists, valued) in [(denominators, self.joint.is_some()), (numerators, true)] {
                let seeds: Vec<[i32; 2]> = lists
                    .iter()
                    .map(|(range, kind, tokens)| {
                        let first = tokens.first().map_or(0, |token| token.position);
                        seed(all[*range].seed, *kind, level, first)
                    })
                    .collect();
                let kept = self.halve(pool, &lists, &seeds, valued)?;
                for ((range, kind, tokens), kept) in lists.into_iter().zip(kept) {
                    let mut left = tokens.into_iter();
                    for slot in kept {
                        // Both lists have one order.
                        if let Some(token) = left.find(|token| token.slot == slot) {
                            all[range].of(kind).push(level + 1, token);
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// The slots of each list that stay.
    fn halve(
        &self,
        pool: &Pool<'_>,
        lists: &[(usize, Option<i32>, Vec<Token>)],
        seeds: &[[i32; 2]],
        valued: bool,
    ) -> Result<Vec<Vec<u32>>> {
        if lists.is_empty() {
            return Ok(Vec::new());
        }
        let rows = lists.len();
        let counts: Vec<usize> = lists.iter().map(|(_, _, tokens)| tokens.len()).collect();
        let longest = counts.iter().copied().max().unwrap_or_default();
        let device = pool.keys.device();
        let head_dim = pool.keys.dims()[1];
        let ints = |values: Vec<i32>| {
            Tensor::<1, Int>::from_data(values.as_slice(), (&device, DType::I32))
        };
        // Shorter lists are filled up with slots that are not looked at.
        let padded = lists.iter().flat_map(|(_, _, tokens)| {
            let slots = tokens.iter().map(|token| token.slot as i32);
            slots.chain(std::iter::repeat_n(0, longest - tokens.len()))
        });
        let slots = ints(padded.collect());
        let log_gamma: Vec<f32> = lists
            .iter()
            .map(|(_, kind, tokens)| match self.form {
                StreamForm::Practical { gamma } => gamma.ln() as f32,
                StreamForm::Exact { delta, radius } => {
                    let c = 30.0 * (tokens.len().min(LONGEST_BLOCK) as f64 / delta).ln();
                    // Values of a bucket are no longer than 2^i; a denominator's are 1.
                    let value = 2.0 * f64::from(kind.unwrap_or(0)) * std::f64::consts::LN_2;
                    (-(2.0 * c).ln() - radius * radius / (head_dim as f64).sqrt() - value) as f32
                }
            })
            .collect();
        let options = BalanceOptions {
            block: longest.min(LONGEST_BLOCK),
            span: 1,
            scale: None,
            log_gamma: Tensor::from_data(log_gamma.as_slice(), (&device, DType::F32)),
            value_offset: self.joint.unwrap_or(0.0),
            // A list may be centred by any vector, since that multiplies all of its attention
            // weights by one factor. Bounds of norms hold for keys that are not centred.
            centre: match self.form {
                StreamForm::Exact { .. } => Centre::None,
                StreamForm::Practical { .. } => Centre::List,
            },
            weights: None,
            draws: Draws::Seeds(ints(seeds.concat()).reshape([rows, 2])),
            halves: true,
            strategy: BalanceStrategy::Auto,
        };
        let counts = ints(counts.into_iter().map(|count| count as i32).collect());
        let values = valued.then(|| pool.values.clone());
        let slots = slots.reshape([rows, longest]);
        let balanced = balance(pool.keys.clone(), values, slots, counts, options)?;
        if matches!(self.form, StreamForm::Exact { .. }) {
            report_failures(read_i32("failed blocks", balanced.failed)?);
        }
        let kept = read_i32("kept tokens", balanced.kept)?;
        let lists = kept.chunks(longest / 2);
        Ok(lists
            .map(|list| list.iter().filter_map(|&slot| u32::try_from(slot).ok()).collect())
            .collect())
    }
}

/// The seeds of one halving, which do not depend on how the stream was chunked.
fn seed(request: u64, kind: Option<i32>, level: usize, first: u32) -> [i32; 2] {
    let mut draws = ChaCha8Rng::seed_from_u64(request);
    let kind = kind.map_or(0, |bucket| bucket as i64 + 1_000);
    draws.set_stream(((kind as u64) << 40) | ((level as u64) << 32) | u64::from(first));
    [draws.random(), draws.random()]
}
