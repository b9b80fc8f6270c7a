//! The cases that every attention test runs, those that are timed among them.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use kv_kernels::{SlotRanges, SlotView};
use kv_testing::{Numbers, STEP, dot, timed};

/// Shapes and lengths of one decode-attention case.
#[derive(Debug, Clone)]
pub(crate) struct Problem {
    pub(crate) group: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    /// Live slots of each (sequence, head).
    pub(crate) lengths: Vec<usize>,
    pub(crate) weighted: bool,
    pub(crate) view: View,
}

/// Which slots are read, whether values have weights of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum View {
    All,
    /// All, with weights of the values alone.
    Numerators,
    /// The first 3 slots, and the last third.
    Window,
    /// Every third slot, backwards, some of them outside the pool.
    List,
}

/// The most numbers of keys in a timed step that is tested: the reference takes long over more.
const MOST_NUMBERS: usize = 1 << 22;

/// Steps that are timed, and small enough to be tested: key-value heads, query heads of each, head
/// dim, and the length of every range.
pub(crate) fn timed_steps() -> Vec<(usize, usize, usize, Vec<usize>)> {
    let fields = ["batch", "query_heads", "kv_heads", "tokens", "head_dim"];
    let steps = timed("decode_attention", fields).into_iter().filter_map(|step| {
        let [batch, query_heads, kv_heads, tokens, head_dim] = step;
        let pairs = batch * kv_heads;
        (pairs * tokens * head_dim <= MOST_NUMBERS)
            .then(|| (kv_heads, query_heads / kv_heads, head_dim, vec![tokens; pairs]))
    });
    let small = (STEP.kv_heads, STEP.group, STEP.head_dim, vec![STEP.slots; STEP.pairs()]);
    steps.chain([small]).collect()
}

/// Odd sizes, groups of 1 to 8, all head dims, empty and full ranges, tile borders; and steps that
/// are timed.
pub(crate) fn catalog() -> Vec<Problem> {
    let case = |group, kv_heads, head_dim, lengths: &[usize], weighted| Problem {
        group,
        kv_heads,
        head_dim,
        lengths: lengths.to_vec(),
        weighted,
        view: View::All,
    };
    let plain = vec![
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
        // Long enough to be split.
        case(4, 1, 64, &[3000], false),
        case(2, 1, 32, &[2500, 0], true),
        case(8, 2, 128, &[1030, 0, 300, 2050], false),
    ];
    // Every kernel is compiled anew, which takes software drivers seconds.
    let views = [View::Numerators, View::Window, View::List].into_iter().flat_map(|view| {
        let some = plain.iter().filter(|problem| problem.weighted && problem.group <= 2);
        some.map(move |problem| Problem { view, ..problem.clone() })
    });
    // As models have them, with matrix instructions: wide rows, groups that share them.
    let wide = [
        Problem { view: View::Numerators, ..case(4, 1, 128, &[70, 33], true) },
        Problem { view: View::Window, ..case(4, 1, 128, &[70, 33], true) },
        Problem { view: View::List, ..case(4, 2, 128, &[700, 33], false) },
        Problem { view: View::List, ..case(7, 1, 96, &[129], true) },
    ];
    // So many heads that cubes for lists are smaller.
    let lengths: Vec<usize> = (0..416).map(|head| 20 + head % 50).collect();
    let many = Problem { view: View::List, ..case(1, 32, 64, &lengths, true) };
    let timed = timed_steps().into_iter().map(|(kv_heads, group, head_dim, lengths)| {
        case(group, kv_heads, head_dim, &lengths, false)
    });
    plain.clone().into_iter().chain(views).chain(wide).chain([many]).chain(timed).collect()
}

/// A case's tensors, in f32; slots outside the ranges are poisoned.
pub(crate) struct Inputs {
    pub(crate) query: Vec<f32>,
    pub(crate) keys: Vec<f32>,
    pub(crate) values: Vec<f32>,
    pub(crate) log_weights: Option<Vec<f32>>,
    pub(crate) numerators: Option<Vec<f32>>,
    pub(crate) offsets: Vec<i32>,
    pub(crate) lengths: Vec<i32>,
}

/// Slots between two ranges that belong to none.
const GAP: usize = 3;

impl Inputs {
    /// Query, keys and values as a device holds them in a dtype.
    pub(crate) fn rounded(self, device: &Device, dtype: DType) -> Self {
        let rounded = |values: &[f32]| {
            let tensor = Tensor::<1>::from_data(values, (device, DType::F32)).cast(dtype);
            tensor.try_into_vec_as::<f32>().unwrap()
        };
        let [query, keys, values] = [&self.query, &self.keys, &self.values].map(|x| rounded(x));
        Self { query, keys, values, ..self }
    }
}

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
            numerators: (self.view == View::Numerators)
                .then(|| (0..slots).map(|_| numbers.below(5) as f32).collect()),
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

impl Problem {
    /// The slots of a range that are read.
    fn visible(&self, pair: usize, start: usize) -> Vec<usize> {
        let length = self.lengths[pair];
        match self.view {
            View::All | View::Numerators => (start..start + length).collect(),
            View::Window => {
                let slots = 0..length;
                slots.filter(|i| *i < 3 || *i >= 2 * length / 3).map(|i| start + i).collect()
            }
            View::List => (start..start + length).rev().step_by(3).collect(),
        }
    }

    /// The view's tensors.
    pub(crate) fn view(&self, inputs: &Inputs, device: &Device) -> SlotView {
        let pairs = [self.batch(), self.kv_heads];
        let ints =
            |values: Vec<i32>| Tensor::<1, Int>::from_data(&values[..], (device, DType::I32));
        match self.view {
            View::All | View::Numerators => SlotView::All,
            View::Window => {
                let starts = self.lengths.iter().map(|length| (2 * length / 3) as i32);
                let starts = ints(starts.collect()).reshape(pairs);
                SlotView::Window { sinks: 3, starts }
            }
            View::List => {
                let width = self.lengths.iter().max().unwrap() + 5;
                let mut slots = vec![i32::MAX; self.lengths.len() * width];
                let mut counts = Vec::new();
                for pair in 0..self.lengths.len() {
                    let visible = self.visible(pair, inputs.offsets[pair] as usize);
                    let row = &mut slots[pair * width..][..width];
                    // Absent ones between and behind.
                    row[0] = -1;
                    row[1..=visible.len()]
                        .iter_mut()
                        .zip(&visible)
                        .for_each(|(to, slot)| *to = *slot as i32);
                    counts.push(visible.len() as i32 + 2);
                }
                let slots = ints(slots).reshape([pairs[0], pairs[1], width]);
                SlotView::List { slots, counts: ints(counts).reshape(pairs) }
            }
        }
    }
}

/// Weighted attention in f64, straight from its formula.
pub(crate) fn exact(problem: &Problem, inputs: &Inputs) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
    let (dim, group) = (problem.head_dim, problem.group);
    let mut output = vec![0.0; inputs.query.len()];
    let mut lse = vec![f64::NEG_INFINITY; inputs.query.len() / dim];
    let mut probabilities = vec![0.0; problem.slots() * group];
    for pair in 0..problem.lengths.len() {
        let slots = problem.visible(pair, inputs.offsets[pair] as usize);
        for g in 0..group {
            let head = pair * group + g;
            let query = &inputs.query[head * dim..][..dim];
            let dots = slots.iter().map(|slot| {
                let key = &inputs.keys[slot * dim..][..dim];
                dot(query, key) / (dim as f64).sqrt()
            });
            let dots: Vec<f64> = dots.collect();
            let weight =
                |slot: usize| inputs.log_weights.as_ref().map_or(0.0, |w| f64::from(w[slot]));
            let logits: Vec<f64> =
                dots.iter().zip(&slots).map(|(dot, slot)| dot + weight(*slot)).collect();
            let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            if max == f64::NEG_INFINITY {
                continue;
            }
            let sum: f64 = logits.iter().map(|logit| (logit - max).exp()).sum();
            lse[head] = max + sum.ln();
            for ((logit, dot), &slot) in logits.iter().zip(&dots).zip(&slots) {
                let p = (logit - max).exp() / sum;
                probabilities[slot * group + g] = p;
                let share = match &inputs.numerators {
                    Some(numerators) => (dot - max).exp() * f64::from(numerators[slot]) / sum,
                    None => p,
                };
                let value = &inputs.values[slot * dim..][..dim];
                if share > 0.0 {
                    let output = &mut output[head * dim..][..dim];
                    output.iter_mut().zip(value).for_each(|(o, v)| *o += share * f64::from(*v));
                }
            }
        }
    }
    (output, lse, probabilities)
}
