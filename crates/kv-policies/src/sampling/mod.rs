//! Policies that keep a sample of the tokens, with weights.
//!
//! * [`uniform`]: tokens at random, reweighted.
//! * [`balancekv`]: `balancekv` halves blocks so that both halves attend alike;
//!   `balancekv-augmented` does so beside tokens that stand apart, and `balancekv-stream` in
//!   levels, while decoding too.
//!
//! [`exact_ends`] has the first and last tokens that they keep exactly.

mod balancekv;
mod exact_ends;
mod uniform;

pub use balancekv::{
    AnchorRule, BalanceKv, BalanceKvStream, Centring, OfficialList, OfficialWalk, SurvivorWeights,
};
pub use uniform::Uniform;
