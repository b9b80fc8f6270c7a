//! The full cache: no compression. It keeps all tokens of a prompt, and its decode steps append.

use std::sync::Arc;

use crate::policy::config::Config;
use crate::{Policy, Result};

/// The full cache: the reference that every policy is measured against.
#[derive(Debug, Clone, Copy, Default)]
pub struct Full;

impl Full {
    /// The policy from its configuration.
    pub(crate) fn from_config(config: &mut Config) -> Result<Arc<dyn Policy>> {
        // A budget is taken and ignored, so that lists of budgets apply to all policies.
        config.take("budget");
        Ok(Arc::new(Self))
    }
}

impl Policy for Full {
    fn name(&self) -> &'static str {
        "full"
    }

    fn config(&self) -> serde_json::Value {
        serde_json::json!({ "policy": "full" })
    }

    fn least_kept(&self, tokens: usize) -> usize {
        tokens
    }
}
