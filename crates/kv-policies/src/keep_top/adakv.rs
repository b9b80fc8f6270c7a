//! AdaKV (Feng et al., 2024): [`SnapKv`] whose heads compete for a layer's slots by their scores.
//! Each head keeps the share `floor` of an equal budget for its own best tokens, the paper's
//! safeguard; the authors' code has `floor = 0.2`.

use std::sync::Arc;

use kv_core::HeadAllocation;

use super::build::preset;
use super::snapkv::SnapKv;
use crate::policy::config::Config;
use crate::{Policy, Pooling, Result};

/// The safeguard.
const FLOOR: f64 = 0.2;

impl SnapKv {
    /// SnapKV's options in the code of AdaKV's authors: scores are reduced over the group, then
    /// max-pooled over 7 tokens.
    pub fn of_ada_kv() -> Self {
        Self { kernel: 7, pooling: Pooling::Max, reduce_before_pooling: true, ..Self::default() }
    }
}

/// AdaKV from its configuration.
pub(crate) fn from_config(config: &mut Config) -> Result<Arc<dyn Policy>> {
    preset::<SnapKv>("adakv", config, |options, scorer| {
        options.heads = HeadAllocation::Ada { floor: FLOOR };
        *scorer = SnapKv::of_ada_kv();
    })
}
