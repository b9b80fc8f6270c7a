//! The authors' code to the letter (`balanced_walk.py`), where it departs from the paper: keys are
//! centred by the mean of their block, padding of a short last one counted in; a block's first
//! token is always positive; classes are balanced over the whole list rather than a block; tokens
//! after one class has its half are kept with weight 1; lists of later rounds are in the order of
//! weights; and values are multiplied by their weights from the second round on.

use burn::tensor::{DType, Int, Tensor};
use kv_core::read_i32;
use kv_kernels::{BalanceOptions, BalanceStrategy, Centre, Draws, balance};

use crate::Result;

/// Parameters of the authors' walk.
#[derive(Debug, Clone, Copy)]
pub struct OfficialWalk {
    /// Tokens of a block.
    pub block: usize,
    /// Rounds, each of which halves.
    pub rounds: usize,
    /// `γ`.
    pub gamma: f64,
    /// The factor `τ` of `exp(τ <k_i, k_j> / sqrt(D) - β)`, 1 by the authors' default.
    pub temperature: f64,
    /// `β` of the exponent above, 0 by the authors' default.
    pub beta: f64,
    /// Added to the values' products.
    pub value_offset: f32,
}

/// The tokens that a list is left with.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct OfficialList {
    /// Indices, in the code's order.
    pub kept: Vec<u32>,
    /// The product of a token's weights, 1 or 2 a round: the numerator's weight. The denominator's
    /// is `2^rounds` for all of them.
    pub weights: Vec<f32>,
    /// Signs of each round's list.
    pub signs: Vec<Vec<i32>>,
}

impl OfficialWalk {
    /// Halves all of `keys` and `values` `[P, n, D]`. `numbers(round, list, index)` are uniform in
    /// `[0, 1)`.
    ///
    /// # Errors
    /// The errors of [`balance`].
    pub fn run(
        &self,
        keys: &Tensor<3>,
        values: Option<&Tensor<3>>,
        mut numbers: impl FnMut(usize, usize, usize) -> f32,
    ) -> Result<Vec<OfficialList>> {
        let [total_kv_heads, tokens, head_dim] = keys.dims();
        let device = keys.device();
        let pool = |tensor: &Tensor<3>| tensor.clone().reshape([total_kv_heads * tokens, head_dim]);
        let floats = |values: &[f32], shape: [usize; 2]| {
            Tensor::<1>::from_data(values, (&device, DType::F32)).reshape(shape)
        };
        // `γ exp(x - β) = exp(ln γ - β) exp(x)`
        let log_gamma = (self.gamma.ln() - self.beta) as f32;
        let scale = (self.temperature / (head_dim as f64).sqrt()) as f32;
        let mut lists = vec![OfficialList::default(); total_kv_heads];
        for list in &mut lists {
            list.kept = (0..tokens as u32).collect();
            list.weights = vec![1.0; tokens];
        }
        for round in 0..self.rounds {
            let count = lists.first().map_or(0, |list| list.kept.len());
            if count == 0 {
                break;
            }
            let slots: Vec<i32> = lists
                .iter()
                .enumerate()
                .flat_map(|(range, list)| {
                    list.kept.iter().map(move |&at| (range * tokens) as i32 + at as i32)
                })
                .collect();
            let slots = Tensor::<1, Int>::from_data(slots.as_slice(), (&device, DType::I32));
            let blocks = count.div_ceil(self.block);
            let padding = blocks * self.block - count;
            let mut rows = pool(keys).select(0, slots.clone()).cast(DType::F32);
            rows = rows.reshape([total_kv_heads, count * head_dim]);
            if padding > 0 {
                let zeros =
                    Tensor::zeros([total_kv_heads, padding * head_dim], (&device, DType::F32));
                rows = Tensor::cat(vec![rows, zeros], 1);
            }
            let means = rows.reshape([total_kv_heads, blocks, self.block, head_dim]).mean_dim(2);
            let weights: Vec<f32> = lists.iter().flat_map(|list| list.weights.clone()).collect();
            let mut draws = Vec::with_capacity(total_kv_heads * count);
            for range in 0..total_kv_heads {
                // Certainly below 1/2 at the beginning of a block.
                draws.extend((0..count).map(|index| match index % self.block {
                    0 => 0.0,
                    _ => numbers(round, range, index),
                }));
            }
            let options = BalanceOptions {
                block: self.block,
                span: 1,
                scale: Some(scale),
                log_gamma: Tensor::full([total_kv_heads], log_gamma, (&device, DType::F32)),
                value_offset: if values.is_some() { self.value_offset } else { 0.0 },
                centre: Centre::Block(means.squeeze_dim(2)),
                weights: values.map(|_| floats(&weights, [total_kv_heads, count])),
                draws: Draws::Numbers(floats(&draws, [total_kv_heads, count])),
                halves: false,
                strategy: BalanceStrategy::Auto,
            };
            let slots = slots.reshape([total_kv_heads, count]);
            let counts = Tensor::full([total_kv_heads], count as i32, (&device, DType::I32));
            let balanced = balance(pool(keys), values.map(pool), slots, counts, options)?;
            let signs = read_i32("signs", balanced.signs)?;
            for (list, signs) in lists.iter_mut().zip(signs.chunks(count)) {
                let chosen = halve(signs);
                list.kept = chosen.iter().map(|&(at, _)| list.kept[at]).collect();
                list.weights =
                    chosen.iter().map(|&(at, weight)| list.weights[at] * weight).collect();
                list.signs.push(signs.to_vec());
            }
        }
        Ok(lists)
    }
}

/// The half of a list that stays, in order, with its weights.
fn halve(signs: &[i32]) -> Vec<(usize, f32)> {
    let half = signs.len() / 2;
    let reaches = |class: i32| {
        let mut members = 0;
        let reached = signs.iter().position(|&sign| {
            members += usize::from(sign == class);
            members == half
        });
        reached.unwrap_or(0)
    };
    let last = reaches(-1).max(reaches(1));
    let flip = if signs.get(last) == Some(&1) { -2.0 } else { 2.0 };
    let weight =
        |(at, &sign): (usize, &i32)| (at, if at <= last { flip * sign as f32 } else { 1.0 });
    let mut weighted: Vec<(usize, f32)> = signs.iter().enumerate().map(weight).collect();
    weighted.sort_by(|a, b| b.1.total_cmp(&a.1));
    weighted.truncate(half);
    weighted
}
