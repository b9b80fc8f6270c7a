//! PyramidKV (Cai et al., 2024): [`SnapKv`] whose layers share the budget as a pyramid. Slots per
//! head fall linearly with depth, from `2 b - b / beta` to `b / beta` of a mean budget `b`
//! (equation 3); the authors' code has `beta = 20`.

use std::sync::Arc;

use kv_core::LayerAllocation;

use super::build::preset;
use super::snapkv::SnapKv;
use crate::policy::config::Config;
use crate::{Policy, Result};

/// How steep the pyramid is.
const BETA: f64 = 20.0;

/// PyramidKV from its configuration.
pub(crate) fn from_config(config: &mut Config) -> Result<Arc<dyn Policy>> {
    preset::<SnapKv>("pyramidkv", config, |options, _| {
        options.layers = LayerAllocation::Pyramid { beta: BETA };
    })
}
