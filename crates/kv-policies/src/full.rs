use crate::{Needs, Observation, Plan, Policy, Result};
use kv_core::Selection;

/// The full cache: the reference that every policy is measured against.
#[derive(Debug, Clone, Copy, Default)]
pub struct Full;

impl Policy for Full {
    fn name(&self) -> &'static str {
        "full"
    }

    fn config(&self) -> serde_json::Value {
        serde_json::json!({ "policy": "full" })
    }

    fn needs(&self) -> Needs {
        Needs::default()
    }

    fn select(&self, observation: &Observation<'_>) -> Result<Plan> {
        let [batch, kv_heads, tokens, _] = observation.dims();
        Ok(Selection::all(batch * kv_heads, tokens).into())
    }
}
