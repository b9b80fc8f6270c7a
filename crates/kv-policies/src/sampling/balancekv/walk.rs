//! The self-balancing walk (Algorithm 2), over the blocks of a list of tokens.

use std::f32::consts::LN_2;

use burn::tensor::{DType, Int, Tensor};
use kv_core::{read_f32, read_i32};
use kv_kernels::{BalanceOptions, BalanceStrategy, Centre, Draws, balance};
use rand::Rng;
use serde::{Deserialize, Serialize};

use super::compressed::{Compressed, Kept};
use super::fitted::{Fit, Part, SurvivorWeights};
use crate::policy::generator::generator;
use crate::{Observation, Result};

/// How lists of tokens are halved.
#[derive(Debug, Clone, Copy)]
pub(super) struct Walk {
    pub(super) block: usize,
    pub(super) span: usize,
    pub(super) form: Form,
    pub(super) value_offset: f32,
    pub(super) centring: Centring,
    pub(super) weights: SurvivorWeights,
}

/// How a token's probability is computed.
#[derive(Debug, Clone, Copy)]
pub(super) enum Form {
    Exact { delta: f64 },
    Practical { gamma: f64 },
}

/// The vector that keys are centred by. Attention does not depend on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Centring {
    /// The mean of the list that is halved.
    #[default]
    List,
    /// Nothing.
    None,
}

impl Walk {
    pub(super) fn validate(&self) -> std::result::Result<(), String> {
        let Self { block, span, form, value_offset, .. } = *self;
        if !(2..=256).contains(&block) || block % 2 == 1 {
            return Err(format!("`block` is {block}, expected an even number from 2 to 256"));
        }
        if span == 0 || !(block / 2).is_multiple_of(span) {
            let half = block / 2;
            return Err(format!("`span` is {span}, expected a divisor of half a block, {half}"));
        }
        match form {
            Form::Exact { delta } if !(delta > 0.0 && delta < 1.0) => {
                return Err(format!("`delta` is {delta}, expected between 0 and 1"));
            }
            Form::Practical { gamma } if !(gamma > 0.0 && gamma.is_finite()) => {
                return Err(format!("`gamma` is {gamma}, expected above 0"));
            }
            _ => {}
        }
        if !(value_offset >= 0.0 && value_offset.is_finite()) {
            return Err(format!("`value_offset` is {value_offset}, expected at least 0"));
        }
        Ok(())
    }

    /// Lets lists `[P, n]` of an observation's tokens shrink to `target` each.
    pub(super) fn compress(
        &self,
        observation: &Observation<'_>,
        lists: Tensor<2, Int>,
        target: usize,
    ) -> Result<Compressed> {
        let [batch, kv_heads, length, head_dim] = observation.dims();
        let total_kv_heads = batch * kv_heads;
        let device = observation.keys.device();
        if target == 0 {
            let kept = (0..total_kv_heads).map(|_| Vec::new()).collect();
            return Ok(Compressed { kept, separate: false });
        }
        let pool = |tensor: &Tensor<4>| tensor.clone().reshape([total_kv_heads * length, head_dim]);
        let (keys, values) = (pool(observation.keys), pool(observation.values));
        // Tokens as slots of the pool, until the end.
        let first = Tensor::<1, Int>::arange(0..total_kv_heads as i64, (&device, DType::I32))
            .mul_scalar(length as i32)
            .unsqueeze_dim::<2>(1);
        let all = lists + first.clone();
        let mut lists = all.clone();
        let [_, tokens] = lists.dims();
        let mut count = tokens;
        let log_gamma = |lists: &Tensor<2, Int>| match self.form {
            Form::Practical { gamma } => {
                Tensor::full([total_kv_heads], gamma.ln() as f32, (&device, DType::F32))
            }
            Form::Exact { delta } => {
                let [_, count] = lists.dims();
                let listed = |pool: &Tensor<2>| {
                    let rows =
                        pool.clone().select(0, lists.clone().reshape([total_kv_heads * count]));
                    rows.reshape([total_kv_heads, count, head_dim]).cast(DType::F32)
                };
                let norms =
                    |rows: Tensor<3>| rows.square().sum_dim(2).max_dim(1).reshape([total_kv_heads]);
                let mut own = listed(&keys);
                if self.centring == Centring::List {
                    own = own.clone() - own.mean_dim(1);
                }
                let key_norms = norms(own).div_scalar((head_dim as f32).sqrt());
                let value_norms = norms(listed(&values)).add_scalar(self.value_offset);
                let c = 30.0 * (self.block.min(count) as f64 / delta).ln();
                (key_norms + value_norms.log()).neg().sub_scalar((2.0 * c).ln() as f32)
            }
        };
        let mut draws: Vec<_> = (0..batch)
            .flat_map(|row| (0..kv_heads).map(move |head| (row, head)))
            .map(|(row, head)| generator(observation, row, head))
            .collect();
        let mut halve = |lists: &Tensor<2, Int>| -> Result<Tensor<2, Int>> {
            let [_, count] = lists.dims();
            let seeds: Vec<i32> = draws
                .iter_mut()
                .flat_map(|draws| [(); 2].map(|()| draws.random::<i32>()))
                .collect();
            let seeds = Tensor::<1, Int>::from_data(seeds.as_slice(), (&device, DType::I32));
            let options = BalanceOptions {
                block: self.block,
                span: self.span,
                scale: None,
                log_gamma: log_gamma(lists),
                value_offset: self.value_offset,
                centre: match self.centring {
                    Centring::None => Centre::None,
                    Centring::List => Centre::List,
                },
                weights: None,
                draws: Draws::Seeds(seeds.reshape([total_kv_heads, 2])),
                halves: true,
                strategy: BalanceStrategy::Auto,
            };
            let counts = Tensor::full([total_kv_heads], count as i32, (&device, DType::I32));
            let values = Some(values.clone());
            let balanced = balance(keys.clone(), values, lists.clone(), counts, options)?;
            if matches!(self.form, Form::Exact { .. }) {
                report_failures(read_i32("failed blocks", balanced.failed)?);
            }
            Ok(balanced.kept)
        };
        let mut rounds = 0usize;
        while count / 2 >= target {
            lists = halve(&lists)?;
            count /= 2;
            rounds += 1;
        }
        let rest = count - target;
        let mut parts = vec![Part {
            slots: lists.clone().narrow(1, 2 * rest, count - 2 * rest),
            before: 2 * rest,
            rounds,
            end: tokens,
        }];
        if rest > 0 {
            let slots = halve(&lists.narrow(1, 0, 2 * rest))?;
            parts.push(Part { slots, before: 0, rounds: rounds + 1, end: rest << (rounds + 1) });
        }
        let fit = Fit {
            keys: &keys,
            values: &values,
            lists: &all,
            centred: self.centring == Centring::List,
            value_offset: self.value_offset,
            half: self.block / 2,
        };
        let mut kept: Vec<Vec<Kept>> =
            (0..total_kv_heads).map(|_| Vec::with_capacity(target)).collect();
        for part in parts {
            let [_, count] = part.slots.dims();
            if count == 0 {
                continue;
            }
            let log_weights = match self.weights {
                SurvivorWeights::Fitted if part.rounds > 0 => {
                    read_f32("weights", fit.weights(&part).log())?
                }
                _ => vec![part.rounds as f32 * LN_2; total_kv_heads * count],
            };
            let read = read_i32("kept tokens", part.slots - first.clone())?;
            let heads = read.chunks(count).zip(log_weights.chunks(count));
            for (kept, (tokens, log_weights)) in kept.iter_mut().zip(heads) {
                kept.extend(tokens.iter().zip(log_weights).map(|(&token, &log_weight)| Kept {
                    token: token as u32,
                    log_weight,
                    numerator: log_weight.exp(),
                }));
            }
        }
        Ok(Compressed { kept, separate: false })
    }
}

/// Says that Algorithm 2 failed; the walk went on with the likelier signs.
pub(super) fn report_failures(failed: Vec<i32>) {
    let failed = failed.iter().filter(|&&failed| failed != 0).count();
    if failed > 0 {
        tracing::warn!(blocks = failed, "Algorithm 2 failed: a probability was cut to 0 or 1");
    }
}
