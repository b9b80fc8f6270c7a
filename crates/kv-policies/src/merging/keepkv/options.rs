//! KeepKV's parameters.

use kv_kernels::{GUARD, KeyRule};
use serde::{Deserialize, Serialize};

use super::Predictor;
use crate::policy::spelling;

/// KeepKV's own options.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct KeepKvOptions {
    /// Cosine that a victim's key must exceed (section 4.1: 0.8).
    pub threshold: f32,
    /// The rule for merged keys; the authors' code takes the mean.
    #[serde(with = "spelling::Key")]
    pub key: KeyRule,
    /// The paper's factor is used only between `1 / guard` and `guard`; 0 for no such guard.
    pub guard: f32,
    /// How future scores are predicted.
    pub predictor: Predictor,
    /// How fast the moving average forgets (equation 8). The paper names no number: 0.9 is ours.
    pub alpha: f64,
    /// Whether the moving average is divided by `1 − α^t` with the absolute step `t`, as in
    /// equation 8, rather than with the number of a slot's scores. At the end of a prompt the
    /// absolute step corrects nothing: a new token starts as if it had an endless history.
    pub absolute_step: bool,
    /// The prompt's last queries, whose scores the average starts with. The paper names no number:
    /// 32 is ours.
    pub window: usize,
    /// Added to scores that weigh keys and values. The authors' code does so in all merges but the
    /// mean; the paper does not.
    pub epsilon: f64,
    /// Whether similar tokens of a prompt are merged before or behind the eviction.
    pub order: Order,
    /// Whether first and last tokens that the evictor always keeps take no merges, so that they
    /// stay as they are. The paper and the authors' code merge into all that is kept. Decode steps
    /// wait for the device then, and are not recorded.
    pub spare_protected: bool,
    /// Ours: the share of a prompt's kept slots, in each head, that no merge changes, in the prompt
    /// or later. They are the slots of the evictor's highest scores.
    pub pristine: f64,
    /// Ours: whether a victim whose cosines are all at or below the threshold goes into one slot of
    /// its head, in place of being dropped. No vote is lost then.
    pub background: bool,
    /// Ours: whether a merged slot has the sum of its slots' scores in the evictor's accumulated
    /// scores, rather than its own token's.
    pub inherit: bool,
    /// The steps between rebuilds of the cache from all tokens, which host memory then keeps
    /// (periodic lossless compression); 0 for no rebuilds.
    pub period: usize,
    /// Whether layers are rebuilt at different steps of the period rather than at one step. A
    /// layer's tokens are copied to the device while the step before runs.
    pub staggered: bool,
    /// The estimated perturbation of a step, relative to the largest value's norm, above which the
    /// cache is rebuilt (theorem 5, tracked at run time; every step then asks the host); 0 for
    /// never.
    pub rebuild_above: f64,
}

/// When a prompt's tokens are merged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Order {
    /// Before the eviction: a token joins the most similar token that ranks higher, which also gets
    /// its score, so that groups of similar tokens compete as one (section 3.3 finds this better).
    #[default]
    MergeFirst,
    /// After the eviction.
    EvictFirst,
}

impl Default for KeepKvOptions {
    fn default() -> Self {
        Self {
            threshold: 0.8,
            key: KeyRule::Paper,
            guard: GUARD,
            predictor: Predictor::default(),
            alpha: 0.9,
            absolute_step: false,
            window: 32,
            epsilon: 0.0,
            order: Order::default(),
            spare_protected: false,
            pristine: 0.0,
            background: false,
            inherit: false,
            period: 0,
            staggered: true,
            rebuild_above: 0.0,
        }
    }
}
