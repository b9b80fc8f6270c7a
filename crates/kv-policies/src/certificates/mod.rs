//! Bounds on what sparse attention loses (PrHS, sections II-C, VII and VIII, appendix A).
//!
//! All bounds are of single heads, in f64 and in nats. Their inputs follow from a step's queries,
//! keys and index sets ([`kv_kernels::RangeSets`]).

pub(crate) mod depth_bounds;
pub(crate) mod eviction;

/// The binary entropy of a probability.
pub fn binary_entropy(probability: f64) -> f64 {
    let term = |p: f64| if p > 0.0 { -p * p.ln() } else { 0.0 };
    term(probability) + term(1.0 - probability)
}

/// `g(δ) = 2 (h_b(δ) + δ ln L)`: the most mutual information that is lost where attention of mass
/// `dropped` over `eligible` tokens is dropped (equation 4).
pub fn information_loss(dropped: f64, eligible: f64) -> f64 {
    2.0 * (binary_entropy(dropped) + dropped * eligible.ln())
}

/// The measurements of a step that shares a set.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SharedStep {
    /// The attention, by the query that retrieved the set, to tokens that the step may not read.
    pub dropped: f64,
    /// `‖q' − q‖` of the step's query and the set's own.
    pub distance: f64,
    /// `K_max`, the largest norm of a key.
    pub key_norm: f64,
    /// Factor of `q . k` in a logit, `1 / sqrt(D)`.
    pub scale: f64,
}

impl SharedStep {
    /// The most that a logit can have changed, by Cauchy-Schwarz (lemma 6).
    pub fn logit_change(&self) -> f64 {
        self.scale * self.key_norm * self.distance
    }

    /// `Δ_att`: the most that attention can have changed, in the L1 norm (lemma 7, with the
    /// queries' own distance in place of unit queries' `sqrt(2 − 2 τ)`).
    pub fn attention_change(&self) -> f64 {
        2.0 * self.logit_change()
    }

    /// The most that attention can have changed, in the L1 norm, without the paper's factor: where
    /// no logit changes by more than `ε`, a set's mass `p` becomes at most
    /// `p e^ε / (p e^ε + (1 - p) e^-ε)`, which exceeds `p` by at most `tanh(ε / 2)`, and the L1
    /// norm is twice that. Below `Δ_att / 2`, and never above 2.
    ///
    /// The step retains less than the oracle by no more than this, either: the best tokens gain,
    /// and the retained ones lose, at most half of the change each. That is at most a quarter of
    /// [`Self::gap`].
    pub fn attention_change_at_most(&self) -> f64 {
        2.0 * (self.logit_change() / 2.0).tanh()
    }

    /// The paper's bound on the attention dropped by the step, `δ + Δ_att` (lemma 9): vacuous
    /// above 1.
    pub fn dropped_by_paper(&self) -> f64 {
        self.dropped + self.attention_change()
    }

    /// Our bound, at most 1: where no logit changes by more than `ε`, the odds of the dropped
    /// attention change by a factor of `exp(2 ε)` at most.
    pub fn dropped_by_odds(&self) -> f64 {
        if self.dropped >= 1.0 {
            return 1.0;
        }
        // In logarithms: odds may be beyond any number.
        let log_odds = (self.dropped / (1.0 - self.dropped)).ln() + 2.0 * self.logit_change();
        1.0 / (1.0 + (-log_odds).exp())
    }

    /// `β_th <= 2 Δ_att`: how much less than the oracle the step can retain (equation 42).
    pub fn gap(&self) -> f64 {
        2.0 * self.attention_change()
    }
}
