//! `draw` in plain loops: the CPU path, and the oracle of the kernel's tests.

use std::cmp::Ordering;

use crate::layers::random::uniform;

/// One row's settings.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Settings {
    pub(crate) temperature: f32,
    pub(crate) top_p: f32,
    pub(crate) min_p: f32,
    /// At least 1; the vocabulary's size or more keeps all tokens.
    pub(crate) top_k: usize,
    pub(crate) seed: [u32; 2],
}

/// The token of a row's `draw`-th draw; `None` where a logit is NaN or infinite.
pub(crate) fn sample(logits: &[f32], settings: &Settings, draw: u32) -> Option<usize> {
    if logits.iter().any(|logit| !logit.is_finite()) {
        return None;
    }
    let better = |a: usize, b: usize| logits[a] > logits[b];
    let best = (0..logits.len()).reduce(|best, id| if better(id, best) { id } else { best })?;
    if settings.temperature <= 0.0 {
        return Some(best);
    }
    let max = logits[best];
    let weight = |id: usize| {
        if logits[id] < max { ((logits[id] - max) / settings.temperature).exp() } else { 1.0 }
    };
    let mut ids: Vec<usize> = (0..logits.len()).collect();
    // An order with likelier tokens first, and the lower id among equals.
    let likelier = |a: &usize, b: &usize| {
        let order = logits[*b].partial_cmp(&logits[*a]).unwrap_or(Ordering::Equal);
        order.then(a.cmp(b))
    };
    if settings.top_k < ids.len() {
        ids.select_nth_unstable_by(settings.top_k - 1, likelier);
        ids.truncate(settings.top_k);
        ids.sort_unstable();
    }
    if settings.top_p < 1.0 {
        let total = ids.iter().map(|&id| weight(id)).sum::<f32>();
        // All tokens with less weight than this have less than 1 - p together. None of them is
        // needed, so they are left out of the sort.
        let negligible = total * (1.0 - settings.top_p) / ids.len() as f32;
        ids.retain(|&id| weight(id) >= negligible);
        ids.sort_unstable_by(likelier);
        let mut sum = 0.0;
        let last = ids.iter().position(|&id| {
            sum += weight(id);
            sum >= settings.top_p * total
        });
        ids.truncate(last.map_or(ids.len(), |last| last + 1));
        ids.sort_unstable();
    }
    ids.retain(|&id| weight(id) > 0.0 && weight(id) >= settings.min_p);
    let mut left = uniform(settings.seed, draw) * ids.iter().map(|&id| weight(id)).sum::<f32>();
    let hit = ids.iter().position(|&id| {
        left -= weight(id);
        left < 0.0
    });
    // Rounding may leave a rest after the last kept token, which is then the drawn one.
    Some(hit.map_or_else(|| ids.last().copied().unwrap_or(best), |hit| ids[hit]))
}
