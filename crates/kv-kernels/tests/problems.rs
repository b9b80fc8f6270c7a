//! The cases that every attention test runs.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use kv_kernels::SlotRanges;
use kv_testing::Numbers;

/// Shapes and lengths of one decode-attention case.
#[derive(Debug, Clone)]
pub(crate) struct Problem {
    pub(crate) group: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    /// Live slots of each (sequence, head).
    pub(crate) lengths: Vec<usize>,
    pub(crate) weighted: bool,
}

/// Odd sizes, groups of 1 to 8, all head dims, empty and full ranges, tile borders.
pub(crate) fn catalog() -> Vec<Problem> {
    let case = |group, kv_heads, head_dim, lengths: &[usize], weighted| Problem {
        group,
        kv_heads,
        head_dim,
        lengths: lengths.to_vec(),
        weighted,
    };
    vec![
        case(1, 1, 32, &[1], false),
        case(2, 2, 32, &[5, 0, 127, 128], true),
        case(3, 1, 64, &[129, 300], false),
        case(4, 2, 64, &[17, 256, 1, 511], true),
        case(5, 1, 96, &[77], true),
        case(6, 1, 128, &[1000], false),
        case(7, 2, 128, &[33, 64], true),
        case(8, 1, 256, &[255, 257], true),
        case(8, 2, 128, &[640, 0], false),
        case(1, 3, 20, &[13, 131, 7], true),
    ]
}

/// A case's tensors, in f32; slots outside the ranges are poisoned.
pub(crate) struct Inputs {
    pub(crate) query: Vec<f32>,
    pub(crate) keys: Vec<f32>,
    pub(crate) values: Vec<f32>,
    pub(crate) log_weights: Option<Vec<f32>>,
    pub(crate) offsets: Vec<i32>,
    pub(crate) lengths: Vec<i32>,
}

/// Slots between two ranges that belong to none.
const GAP: usize = 3;

impl Problem {
    pub(crate) fn batch(&self) -> usize {
        self.lengths.len() / self.kv_heads
    }

    pub(crate) fn slots(&self) -> usize {
        self.lengths.iter().map(|length| length + GAP).sum()
    }

    pub(crate) fn inputs(&self, seed: u64) -> Inputs {
        let mut numbers = Numbers::new(seed);
        let (slots, dim) = (self.slots(), self.head_dim);
        let mut keys = vec![1e30f32; slots * dim];
        let mut values = vec![f32::NAN; slots * dim];
        let mut log_weights = vec![f32::NAN; slots];
        let mut offsets = Vec::new();
        let mut start = 0;
        for &length in &self.lengths {
            offsets.push(start as i32);
            let rows = start * dim..(start + length) * dim;
            // Logits of a few units either way.
            let drawn = numbers.normal(length * dim);
            keys[rows.clone()].iter_mut().zip(drawn).for_each(|(key, x)| *key = 1.5 * x);
            values[rows].copy_from_slice(&numbers.normal(length * dim));
            for weight in &mut log_weights[start..start + length] {
                // One slot in eight weighs nothing.
                let draw = numbers.below(8);
                *weight = if draw == 0 { f32::NEG_INFINITY } else { (draw as f32).ln() };
            }
            start += length + GAP;
        }
        Inputs {
            query: numbers.normal(self.lengths.len() * self.group * dim),
            keys,
            values,
            log_weights: self.weighted.then_some(log_weights),
            offsets,
            lengths: self.lengths.iter().map(|&length| length as i32).collect(),
        }
    }

    pub(crate) fn ranges(&self, inputs: &Inputs, device: &Device) -> SlotRanges {
        let shape = [self.batch(), self.kv_heads];
        let upload = |values: &[i32]| -> Tensor<2, Int> {
            Tensor::from_data(TensorData::new(values.to_vec(), shape), (device, DType::I32))
        };
        SlotRanges { offsets: upload(&inputs.offsets), lengths: upload(&inputs.lengths) }
    }
}

/// Weighted attention in f64, straight from its formula.
pub(crate) fn exact(problem: &Problem, inputs: &Inputs) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
    let (dim, group) = (problem.head_dim, problem.group);
    let mut output = vec![0.0; inputs.query.len()];
    let mut lse = vec![f64::NEG_INFINITY; inputs.query.len() / dim];
    let mut probabilities = vec![0.0; problem.slots() * group];
    for (pair, &length) in problem.lengths.iter().enumerate() {
        let start = inputs.offsets[pair] as usize;
        for g in 0..group {
            let head = pair * group + g;
            let query = &inputs.query[head * dim..][..dim];
            let logits: Vec<f64> = (start..start + length)
                .map(|slot| {
                    let key = &inputs.keys[slot * dim..][..dim];
                    let dot: f64 =
                        query.iter().zip(key).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
                    let weight = inputs.log_weights.as_ref().map_or(0.0, |w| f64::from(w[slot]));
                    dot / (dim as f64).sqrt() + weight
                })
                .collect();
            let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            if max == f64::NEG_INFINITY {
                continue;
            }
            let sum: f64 = logits.iter().map(|logit| (logit - max).exp()).sum();
            lse[head] = max + sum.ln();
            for (index, logit) in logits.iter().enumerate() {
                let p = (logit - max).exp() / sum;
                probabilities[(start + index) * group + g] = p;
                let value = &inputs.values[(start + index) * dim..][..dim];
                if p > 0.0 {
                    let output = &mut output[head * dim..][..dim];
                    output.iter_mut().zip(value).for_each(|(o, v)| *o += p * f64::from(*v));
                }
            }
        }
    }
    (output, lse, probabilities)
}
