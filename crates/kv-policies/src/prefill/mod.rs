//! Policies that change the computation of a prompt.
//!
//! * [`psaw`]: windows that shrink with depth, while decoding too.
//! * [`etf`]: deep layers leave a prompt's early tokens as they are.
//! * [`pyramid_infer`]: hidden states are pruned between layers.
//!
//! [`depth_schedule`] has the layer behind which PSAW and ETF begin.

mod depth_schedule;
mod etf;
mod psaw;
mod pyramid_infer;

pub use etf::Etf;
pub use psaw::Psaw;
pub use pyramid_infer::PyramidInfer;
