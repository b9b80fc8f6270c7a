//! Certificates: bounds that theorems of the papers give, beside the quantities that they bound, on
//! real prompts.
//!
//! | bounded quantity | policy | source |
//! |---|---|---|
//! | error of the measure that ranks slots | LongFlow | its approximation of a slot's effect |
//! | attention that a shared set drops, and the set's distance from the best | CIS | PrHS, lemma 9 and equation 42 |
//! | attention to tokens outside of a window | PSAW | PrHS, theorem 7 |
//! | attention that frozen keys move | ETF | PrHS, theorem 8 |
//!
//! The bounds hold, but say little on real models. Most bounds on a share of the attention are
//! above 1 (the metric `bound_gt_1_share`). Bounds with constants hold only for prompts like the
//! ones that the constants are fitted to ([`FitCheck`]). Certificates check the proofs and the
//! policies; they do not measure quality. `attention --certificates` runs them.

mod fit_check_split;
mod frozen_keys;
mod hidden_windows;
mod means;
mod shared_sets;
mod slot_measure;

pub(crate) use fit_check_split::FitCheck;
pub(crate) use frozen_keys::{FreezeError, FrozenKeys, conclude};
pub(crate) use hidden_windows::HiddenMass;
pub(crate) use means::{Mean, Means};
pub(crate) use shared_sets::{
    PromptHeads, QueryStep, Retrievals, best_of, take_information_loss, take_shared,
};
pub(crate) use slot_measure::MeasureErrors;

/// Rounding of masses in f32.
const ROUNDING: f64 = 1e-5;
