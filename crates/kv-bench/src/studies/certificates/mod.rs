//! Certificates: bounds that theorems of the papers give, beside the quantities that they bound, on
//! real prompts.
//!
//! | bounded quantity | policy | source |
//! |---|---|---|
//! | error of the measure that ranks slots | LongFlow | its approximation of a slot's effect |
//! | attention that a shared set drops, and the set's distance from the best | CIS | PrHS, lemma 9 and equation 42 |
//! | attention that a window hides | PSAW | PrHS, theorem 7 |
//! | attention that frozen keys move | ETF | PrHS, theorem 8 |
//!
//! They hold, but say little on real models: bounds on a share of the attention are mostly above 1,
//! which is the metric `vacuous_bounds`, and bounds with constants hold only for prompts like those
//! that the constants are fitted to ([`FitCheck`]). They are a check on the proofs and on the
//! policies, not a measure of quality. `attention --certificates` runs them.

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
