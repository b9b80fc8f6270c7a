//! KeepKV's parameters.

use kv_kernels::GUARD;
use serde::{Deserialize, Serialize};

use super::Predictor;

/// KeepKV's own options.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct KeepKvOptions {
    /// Cosine that a victim's key must exceed (section 4.1: 0.8).
    pub threshold: f32,
    /// What becomes of merged keys.
    pub key: Key,
    /// The paper's factor is taken from `1 / guard` to `guard`; 0 for the equation as it is.
    pub guard: f32,
    /// How scores to come are predicted.
    pub predictor: Predictor,
    /// How fast the moving average forgets (equation 8). The paper names no number: 0.9 is ours.
    pub alpha: f64,
    /// Whether the moving average is divided by `1 − α^t` with the absolute step `t`, as equation 8
    /// has it, rather than with the number of scores that a slot has seen: at the end of a prompt
    /// the former corrects nothing. New tokens start as if behind endless ones.
    pub absolute_step: bool,
    /// The prompt's last queries, whose scores the average starts with. The paper names no number:
    /// 32 is ours.
    pub window: usize,
    /// Added to scores when they weigh keys and values, as in the authors' code, which merges by
    /// all but the mean so; the paper has no such thing.
    pub epsilon: f64,
    /// Whether similar tokens of a prompt are merged before or behind the eviction.
    pub order: Order,
    /// Whether first and last tokens that the evictor always keeps take no merges, so that they
    /// stay as they are. The paper and the authors' code merge into all that is kept. Decode steps
    /// wait for the device then, and are not recorded.
    pub spare_protected: bool,
    /// Every so many steps the cache is rebuilt from all tokens, which are in host memory then
    /// (periodic lossless compression); 0 for never.
    pub period: usize,
    /// Whether layers take turns within the period, rather than being rebuilt at the same step:
    /// each one's tokens come back to the device while the step before runs.
    pub staggered: bool,
    /// The estimated perturbation of a step, relative to the largest value's norm, above which the
    /// cache is rebuilt (theorem 5, tracked at run time; every step then asks the host); 0 for
    /// never.
    pub rebuild_above: f64,
}

/// What becomes of merged keys; see [`kv_kernels::KeyRule`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Key {
    /// The paper's factor, and the additive rule where the guard trips.
    #[default]
    Paper,
    /// Moved along the query.
    Additive,
    /// The mean, and a weight that makes up for it.
    Votes,
    /// The mean, as the authors' code has it.
    Mean,
}

/// When a prompt's tokens are merged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Order {
    /// Before: a token joins the most similar one that ranks higher, which gets its score too, so
    /// that groups of similar tokens compete as one (section 3.3 finds this better).
    #[default]
    MergeFirst,
    /// Behind.
    EvictFirst,
}

impl Default for KeepKvOptions {
    fn default() -> Self {
        Self {
            threshold: 0.8,
            key: Key::default(),
            guard: GUARD,
            predictor: Predictor::default(),
            alpha: 0.9,
            absolute_step: false,
            window: 32,
            epsilon: 0.0,
            order: Order::default(),
            spare_protected: false,
            period: 0,
            staggered: true,
            rebuild_above: 0.0,
        }
    }
}
