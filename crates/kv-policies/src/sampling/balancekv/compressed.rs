//! The outcome of halving a prompt: the tokens that stay, with their weights, as a plan.

use kv_core::Selection;

use crate::{Plan, Result};

/// Weighted tokens that stand for longer lists, for each head range.
pub(super) struct Compressed {
    pub(super) kept: Vec<Vec<Kept>>,
    /// Whether numerators have weights of their own.
    pub(super) separate: bool,
}

pub(super) struct Kept {
    pub(super) token: u32,
    pub(super) log_weight: f32,
    /// The value's weight.
    pub(super) numerator: f32,
}

impl Kept {
    pub(super) fn exact(token: u32) -> Self {
        Self { token, log_weight: 0.0, numerator: 1.0 }
    }
}

impl Compressed {
    /// The plan that keeps these tokens and both ends of `tokens` tokens.
    pub(super) fn plan(self, [sinks, recents]: [usize; 2], tokens: usize) -> Result<Plan> {
        let mut kept = Vec::with_capacity(self.kept.len());
        let (mut log_weights, mut numerators) = (Vec::new(), Vec::new());
        for mut own in self.kept {
            let ends = (0..sinks).chain(tokens - recents..tokens);
            own.extend(ends.map(|token| Kept::exact(token as u32)));
            // Runs that ascend, which a stable sort merges.
            own.sort_by_key(|kept| kept.token);
            log_weights.extend(own.iter().map(|kept| kept.log_weight));
            numerators.extend(own.iter().map(|kept| kept.numerator));
            kept.push(own.into_iter().map(|kept| kept.token).collect());
        }
        Ok(Plan {
            selection: Selection::new(kept)?,
            log_weights: Some(log_weights),
            numerators: self.separate.then_some(numerators),
        })
    }
}
