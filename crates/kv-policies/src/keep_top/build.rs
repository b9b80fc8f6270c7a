//! Policies of the family, from JSON.

use std::sync::Arc;

use kv_core::Budget;
use serde_json::Value;

use super::{KeepTop, KeepTopConfig, Rerotated, Scorer};
use crate::policy::config::{Config, invalid};
use crate::{Policy, Result};

/// The policy of a scorer, under its name and with its paper's defaults.
pub(crate) fn keep_top<S: Scorer>(config: &mut Config) -> Result<Arc<dyn Policy>> {
    preset::<S>(S::NAME, config, |_, _| {})
}

/// A policy of the family: its options, then its scorer's parameters; `preset` changes the defaults
/// of both.
pub(super) fn preset<S: Scorer>(
    name: &'static str,
    config: &mut Config,
    preset: impl Fn(&mut KeepTopConfig, &mut S),
) -> Result<Arc<dyn Policy>> {
    let budget = config.take("budget");
    let budget = budget.ok_or_else(|| invalid(name, "`budget` is missing".into()))?;
    let budget: Budget =
        serde_json::from_value(budget).map_err(|error| invalid(name, error.to_string()))?;
    let mut defaults = KeepTopConfig::of::<S>(budget);
    let mut scorer = S::default();
    preset(&mut defaults, &mut scorer);
    let Ok(Value::Object(mut options)) = serde_json::to_value(&defaults) else {
        return Err(invalid(name, "its options cannot be written as JSON".into()));
    };
    // `sinks` and `recents` are not written where they are `None`.
    let optional = ["sinks", "recents"].map(String::from);
    for key in options.keys().cloned().chain(optional).collect::<Vec<_>>() {
        if let Some(value) = config.take(&key) {
            options.insert(key, value);
        }
    }
    let options = serde_json::from_value(Value::Object(options))
        .map_err(|error| invalid(name, error.to_string()))?;
    let rerotate = match config.take("rerotate") {
        None => false,
        Some(Value::Bool(rerotate)) => rerotate,
        Some(other) => return Err(invalid(name, format!("`rerotate` is {other}, not a boolean"))),
    };
    let scorer = config.take_over(&scorer, name)?;
    let policy = Arc::new(KeepTop::new(name, options, scorer)?);
    Ok(if rerotate { Arc::new(Rerotated::new(policy)) } else { policy })
}
