//! BalanceKV's augmented form for retrieval (section 4.3): of the slots between the ends a share
//! holds tokens whose keys stand apart, exactly ([`super::anchors`]); the others are balanced.

use std::sync::Arc;

use kv_core::Budget;

use super::BalanceKv;
use crate::policy::config::{Config, invalid};
use crate::{Policy, Result};

pub(super) const NAME: &str = "balancekv-augmented";

impl BalanceKv {
    /// `anchors` of the augmented form, `balancekv-augmented`.
    pub const AUGMENTED_ANCHORS: f64 = 0.5;

    /// The augmented form.
    pub fn augmented(budget: Budget) -> Self {
        Self { anchors: Self::AUGMENTED_ANCHORS, ..Self::new(budget) }
    }

    /// The augmented form from its configuration.
    pub(crate) fn augmented_from_config(config: &mut Config) -> Result<Arc<dyn Policy>> {
        let policy = config.take_budgeted(NAME, Self::augmented)?;
        policy.validate_as(NAME)?;
        if policy.anchors == 0.0 {
            return Err(invalid(NAME, "without `anchors` it is `balancekv`".into()));
        }
        Ok(Arc::new(policy))
    }
}
