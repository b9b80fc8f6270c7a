//! Retrieval and sharing of index sets in plain loops. It is the CPU path, and the oracle of the
//! kernels' tests.

use super::table::*;
use super::{CisConfig, Earlier, ScoreReduction, SetRule, SimilarityReduction};
use crate::components::sentinels::{ALL_SLOTS, NEW_SET};

/// One call's arguments, as slices in row-major order.
pub(crate) struct Problem<'a> {
    /// `[B, Hq, D]`
    pub(crate) query: &'a [f32],
    /// `[P, parts, length]`
    pub(crate) vectors: &'a [f32],
    /// `parts`
    pub(crate) parts: usize,
    /// `[S, D]`
    pub(crate) keys: &'a [f32],
    /// `D`
    pub(crate) head_dim: usize,
    /// `[P]`
    pub(crate) offsets: &'a [i32],
    /// `[P]`
    pub(crate) lengths: &'a [i32],
    /// `[B]`
    pub(crate) newest: &'a [i32],
    pub(crate) config: CisConfig,
}

/// The slots that a range's step sees, counted from the range's first slot.
struct VisibleRange {
    sinks: usize,
    /// The first visible slot after the sinks.
    start: usize,
    /// The first local slot.
    local: usize,
    length: usize,
    /// By how much a token's index exceeds its slot.
    freed: usize,
}

impl Problem<'_> {
    /// Runs a step of every range. Changes `table` `[P, row]` and `set_vectors` `[P, sets, parts,
    /// length]`. Returns the log-sum-exp of each query over the visible slots, `[P, G]`, for the
    /// ranges that were scored.
    pub(crate) fn solve(&self, table: &mut [i32], set_vectors: &mut [f32]) -> Vec<f32> {
        let CisConfig { sets, width, .. } = self.config;
        let total_kv_heads = self.offsets.len();
        let group = self.query.len() / self.head_dim / total_kv_heads;
        let mut sums = vec![0.0; total_kv_heads * group];
        for kv_head in 0..total_kv_heads {
            let own = &mut table[kv_head * row(sets, width)..][..row(sets, width)];
            let vectors =
                &mut set_vectors[kv_head * sets * self.length()..][..sets * self.length()];
            self.step(kv_head, own, vectors, &mut sums[kv_head * group..][..group]);
        }
        sums
    }

    /// Numbers of a range's vectors.
    fn length(&self) -> usize {
        self.vectors.len() / self.offsets.len()
    }

    fn step(&self, kv_head: usize, own: &mut [i32], vectors: &mut [f32], sums: &mut [f32]) {
        let CisConfig { options, sets, width, measures, .. } = self.config;
        let kv_heads = self.offsets.len() / self.newest.len();
        let newest = self.newest[kv_head / kv_heads];
        let visible = self.visible(kv_head, newest, own);
        let block = newest / options.block as i32;
        let held = if own[BLOCK] == block { own[SETS] as usize } else { 0 };
        let mut decided = NEW_SET;
        let rule = SetRule {
            sinks: visible.sinks,
            locals: own[LOCALS] as usize,
            top: own[TOP] as usize,
            dilated: f32::from_bits(own[DILATED] as u32),
            threshold: f32::from_bits(own[THRESHOLD] as u32),
            wanted: usize::try_from(own[WANTED]).ok().filter(|wanted| *wanted > 0),
        };
        if visible.local - visible.start <= rule.top {
            decided = ALL_SLOTS;
        } else if options.block > 1 {
            decided = self.decide(kv_head, own, vectors, held, rule.threshold);
        }
        let logits = if measures || decided == NEW_SET {
            let logits = self.logits(kv_head, &visible, sums);
            Some(logits)
        } else {
            None
        };
        // Tokens that a step reads where it retrieves and does not read its set.
        let mut choice = None;
        let entry = held.min(sets - 1);
        let enters = decided == NEW_SET || decided != ALL_SLOTS && options.earlier == Earlier::Any;
        if decided == NEW_SET {
            let logits = logits.as_deref().unwrap_or_default();
            let mut lists = self.choose(&visible, logits, sums, rule);
            lists.iter_mut().for_each(|list| list.truncate(width));
            let [best, set] = lists;
            write_tokens(&mut own[list(sets, width, entry)..], &set, visible.freed);
            let mut fields = [0; SET_FIELDS];
            fields[COUNT] = set.len() as i32;
            fields[LIST] = entry as i32;
            fields[LOCAL_TOKEN] = (visible.local + visible.freed) as i32;
            own[FIELDS + entry * SET_FIELDS..][..SET_FIELDS].copy_from_slice(&fields);
            if let Some(wanted) = rule.wanted {
                own[TOP] = next_top(rule.top, set.len(), wanted) as i32;
            }
            if options.reads_choice() {
                write_tokens(&mut own[list(sets, width, sets)..], &best, visible.freed);
                choice = Some(best.len());
            }
        } else if enters {
            // The entry names the shared list, with its length.
            let shared = FIELDS + decided as usize * SET_FIELDS;
            own.copy_within(shared..shared + SET_FIELDS, FIELDS + entry * SET_FIELDS);
        }
        if enters {
            let length = self.length();
            vectors[entry * length..][..length]
                .copy_from_slice(&self.vectors[kv_head * length..][..length]);
            own[BLOCK] = block;
            own[SETS] = entry as i32 + 1;
        }
        own[DECIDED] = decided;
        let set = if decided == NEW_SET { entry } else { decided.max(0) as usize };
        let (mut first, mut read) = (0, 0);
        let mut local = visible.start;
        if decided != ALL_SLOTS {
            let fields = FIELDS + set * SET_FIELDS;
            local = visible.local;
            if options.tail {
                let then = usize::try_from(own[fields + LOCAL_TOKEN]).unwrap_or(0);
                let first = local.saturating_sub(options.longest_tail()).max(visible.start);
                local = local.min(then.saturating_sub(visible.freed).max(first));
            }
            if let Some(count) = choice {
                (first, read) = (list(sets, width, sets), count);
            } else {
                let from = list(sets, width, set);
                let tokens = &own[from..from + own[fields + COUNT] as usize];
                let behind = |slot: usize| (slot + visible.freed) as i32;
                let hidden = tokens.iter().take_while(|token| **token < behind(visible.start));
                let hidden = hidden.count();
                let end = tokens.iter().take_while(|token| **token < behind(local)).count();
                (first, read) = (from + hidden, end.saturating_sub(hidden));
            }
        }
        own[FIRST] = first as i32;
        own[READ] = read as i32;
        own[LOCAL] = local as i32;
        own[FREED] = visible.freed as i32;
        own[SEEN] = visible.start as i32;
        own[STEPS] += 1;
        own[RETRIEVED] += i32::from(decided == NEW_SET);
        let tokens = own[TOKENS] + (visible.sinks + read + visible.length - local) as i32;
        own[TOKENS] = tokens & ((1 << TOKEN_BITS) - 1);
        own[TOKENS_HIGH] += tokens >> TOKEN_BITS;
    }

    fn visible(&self, kv_head: usize, newest: i32, own: &[i32]) -> VisibleRange {
        let options = self.config.options;
        let length = usize::try_from(self.lengths[kv_head]).unwrap_or(0);
        let tokens = usize::try_from(newest + 1).unwrap_or(0);
        let freed = tokens.saturating_sub(length);
        let sinks = (own[SINKS] as usize).min(length);
        let start = options.hidden.of(tokens).saturating_sub(1 + freed);
        let start = start.clamp(sinks, length);
        let local = length.saturating_sub(own[LOCALS] as usize).max(start);
        VisibleRange { sinks, start, local, length, freed }
    }

    /// The list of the most recent entry whose similarity is above the threshold, or `NEW_SET`.
    fn decide(
        &self,
        kv_head: usize,
        row: &[i32],
        vectors: &[f32],
        held: usize,
        threshold: f32,
    ) -> i32 {
        let options = self.config.options;
        let length = self.length();
        let part = length / self.parts;
        let own = &self.vectors[kv_head * length..][..length];
        let parts = |entry: usize| {
            let others = &vectors[entry * length..][..length];
            own.chunks_exact(part).zip(others.chunks_exact(part))
        };
        let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
        for entry in (0..held).rev() {
            let cosines = parts(entry).map(|(a, b)| {
                let norms = (dot(a, a) * dot(b, b)).sqrt();
                if norms > 0.0 { (dot(a, b) / norms).min(1.0) } else { 0.0 }
            });
            let similarity = match options.similarity {
                SimilarityReduction::Min => cosines.fold(1.0, f32::min),
                SimilarityReduction::Mean => cosines.map(|cosine| cosine / self.parts as f32).sum(),
            };
            if similarity.min(1.0) > threshold || threshold <= -1.0 {
                return row[FIELDS + entry * SET_FIELDS + LIST];
            }
        }
        NEW_SET
    }

    /// The logits of all slots, `[G, length]`. Writes their log-sum-exps over the visible slots to
    /// `sums`.
    fn logits(&self, kv_head: usize, visible: &VisibleRange, sums: &mut [f32]) -> Vec<f32> {
        let group = sums.len();
        let offset = self.offsets[kv_head] as usize;
        let dim = self.head_dim;
        let mut logits = Vec::with_capacity(group * visible.length);
        for (g, sum) in sums.iter_mut().enumerate() {
            let query = &self.query[(kv_head * group + g) * dim..][..dim];
            let own: Vec<f32> = (0..visible.length)
                .map(|slot| {
                    let key = &self.keys[(offset + slot) * dim..][..dim];
                    query.iter().zip(key).map(|(q, k)| q * k).sum::<f32>() * self.config.scale
                })
                .collect();
            let seen =
                || (0..visible.sinks).chain(visible.start..visible.length).map(|slot| own[slot]);
            let top = seen().fold(f32::NEG_INFINITY, f32::max);
            // In f32 a sum of many thousand terms would lose digits.
            let total: f64 = seen().map(|logit| f64::from((logit - top).exp())).sum();
            *sum = top + total.ln() as f32;
            logits.extend(own);
        }
        logits
    }

    /// The slots of the highest scores; and these slots with the neighbours of the `m` highest.
    /// Both ascend.
    fn choose(
        &self,
        visible: &VisibleRange,
        logits: &[f32],
        sums: &[f32],
        rule: SetRule,
    ) -> [Vec<usize>; 2] {
        let options = self.config.options;
        let score = |slot: usize| {
            let own =
                sums.iter().enumerate().map(|(g, sum)| logits[g * visible.length + slot] - sum);
            let top = own.clone().fold(f32::NEG_INFINITY, f32::max);
            match options.reduction {
                ScoreReduction::Sum if sums.len() > 1 => {
                    top + own.map(|score| (score - top).exp()).sum::<f32>().ln()
                }
                _ => top,
            }
        };
        let mut ranked: Vec<(f32, usize)> =
            (visible.start..visible.local).map(|slot| (score(slot), slot)).collect();
        // The sort is stable, so the lower slot is first among equal scores. NaN is last.
        ranked.sort_by(|a, b| {
            b.0.partial_cmp(&a.0).unwrap_or_else(|| a.0.is_nan().cmp(&b.0.is_nan()))
        });
        let mut highest: Vec<usize> = ranked.iter().take(rule.top).map(|(_, slot)| *slot).collect();
        highest.sort_unstable();
        let mut chosen = highest.clone();
        for (_, slot) in ranked.iter().take(rule.best()) {
            let first = slot.saturating_sub(options.radius).max(visible.start);
            let last = (slot + options.radius).min(visible.length - 1);
            chosen.extend(first..=last);
        }
        chosen.sort_unstable();
        chosen.dedup();
        [highest, chosen]
    }
}

fn write_tokens(list: &mut [i32], slots: &[usize], freed: usize) {
    for (entry, slot) in list.iter_mut().zip(slots) {
        *entry = (slot + freed) as i32;
    }
}

/// The `top` of the next retrieval, where this retrieval's `top` has given a set of `count` tokens
/// and `wanted` are wanted.
pub(super) fn next_top(top: usize, count: usize, wanted: usize) -> usize {
    // Moves by half the difference, rounded up.
    let next = if count > wanted {
        top.saturating_sub((count - wanted).div_ceil(2))
    } else {
        top + (wanted - count).div_ceil(2)
    };
    next.clamp(1, wanted.max(1))
}
