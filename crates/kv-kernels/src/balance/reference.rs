//! `balance` in plain loops, in f64: the CPU path, and the oracle of the kernels' tests.

use std::cmp::Ordering;

use super::WalkConfig;
use crate::components::sentinels::NO_SLOT;
use crate::layers::random::uniform;

/// The arguments of a call.
#[derive(Debug)]
pub(crate) struct Lists<'a> {
    /// `[S, D]`
    pub(crate) keys: &'a [f32],
    /// `[S, D]`
    pub(crate) values: Option<&'a [f32]>,
    /// `[P, N]`
    pub(crate) lists: &'a [i32],
    /// `[P]`
    pub(crate) counts: &'a [i32],
    /// `[P]`
    pub(crate) log_gamma: &'a [f32],
    pub(crate) centre: HostCentre<'a>,
    /// `[P, N]`
    pub(crate) weights: Option<&'a [f32]>,
    pub(crate) draws: HostDraws<'a>,
    pub(crate) head_dim: usize,
    pub(crate) config: WalkConfig,
}

/// [`crate::Centre`] on the host.
#[derive(Debug, Clone, Copy)]
pub(crate) enum HostCentre<'a> {
    None,
    List,
    /// `[P, blocks, D]`
    Block(&'a [f32]),
}

/// [`crate::Draws`] on the host.
#[derive(Debug, Clone, Copy)]
pub(crate) enum HostDraws<'a> {
    /// `[P, 2]`
    Seeds(&'a [i32]),
    /// `[P, N]`
    Numbers(&'a [f32]),
}

/// The results of a call, as in [`super::Balanced`].
#[derive(Debug)]
pub(crate) struct Classes {
    pub(crate) signs: Vec<i32>,
    pub(crate) kept: Vec<i32>,
    pub(crate) failed: Vec<i32>,
}

impl Lists<'_> {
    pub(crate) fn balance(&self) -> Classes {
        let (rows, block) = (self.counts.len(), self.config.block);
        let longest = self.lists.len() / rows;
        let (blocks, half) = (longest.div_ceil(block), (longest / 2).max(1));
        let mut classes = Classes {
            signs: vec![0; rows * longest],
            kept: vec![NO_SLOT; rows * half],
            failed: vec![0; rows * blocks],
        };
        for row in 0..rows {
            let count = self.counts[row] as usize;
            for (index, first) in (0..count).step_by(block).enumerate() {
                let places = first..count.min(first + block);
                let (signs, failed) = self.walk(row, index, places.clone());
                classes.failed[row * blocks + index] = i32::from(failed);
                let positive = signs.iter().filter(|&&sign| sign > 0).count();
                let class = if 2 * positive <= signs.len() { 1 } else { -1 };
                let members = places.clone().zip(&signs).filter(|(_, sign)| **sign == class);
                let kept = members.map(|(index, _)| self.lists[row * longest + index]);
                let free = &mut classes.kept[row * half + first / 2..];
                free.iter_mut().zip(kept).for_each(|(free, slot)| *free = slot);
                classes.signs[row * longest..][places].copy_from_slice(&signs);
            }
        }
        classes
    }

    /// The mean of a block's keys; empty where keys are not centred.
    fn mean(&self, row: usize, index: usize) -> Vec<f64> {
        let (dim, longest) = (self.head_dim, self.lists.len() / self.counts.len());
        match self.centre {
            HostCentre::None => Vec::new(),
            HostCentre::Block(means) => {
                let blocks = longest.div_ceil(self.config.block);
                wide(&means[(row * blocks + index) * dim..][..dim])
            }
            HostCentre::List => {
                let list = &self.lists[row * longest..][..self.counts[row] as usize];
                let mut mean = vec![0.0; dim];
                for &slot in list {
                    let key = &self.keys[slot as usize * dim..][..dim];
                    mean.iter_mut().zip(key).for_each(|(mean, key)| *mean += f64::from(*key));
                }
                mean.iter_mut().for_each(|mean| *mean /= list.len().max(1) as f64);
                mean
            }
        }
    }

    /// The signs of one block, and whether a probability was outside `[0, 1]`.
    fn walk(&self, row: usize, index: usize, places: std::ops::Range<usize>) -> (Vec<i32>, bool) {
        let WalkConfig { span, scale, value_offset, .. } = self.config;
        let (dim, longest) = (self.head_dim, self.lists.len() / self.counts.len());
        let mean = self.mean(row, index);
        let tokens: Vec<(Vec<f64>, Vec<f64>)> = places
            .clone()
            .map(|index| {
                let slot = self.lists[row * longest + index] as usize;
                let mut key: Vec<f64> = wide(&self.keys[slot * dim..][..dim]);
                key.iter_mut().zip(&mean).for_each(|(key, mean)| *key -= mean);
                let mut value =
                    self.values.map_or(vec![1.0], |values| wide(&values[slot * dim..][..dim]));
                if let Some(weights) = self.weights {
                    let weight = f64::from(weights[row * longest + index]);
                    value.iter_mut().for_each(|value| *value *= weight);
                }
                (key, value)
            })
            .collect();
        let half = tokens.len().div_ceil(2);
        let mut signs: Vec<i32> = Vec::with_capacity(tokens.len());
        let mut counts = [0, 0];
        let mut failed = false;
        while signs.len() < tokens.len() {
            let first = signs.len();
            let size = span_size(first, tokens.len(), span);
            // Each pair of a token of the span and an earlier one, as a logit and its factor.
            let own = &tokens[first..first + size];
            let pairs =
                own.iter().flat_map(|own| tokens.iter().zip(&signs).map(move |of| (own, of)));
            let terms: Vec<(f64, f64)> = pairs
                .map(|((key, value), ((other_key, other_value), sign))| {
                    let likeness = dot(value, other_value) + f64::from(value_offset);
                    (dot(key, other_key) * f64::from(scale), likeness * f64::from(*sign))
                })
                .collect();
            // f64 overflows beyond exp(709), so the sum is a mantissa times exp(top).
            let top = terms.iter().map(|(logit, _)| *logit).fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = terms.iter().map(|(logit, factor)| factor * (logit - top).exp()).sum();
            let index = places.start + first;
            let draw = match self.draws {
                HostDraws::Seeds(seeds) => {
                    let seed = &seeds[row * 2..][..2];
                    uniform([seed[0] as u32, seed[1] as u32], index as u32)
                }
                HostDraws::Numbers(numbers) => numbers[row * longest + index],
            };
            // Both sides of the comparison are scaled, to keep them finite.
            let exponent = top + f64::from(self.log_gamma[row]);
            let (own, one) = match sum {
                0.0 => (0.0, 1.0),
                _ => (sum * exponent.min(0.0).exp(), (-exponent.max(0.0)).exp()),
            };
            failed |= own.abs() > 0.5 * one;
            let mut sign = if own < (0.5 - f64::from(draw)) * one { 1 } else { -1 };
            if self.config.halves && counts[usize::from(sign > 0)] + size > half {
                sign = -sign;
            }
            counts[usize::from(sign > 0)] += size;
            signs.extend(std::iter::repeat_n(sign, size));
        }
        (signs, failed)
    }
}

/// Tokens of the span that begins at a place of a block of `tokens`.
fn span_size(first: usize, tokens: usize, span: usize) -> usize {
    let whole = tokens - tokens % (2 * span);
    match first.cmp(&whole) {
        Ordering::Less => span,
        Ordering::Equal => (tokens - whole).div_ceil(2),
        Ordering::Greater => tokens - first,
    }
}

fn wide(row: &[f32]) -> Vec<f64> {
    row.iter().map(|x| f64::from(*x)).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}
