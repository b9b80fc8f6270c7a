//! Batches that enter a stream's levels, and the weights that tokens have there.

use std::collections::BTreeMap;

use super::BalanceKvStream;
use crate::Result;
use crate::sampling::balancekv::merge_reduce::{
    Instance, Instances, Pool, Reduction, StreamForm, Token,
};

impl BalanceKvStream {
    fn reduction(&self) -> Reduction {
        let form = match (self.delta, self.norm_bound) {
            (Some(delta), Some(radius)) => StreamForm::Exact { delta, radius },
            _ => StreamForm::Practical { gamma: self.gamma },
        };
        let joint = self.joint.then_some(self.value_offset);
        Reduction { max_tokens: self.max_tokens, form, joint }
    }

    /// Lets the stream take tokens, batch after batch, and erases small buckets.
    pub(super) fn take(
        &self,
        pool: &Pool<'_>,
        instances: &mut [Instances],
        new: &[Vec<(Token, f32)>],
        longest: &mut [f32],
    ) -> Result<()> {
        let reduction = self.reduction();
        if self.norm_bound.is_none() {
            // Nothing is erased, so that all batches can enter before the first is halved: a
            // level's batches have the tokens and draws that they would have one after the other.
            let rows = instances.iter_mut().zip(new).zip(longest);
            for ((instances, tokens), longest) in rows {
                for &(token, norm) in tokens {
                    instances.push(token, norm, self.joint);
                    *longest = longest.max(norm);
                }
            }
            return reduction.reduce(pool, instances);
        }
        let head_dim = pool.keys.dims()[1];
        let rows = instances.iter().zip(new);
        let rounds = rows.map(|(instances, tokens)| tokens.len().div_ceil(instances.batch)).max();
        for round in 0..rounds.unwrap_or(0) {
            let rows = instances.iter_mut().zip(new).zip(longest.iter_mut());
            for ((instances, tokens), longest) in rows {
                let batch = instances.batch;
                for &(token, norm) in tokens.iter().skip(round * batch).take(batch) {
                    instances.push(token, norm, self.joint);
                    *longest = longest.max(norm);
                }
            }
            reduction.reduce(pool, instances)?;
            let rows = instances.iter_mut().zip(new).zip(longest.iter());
            for ((instances, tokens), longest) in rows {
                let taken = tokens.len().min((round + 1) * instances.batch);
                if let Some((last, _)) = tokens[..taken].last() {
                    self.erase(instances, last.position as usize + 1, *longest, head_dim);
                }
            }
        }
        Ok(())
    }

    /// Erases the buckets of small values, Algorithm 1's line 8, after `seen` tokens.
    fn erase(&self, instances: &mut Instances, seen: usize, longest: f32, head_dim: usize) {
        let Some(radius) = self.norm_bound else { return };
        let seen = self.max_tokens.unwrap_or(seen).max(1) as f64;
        let share = (-radius * radius / (head_dim as f64).sqrt()).exp();
        let bound = self.epsilon / (2.0 * seen) * share * f64::from(longest);
        instances.numerators.retain(|&bucket, _| f64::from(bucket).exp2() > bound);
    }
}

/// Weights of slots that instances hold: numerator and denominator.
pub(super) fn weights(instances: &Instances, joint: bool) -> BTreeMap<u32, (f32, f32)> {
    let mut weights = BTreeMap::<u32, (f32, f32)>::new();
    let mut add = |instance: &Instance, numerator: bool, denominator: bool| {
        for (level, tokens) in instance.levels.iter().enumerate() {
            let weight = (level as f32).exp2();
            for token in tokens {
                let own: &mut (f32, f32) = weights.entry(token.slot).or_default();
                own.0 = if numerator { weight } else { own.0 };
                own.1 = if denominator { weight } else { own.1 };
            }
        }
    };
    instances.numerators.values().for_each(|instance| add(instance, true, false));
    add(&instances.denominator, joint, true);
    weights
}
