//! ZIP merging in plain loops, in f64: the CPU path, and the oracle of the kernels' tests.

use super::{KeyRule, MergeConfig, VOTES_RADIX};

/// One token or slot of a group.
#[derive(Debug, Clone, Copy)]
pub struct Member<'a> {
    /// Key, `[D]`.
    pub key: &'a [f64],
    /// Value, `[D]`.
    pub value: &'a [f64],
    /// `ln p`: the logarithm of its weight in attention.
    pub log_weight: f64,
    /// `ln ŝ`: the logarithm of its unnormalised score.
    pub log_score: f64,
}

/// A merged slot.
#[derive(Debug, Clone, PartialEq)]
pub struct MergedSlot {
    /// Key, `[D]`.
    pub key: Vec<f64>,
    /// Value, `[D]`.
    pub value: Vec<f64>,
    /// The logarithm of its weight in attention.
    pub log_weight: f64,
    /// The logarithm of its score.
    pub log_score: f64,
    /// Whether the guard tripped.
    pub guarded: bool,
}

/// Merges a group into one slot, as [`super::merge_slots`] does. `query` is the query of the merge,
/// if any.
pub fn merge_group(
    members: &[Member<'_>],
    query: Option<&[f64]>,
    rule: KeyRule,
    guard: f64,
    scale: f64,
) -> MergedSlot {
    let log_masses = || members.iter().map(|member| member.log_weight + member.log_score);
    let (log_mass, log_votes) =
        (log_sum_exp(log_masses()), log_sum_exp(members.iter().map(|member| member.log_weight)));
    // A group without mass is averaged by its weights.
    let massless = log_mass == f64::NEG_INFINITY;
    // Masses are taken relative to the largest, so that shares sum to 1 even where logarithms are
    // too large to differ by small amounts.
    let top = log_masses().fold(f64::NEG_INFINITY, f64::max);
    let total: f64 = log_masses().map(|mass| (mass - top).exp()).sum();
    let share = |member: &Member<'_>| match massless {
        true => (member.log_weight - log_votes).exp(),
        false => (member.log_weight + member.log_score - top).exp() / total,
    };
    let mut key = vec![0.0; members[0].key.len()];
    let mut value = key.clone();
    let mut mean_logit = 0.0;
    for member in members {
        let share = share(member);
        if share == 0.0 {
            continue;
        }
        mean_logit += share * member.log_score;
        key.iter_mut().zip(member.key).for_each(|(sum, x)| *sum += share * x);
        value.iter_mut().zip(member.value).for_each(|(sum, x)| *sum += share * x);
    }
    let target = log_mass - log_votes;
    if massless {
        let (log_weight, log_score) = (log_votes, f64::NEG_INFINITY);
        return MergedSlot { key, value, log_weight, log_score, guarded: false };
    }
    // Equal keys stay, whatever their scores.
    let alike = members.iter().all(|member| member.key == members[0].key);
    if alike {
        let key = members[0].key.to_vec();
        return MergedSlot { key, value, log_weight: log_votes, log_score: target, guarded: false };
    }
    // Where two logits differ by rounding alone, their quotient is meaningless.
    let size = log_mass.abs().max(log_votes.abs()).max(1.0);
    let excess = target - mean_logit;
    let same = excess.abs() <= 4.0 * f64::EPSILON * size;
    let factor = if same { 1.0 } else { target / mean_logit };
    let fits = guard == f64::INFINITY || (1.0 / guard..=guard).contains(&factor);
    let guarded = rule == KeyRule::Paper && !fits;
    let (mut log_weight, mut log_score) = (log_votes, target);
    let mut by_weight = || {
        log_weight += excess;
        log_score = mean_logit;
    };
    match rule {
        KeyRule::Paper if !guarded => key.iter_mut().for_each(|x| *x *= factor),
        KeyRule::Paper | KeyRule::Additive => {
            let square = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>();
            let norm = query.map_or(0.0, square);
            // Where the query is too short for the step, the weight makes up for it.
            let reach = guard.powi(2) * square(&key) * scale.powi(2) * norm;
            let short = norm == 0.0 || excess.powi(2) > reach;
            match query.filter(|_| !short) {
                Some(query) => {
                    let step = excess / (scale * norm);
                    key.iter_mut().zip(query).for_each(|(k, q)| *k += step * q);
                }
                None => by_weight(),
            }
        }
        KeyRule::Votes => by_weight(),
        KeyRule::Mean => {}
    }
    MergedSlot { key, value, log_weight, log_score, guarded }
}

fn log_sum_exp(values: impl Iterator<Item = f64> + Clone) -> f64 {
    let max = values.clone().fold(f64::NEG_INFINITY, f64::max);
    if max == f64::NEG_INFINITY {
        return max;
    }
    max + values.map(|value| (value - max).exp()).sum::<f64>().ln()
}

/// The arguments of a call.
#[derive(Debug)]
pub(crate) struct Groups<'a> {
    /// `[Sv, D]`
    pub(crate) from_keys: &'a [f32],
    /// `[Sv, D]`
    pub(crate) from_values: &'a [f32],
    /// `[P, N]`
    pub(crate) victims: &'a [i32],
    /// `[P]`
    pub(crate) victim_counts: &'a [i32],
    /// `[P, N]`
    pub(crate) targets: &'a [i32],
    /// `[P, N, 2]`, `[P, N, 4]` with votes, or `[P, N, 5]` with votes and a sum.
    pub(crate) victim_weights: &'a [f32],
    /// `[P, M]`
    pub(crate) kept: &'a [i32],
    /// `[P]`
    pub(crate) kept_counts: &'a [i32],
    /// As the victims' weights, `[P, M, 2]`, `[P, M, 4]` or `[P, M, 5]`.
    pub(crate) kept_weights: &'a [f32],
    /// `[P, D]`, where there are queries.
    pub(crate) queries: &'a [f32],
    pub(crate) head_dim: usize,
    pub(crate) config: MergeConfig,
}

/// A slot of the target pool that changes.
pub(crate) struct Written {
    pub(crate) slot: usize,
    pub(crate) key: Vec<f32>,
    pub(crate) value: Vec<f32>,
}

impl Groups<'_> {
    /// Returns the slots that change in the target pool, which holds `keys` and `values`; the kept
    /// slots' new weights; and whether the guard tripped.
    pub(crate) fn merge(&self, keys: &[f32], values: &[f32]) -> (Vec<Written>, Vec<f32>, Vec<i32>) {
        let rows = self.kept_counts.len();
        let (width, places) = (self.victims.len() / rows, self.kept.len() / rows);
        let mut weights = self.kept_weights.to_vec();
        let numbers = weights.len() / (rows * places);
        let mut guarded = vec![0; rows * places];
        let mut written = Vec::new();
        for row in 0..rows {
            let mut groups = vec![Vec::new(); self.kept_counts[row] as usize];
            for victim in row * width..row * width + self.victim_counts[row] as usize {
                let target = usize::try_from(self.targets[victim]).ok();
                if let Some(group) = target.and_then(|target| groups.get_mut(target)) {
                    group.push(victim);
                }
            }
            for (place, group) in groups.iter().enumerate().filter(|(_, group)| !group.is_empty()) {
                let at = row * places + place;
                let slot = self.kept[at] as usize;
                let wide = |rows: &[f32], slot: usize| -> Vec<f64> {
                    let row = &rows[slot * self.head_dim..][..self.head_dim];
                    row.iter().map(|&x| f64::from(x)).collect()
                };
                let mut parts = vec![(
                    wide(keys, slot),
                    wide(values, slot),
                    &self.kept_weights[numbers * at..][..2],
                )];
                for &victim in group {
                    let slot = self.victims[victim] as usize;
                    let (from_keys, from_values) = match self.config.within {
                        true => (keys, values),
                        false => (self.from_keys, self.from_values),
                    };
                    let (key, value) = (wide(from_keys, slot), wide(from_values, slot));
                    parts.push((key, value, &self.victim_weights[numbers * victim..][..2]));
                }
                let members: Vec<_> = parts
                    .iter()
                    .map(|(key, value, weights)| Member {
                        key,
                        value,
                        log_weight: weights[0].into(),
                        log_score: weights[1].into(),
                    })
                    .collect();
                let query = self.config.queried.then(|| wide(self.queries, row));
                let MergeConfig { rule, guard, scale, .. } = self.config;
                let merged =
                    merge_group(&members, query.as_deref(), rule, guard.into(), scale.into());
                weights[numbers * at] = merged.log_weight as f32;
                weights[numbers * at + 1] = merged.log_score as f32;
                if numbers > 2 {
                    let votes = |of: &[f32]| of[2] as u64 + VOTES_RADIX as u64 * of[3] as u64;
                    let own = votes(&self.kept_weights[numbers * at..]);
                    let more =
                        group.iter().map(|victim| votes(&self.victim_weights[numbers * victim..]));
                    let all = own + more.sum::<u64>();
                    weights[numbers * at + 2] = (all % VOTES_RADIX as u64) as f32;
                    weights[numbers * at + 3] = (all / VOTES_RADIX as u64) as f32;
                }
                if numbers > 4 {
                    let more = group.iter().map(|victim| self.victim_weights[numbers * victim + 4]);
                    weights[numbers * at + 4] += more.sum::<f32>();
                }
                guarded[at] = i32::from(merged.guarded);
                let narrow = |row: Vec<f64>| row.into_iter().map(|x| x as f32).collect();
                let (key, value) = (narrow(merged.key), narrow(merged.value));
                written.push(Written { slot, key, value });
            }
        }
        (written, weights, guarded)
    }
}
