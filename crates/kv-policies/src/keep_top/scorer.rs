//! The part of a *score → keep the top* policy that differs from one paper to the next.

use std::fmt::Debug;

use burn::tensor::Tensor;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::{DecodeView, Needs, Observation, Reduction, Result};

/// Scores tokens; higher ones are kept.
pub trait Scorer:
    Debug + Clone + Default + Send + Sync + Serialize + DeserializeOwned + 'static
{
    /// The registry's name.
    const NAME: &'static str;

    /// Whether scores are drawn from the request's seed.
    const DRAWS: bool = false;

    /// Checks the parameters.
    ///
    /// # Errors
    /// What is wrong, with name, value and what was expected.
    fn validate(&self) -> std::result::Result<(), String> {
        Ok(())
    }

    /// What prefill must compute.
    fn needs(&self) -> Needs {
        Needs::default()
    }

    /// Recents protected in prefill whatever the family's options say (an observation window).
    fn window(&self) -> usize {
        0
    }

    /// The scorer with an observation window that leaves room in a `budget` of slots a head.
    fn fitted(&self, budget: usize) -> Self {
        let _ = budget;
        self.clone()
    }

    /// Whether all heads of a layer keep the same tokens.
    fn heads_agree(&self) -> bool {
        false
    }

    /// Scores of a prompt, `[B, Hkv, T]`, f32. `budget` is the layer's slots per head.
    ///
    /// # Errors
    /// [`crate::PolicyError`] where the observation lacks something.
    fn prefill(&self, observation: &Observation<'_>, budget: usize) -> Result<Tensor<3>>;

    /// How this scorer acts during decode.
    fn decoding(&self) -> Decoding {
        Decoding::None
    }

    /// Scores of all slots during decode, `[S]`, f32; by default the track [`SCORE`]. Called after
    /// the step's attention. Values of slots beyond a head's length are ignored.
    ///
    /// # Errors
    /// The errors of [`Self::prefill`].
    fn decode(&self, view: &DecodeView<'_>) -> Result<Tensor<1>> {
        view.track(SCORE)
    }

    /// How probabilities of a group become the number that a step adds to the track [`SCORE`].
    fn adds(&self) -> Reduction {
        Reduction::Mean
    }

    /// Whether the number that a step adds is multiplied by `‖v‖₁` of the slot's value.
    fn weighs_values(&self) -> bool {
        false
    }

    /// The family's defaults for this scorer.
    fn defaults() -> KeepTopDefaults {
        KeepTopDefaults::default()
    }
}

/// How a scorer acts during decode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decoding {
    /// Decode steps drop nothing: decoded tokens accumulate.
    None,
    /// [`Scorer::decode`] needs no attention and runs before it: the step attends to what stays.
    BeforeAttention,
    /// [`Scorer::decode`] runs after the step's attention.
    AfterAttention {
        /// Whether the scorer is shown the step's attention probabilities.
        probabilities: bool,
        /// Whether steps add to the track [`SCORE`], as [`Scorer::adds`] says.
        accumulate: bool,
    },
    /// Every `interval` steps, [`Scorer::prefill`] scores each head's slots as if they were a
    /// prompt.
    Rescore {
        /// The number of last queries that the scorer is shown.
        window: usize,
        /// The number of last queries before RoPE that the scorer is shown.
        raw_queries: usize,
    },
}

/// Defaults of the family's options that a paper fixes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct KeepTopDefaults {
    /// First tokens that are always kept.
    pub sinks: usize,
    /// Share of the budget that goes to the most recent tokens.
    pub recent_share: f64,
    /// Decode steps between evictions.
    pub interval: usize,
}

impl Default for KeepTopDefaults {
    fn default() -> Self {
        Self { sinks: 0, recent_share: 0.0, interval: 1 }
    }
}

/// Track of accumulated attention.
pub const SCORE: &str = "score";
/// Track of `‖v‖₁` of the slots' values, where scores are weighed by it.
pub const VALUE_NORMS: &str = "value-norms";
/// State of the last queries, `[B, Hq, W * D]`.
pub const QUERIES: &str = "queries";
/// State of the last queries before RoPE, `[B, Hq, N * D]`.
pub const RAW_QUERIES: &str = "raw-queries";
