//! Policies that keep the whole cache, and read a part of it in each step.
//!
//! * [`quest`]: attends to the pages that may matter most.
//! * [`double_sparsity`]: attends to the best tokens by a few channels.
//! * [`hshare`]: Double Sparsity with choices that queries, heads and layers share.
//! * [`top_k_oracle`]: attends to the best tokens.
//! * [`cis`]: `cis` attends to index sets that similar steps share; the sets of `cis-star` have the
//!   budget's size.
//! * [`cpe`]: CIS within PSAW's windows, ETF in prefill.
//!
//! What they share:
//!
//! * [`subset`]: budgets of what a head may read; [`set_parts`]: how such a budget is divided.
//! * [`channels`]: the channels that approximate products of queries and keys.

mod channels;
mod cis;
mod cpe;
mod double_sparsity;
mod hshare;
mod quest;
mod set_parts;
pub(crate) mod subset;
mod top_k_oracle;

pub use channels::{ChannelStatistic, Channels, by_importance};
pub use cis::{Cis, CisIndex, CisOptions, SetsOf, Similarity, StepQueries};
pub use cpe::Cpe;
pub use double_sparsity::DoubleSparsity;
pub use hshare::{HShare, copies, share_map};
pub use quest::{LastPage, PageBounds, Quest};
pub use top_k_oracle::TopKOracle;
