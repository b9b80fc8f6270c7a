//! A configuration's parameters.

use std::sync::Arc;

use kv_core::Budget;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::{Family, KeepTop, Policy, PolicyError, Rerotated, Result, Scorer};

/// What is left of a configuration.
pub(super) struct Config(pub(super) Map<String, Value>);

impl Config {
    /// Everything that is left, as one policy's parameters over a preset of them.
    fn take_over<T: Serialize + DeserializeOwned>(
        &mut self,
        preset: &T,
        policy: &str,
    ) -> Result<T> {
        if let Ok(Value::Object(preset)) = serde_json::to_value(preset) {
            for (key, value) in preset {
                self.0.entry(key).or_insert(value);
            }
        }
        self.take_all(policy)
    }

    /// Everything that is left, as one policy's parameters.
    pub(super) fn take_all<T: DeserializeOwned>(&mut self, policy: &str) -> Result<T> {
        let all = Value::Object(std::mem::take(&mut self.0));
        serde_json::from_value(all).map_err(|error| invalid(policy, error.to_string()))
    }

    /// The same for a policy that has parts beside them, which an error must name too.
    pub(super) fn take_beside<T: DeserializeOwned>(
        &mut self,
        policy: &str,
        parts: &str,
    ) -> Result<T> {
        self.take_all(policy).map_err(|error| match error {
            PolicyError::InvalidConfig { policy, reason }
                if reason.starts_with("unknown field") =>
            {
                PolicyError::InvalidConfig { policy, reason: format!("{reason}, or {parts}") }
            }
            error => error,
        })
    }

    /// The same for a policy without a budget: one is taken and ignored, as by the full cache, so
    /// that lists of budgets apply to all.
    pub(super) fn take_without_budget<T: DeserializeOwned>(&mut self, policy: &str) -> Result<T> {
        self.0.remove("budget");
        self.take_all(policy)
    }
}

/// A policy of the family: its options, then its scorer's parameters; `preset` changes the defaults
/// of both.
pub(super) fn family<S: Scorer>(
    name: &'static str,
    config: &mut Config,
    preset: impl Fn(&mut Family, &mut S),
) -> Result<Arc<dyn Policy>> {
    let budget = config.0.remove("budget");
    let budget = budget.ok_or_else(|| invalid(name, "`budget` is missing".into()))?;
    let budget: Budget =
        serde_json::from_value(budget).map_err(|error| invalid(name, error.to_string()))?;
    let mut defaults = Family::of::<S>(budget);
    let mut scorer = S::default();
    preset(&mut defaults, &mut scorer);
    let Ok(Value::Object(mut options)) = serde_json::to_value(&defaults) else {
        return Err(invalid(name, "its options cannot be written as JSON".into()));
    };
    // `sinks` and `recents` are not written where they are `None`.
    let optional = ["sinks", "recents"].map(String::from);
    for key in options.keys().cloned().chain(optional).collect::<Vec<_>>() {
        if let Some(value) = config.0.remove(&key) {
            options.insert(key, value);
        }
    }
    let options = serde_json::from_value(Value::Object(options))
        .map_err(|error| invalid(name, error.to_string()))?;
    let rerotate = match config.0.remove("rerotate") {
        None => false,
        Some(Value::Bool(rerotate)) => rerotate,
        Some(other) => return Err(invalid(name, format!("`rerotate` is {other}, not a boolean"))),
    };
    let scorer = config.take_over(&scorer, name)?;
    let policy = Arc::new(KeepTop::new(name, options, scorer)?);
    Ok(if rerotate { Arc::new(Rerotated::new(policy)) } else { policy })
}

/// A policy's parameters as a configuration.
pub(crate) fn config_of(name: &str, parameters: &impl Serialize) -> Value {
    let mut config = serde_json::to_value(parameters).unwrap_or_default();
    if let Some(config) = config.as_object_mut() {
        config.insert("policy".into(), name.into());
    }
    config
}

/// A policy around another, which has the budget, as a configuration.
pub(crate) fn config_around(name: &str, options: &impl Serialize, inner: &dyn Policy) -> Value {
    let mut config = config_of(name, options);
    let mut inner = inner.config();
    if let (Some(config), Some(inner)) = (config.as_object_mut(), inner.as_object_mut()) {
        config.extend(inner.remove("budget").map(|budget| ("budget".into(), budget)));
    }
    config["evictor"] = inner;
    config
}

pub(super) fn invalid(policy: &str, reason: String) -> PolicyError {
    PolicyError::InvalidConfig { policy: policy.into(), reason }
}
