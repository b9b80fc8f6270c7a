//! The decision in plain loops.

/// What stands for `ln 0`, finite so that all devices can write and compare it.
pub const LOWEST_NORM: f32 = -3.0e38;
/// Logits from here down to −∞ carry no weight.
pub(crate) const WEIGHTLESS: f32 = -1.0e38;
/// What stands for the importance of a slot of weight 0.
pub(crate) const ABSENT: f32 = f32::MAX;

/// `ln ‖v‖₁` of a value.
pub(crate) fn log_norm(value: &[f32]) -> f32 {
    let norm: f32 = value.iter().map(|x| x.abs()).sum();
    // NaN is no zero, and goes on.
    if norm == 0.0 { LOWEST_NORM } else { norm.ln() }
}

/// One call's arguments behind the attention, as slices in row-major order.
pub(crate) struct Decision<'a> {
    /// Weighted logits, `[S, G]`.
    pub(crate) logits: &'a [f32],
    /// `[B, Hq]`
    pub(crate) log_sum_exp: &'a [f32],
    /// `[S]`
    pub(crate) log_norms: &'a [f32],
    /// `[B, Hkv]`
    pub(crate) offsets: &'a [i32],
    /// `[B, Hkv]`
    pub(crate) lengths: &'a [i32],
    /// `[B, Hkv]`
    pub(crate) limits: &'a [i32],
    /// `[B, Hkv]`
    pub(crate) newest: &'a [i32],
    pub(crate) spares_newest: bool,
    pub(crate) guard: Option<HostGuard<'a>>,
    pub(crate) kv_heads: usize,
    pub(crate) group: usize,
    /// Whether all heads of a sequence decide together.
    pub(crate) together: bool,
}

/// [`super::Guard`] on the host.
pub(crate) struct HostGuard<'a> {
    /// `[S]`
    pub(crate) positions: &'a [i32],
    /// `[B]`
    pub(crate) now: &'a [i32],
    pub(crate) sinks: i32,
    pub(crate) recents: i32,
}

impl Decision<'_> {
    /// Logarithms of importances, `[S]`.
    pub(crate) fn importance(&self) -> Vec<f32> {
        let mut importance = vec![ABSENT; self.log_norms.len()];
        for pair in 0..self.offsets.len() {
            let sums = &self.log_sum_exp[pair * self.group..][..self.group];
            for slot in self.slots(pair) {
                let logits = &self.logits[slot * self.group..][..self.group];
                // NaN is not hidden.
                if logits[0] >= WEIGHTLESS || logits[0].is_nan() {
                    let shares = logits.iter().zip(sums).map(|(logit, sum)| logit - sum);
                    importance[slot] = log_sum_exp(shares) + self.log_norms[slot];
                }
            }
        }
        importance
    }

    /// Where the next tokens go, `[B, Hkv]`.
    pub(crate) fn next(&self, importance: &[f32]) -> Vec<i32> {
        let mut next = Vec::with_capacity(self.offsets.len());
        for sequence in 0..self.offsets.len() / self.kv_heads {
            let heads = sequence * self.kv_heads..(sequence + 1) * self.kv_heads;
            let common = self.together.then(|| {
                let places = heads.clone().map(|pair| self.lengths[pair]).min().unwrap_or(0);
                let all = |place: usize| {
                    let own = heads.clone().map(|pair| importance[self.slot(pair, place)]);
                    let own: Vec<f32> = own.filter(|importance| *importance != ABSENT).collect();
                    if own.is_empty() { ABSENT } else { log_sum_exp(own.into_iter()) }
                };
                self.weakest(heads.start, (0..places as usize).map(all))
            });
            for pair in heads {
                let own = || {
                    let slots = self.slots(pair);
                    self.weakest(pair, slots.map(|slot| importance[slot]))
                };
                let full = self.lengths[pair] >= self.limits[pair];
                let weakest = || common.unwrap_or_else(own);
                next.push(if full { weakest() } else { self.lengths[pair] });
            }
        }
        next
    }

    /// The place of the lowest of a head's importances among those that may be given up.
    fn weakest(&self, pair: usize, importance: impl Iterator<Item = f32>) -> i32 {
        let newest = self.newest[pair];
        let mut best: Option<(i32, f32)> = None;
        for (place, importance) in importance.enumerate() {
            let slot = self.slot(pair, place);
            let place = place as i32;
            let stays = self.spares_newest && place == newest
                || importance == ABSENT
                || importance.is_nan()
                || self.guard.as_ref().is_some_and(|guard| {
                    let now = guard.now[pair / self.kv_heads];
                    let position = guard.positions[slot];
                    position < guard.sinks || position > now.saturating_sub(guard.recents)
                });
            if !stays && best.is_none_or(|(_, lowest)| importance < lowest) {
                best = Some((place, importance));
            }
        }
        best.map_or(newest, |(place, _)| place)
    }

    fn slot(&self, pair: usize, place: usize) -> usize {
        self.offsets[pair] as usize + place
    }

    fn slots(&self, pair: usize) -> std::ops::Range<usize> {
        let start = self.offsets[pair] as usize;
        start..start + usize::try_from(self.lengths[pair]).unwrap_or(0)
    }
}

/// `ln Σ exp(x)`, with the maximum subtracted.
fn log_sum_exp(values: impl Iterator<Item = f32> + Clone) -> f32 {
    let max = values.clone().fold(f32::NEG_INFINITY, f32::max);
    max + values.map(|x| (x - max).exp()).sum::<f32>().ln()
}
