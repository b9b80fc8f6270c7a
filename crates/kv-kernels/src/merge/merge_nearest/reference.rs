//! `merge_nearest` in plain loops: the CPU path, and the oracle of the kernel's tests.

use super::NearestConfig;
use crate::merge::merge_slots::VOTES_RADIX;
use crate::merge::merge_slots::reference::{Member, merge_group};
use crate::merge::nearest_slots::reference::Pairing;
use crate::merge::takes::{TAKES_ANY, TAKES_SIMILAR};
use crate::slots::average_scores::reference::{average, log_add};

/// The arguments of a call; pools are written.
pub(crate) struct Slots<'a> {
    /// `[S, D]`
    pub(crate) keys: &'a mut [f32],
    /// `[S, D]`
    pub(crate) values: &'a mut [f32],
    pub(crate) log_weights: &'a mut [f32],
    pub(crate) log_scores: &'a mut [f32],
    pub(crate) log_samples: &'a mut [f32],
    pub(crate) votes: &'a mut [f32],
    pub(crate) votes_high: &'a mut [f32],
    pub(crate) inherited: Option<&'a mut [f32]>,
    /// Which merges each slot takes; empty where all take similar victims.
    pub(crate) takes: &'a [f32],
    pub(crate) head_dim: usize,
}

impl Slots<'_> {
    /// Merges the `victims` of all ranges, `[B * Hkv]`. Returns the slots that changed.
    pub(crate) fn merge(
        &mut self,
        [offsets, lengths, victims, goes]: [&[i32]; 4],
        queries: &[f32],
        logits: &[f32],
        config: NearestConfig,
    ) -> Vec<usize> {
        let head_dim = self.head_dim;
        let mut changed = Vec::new();
        for kv_head in 0..victims.len() {
            if let Some(weights) = config.average {
                let group = logits.len() / self.log_scores.len();
                let (from, to) =
                    (offsets[kv_head] as usize, (offsets[kv_head] + lengths[kv_head]) as usize);
                average(
                    &mut self.log_scores[from..to],
                    &mut self.log_samples[from..to],
                    &logits[from * group..to * group],
                    Some(&self.log_weights[from..to]),
                    weights,
                );
            }
            if goes[kv_head] == 0 || victims[kv_head] < 0 {
                continue;
            }
            let victim = victims[kv_head] as usize;
            let live = offsets[kv_head]..offsets[kv_head] + lengths[kv_head];
            let takes = |slot: i32| self.takes.get(slot as usize).copied().unwrap_or(TAKES_SIMILAR);
            let among: Vec<i32> =
                live.clone().filter(|&slot| takes(slot) == TAKES_SIMILAR).collect();
            let pairing = Pairing {
                keys: self.keys,
                head_dim,
                of: &victims[kv_head..=kv_head],
                of_counts: &[1],
                among: &among,
                among_counts: &[among.len() as i32],
                earlier: false,
            };
            let (places, cosines) = pairing.nearest();
            let similar = usize::try_from(places[0]).ok().filter(|_| cosines[0] > config.threshold);
            let any =
                || live.clone().find(|&slot| takes(slot) == TAKES_ANY && slot as usize != victim);
            let Some(target) = similar.map(|place| among[place]).or_else(any) else { continue };
            let target = target as usize;
            let wide = |rows: &[f32], row: usize| -> Vec<f64> {
                rows[row * head_dim..][..head_dim].iter().map(|&x| f64::from(x)).collect()
            };
            let parts =
                [target, victim].map(|slot| (wide(self.keys, slot), wide(self.values, slot)));
            let member = |slot: usize, at: usize| Member {
                key: &parts[at].0,
                value: &parts[at].1,
                log_weight: self.log_weights[slot].into(),
                log_score: log_add(
                    self.log_scores[slot] - self.log_samples[slot],
                    config.log_epsilon,
                )
                .into(),
            };
            let members = [member(target, 0), member(victim, 1)];
            // The group's mean.
            let group = queries.len() / (victims.len() * head_dim);
            let query = config.merge.queried.then(|| {
                let mut mean = vec![0.0; head_dim];
                for head in 0..group {
                    let query = wide(queries, kv_head * group + head);
                    mean.iter_mut().zip(query).for_each(|(mean, x)| *mean += x / group as f64);
                }
                mean
            });
            let merged = merge_group(
                &members,
                query.as_deref(),
                config.merge.rule,
                config.merge.guard.into(),
                config.merge.scale.into(),
            );
            let narrow = |to: &mut [f32], from: &[f64]| {
                to.iter_mut().zip(from).for_each(|(to, from)| *to = *from as f32);
            };
            narrow(&mut self.keys[target * head_dim..][..head_dim], &merged.key);
            narrow(&mut self.values[target * head_dim..][..head_dim], &merged.value);
            self.log_weights[target] = merged.log_weight as f32;
            let score = merged.log_score + f64::from(self.log_samples[target]);
            self.log_scores[target] = score.max(f64::from(f32::MIN)) as f32;
            let low = self.votes[target] + self.votes[victim];
            let carry = (low / VOTES_RADIX).floor();
            self.votes[target] = low - carry * VOTES_RADIX;
            self.votes_high[target] += self.votes_high[victim] + carry;
            if let Some(inherited) = &mut self.inherited {
                inherited[target] += inherited[victim];
            }
            changed.push(target);
        }
        changed
    }
}
