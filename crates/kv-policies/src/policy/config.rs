//! A policy's parameters, from JSON and to it.

use std::sync::Arc;

use kv_core::Budget;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::Policy;
use crate::{PolicyError, Result};

/// The option that configures a policy's evictor.
pub(crate) const EVICTOR: &str = "evictor";

/// The parameters of a configuration that no constructor has taken yet.
pub(crate) struct Config {
    left: Map<String, Value>,
    build: fn(&Value) -> Result<Arc<dyn Policy>>,
}

impl Config {
    /// A configuration without its `policy`; `build` makes the policies that it holds as parts.
    pub(crate) fn new(
        left: Map<String, Value>,
        build: fn(&Value) -> Result<Arc<dyn Policy>>,
    ) -> Self {
        Self { left, build }
    }

    /// The first parameter that nobody has taken.
    pub(crate) fn first_left(&self) -> Option<&str> {
        self.left.keys().next().map(String::as_str)
    }

    /// Whether a parameter is there that nobody has taken.
    pub(crate) fn has(&self, key: &str) -> bool {
        self.left.contains_key(key)
    }

    /// Takes one parameter.
    pub(crate) fn take(&mut self, key: &str) -> Option<Value> {
        self.left.remove(key)
    }

    /// Gives a parameter a value, unless it has one.
    pub(crate) fn set_default(&mut self, key: &str, value: Value) {
        self.left.entry(key).or_insert(value);
    }

    /// Builds a policy that is a part of this one.
    pub(crate) fn build(&self, part: &Value) -> Result<Arc<dyn Policy>> {
        (self.build)(part)
    }

    /// Takes the configuration of another policy. A name stands for a configuration without
    /// options; `default` is the name where the parameter is missing.
    pub(crate) fn take_part(&mut self, key: &str, default: Option<&str>) -> Option<Value> {
        match (self.take(key), default) {
            (Some(Value::String(name)), _) => Some(serde_json::json!({ "policy": name })),
            (Some(part), _) => Some(part),
            (None, default) => default.map(|name| serde_json::json!({ "policy": name })),
        }
    }

    /// Gives parameters that are missing the values that they have in `preset`.
    fn set_defaults(&mut self, preset: &impl Serialize) {
        if let Ok(Value::Object(preset)) = serde_json::to_value(preset) {
            for (key, value) in preset {
                self.set_default(&key, value);
            }
        }
    }

    /// Gives parameters that are missing the defaults that `new` makes of the one, `key`, that the
    /// policy cannot be without. Without the parameter `key` nothing has a default. Taking all
    /// parameters then fails, with an error that names `key` or the unknown parameter in its place.
    pub(crate) fn set_defaults_by<R: DeserializeOwned, T: Serialize>(
        &mut self,
        key: &str,
        new: impl Fn(R) -> T,
    ) {
        let required = self.left.get(key).and_then(|value| R::deserialize(value).ok());
        if let Some(required) = required {
            self.set_defaults(&new(required));
        }
    }

    /// Takes everything that is left, as one policy's parameters over a preset of them.
    pub(crate) fn take_over<T: Serialize + DeserializeOwned>(
        &mut self,
        preset: &T,
        policy: &str,
    ) -> Result<T> {
        self.set_defaults(preset);
        self.take_all(policy)
    }

    /// Takes everything that is left, as one policy's parameters over its defaults under the
    /// budget, which is required.
    pub(crate) fn take_budgeted<T: Serialize + DeserializeOwned>(
        &mut self,
        policy: &str,
        new: impl Fn(Budget) -> T,
    ) -> Result<T> {
        self.set_defaults_by("budget", new);
        self.take_all(policy)
    }

    /// Takes everything that is left, as one policy's parameters. Errors name the parameter.
    pub(crate) fn take_all<T: DeserializeOwned>(&mut self, policy: &str) -> Result<T> {
        let all = Value::Object(std::mem::take(&mut self.left));
        serde_path_to_error::deserialize(all).map_err(|error| {
            let (path, reason) = (error.path().to_string(), in_json(&error.inner().to_string()));
            // These name the parameter themselves.
            let is_named = [".", "?"].contains(&path.as_str())
                || ["unknown field", "missing field"].iter().any(|own| reason.starts_with(own));
            invalid(policy, if is_named { reason } else { format!("`{path}`: {reason}") })
        })
    }

    /// Takes everything that is left, as the parameters of a policy that has `parts` beside them,
    /// which an error must name too.
    pub(crate) fn take_beside<T: DeserializeOwned>(
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

    /// Takes everything that is left, as the parameters of a policy without a budget: one is taken
    /// and ignored, as by the full cache, so that lists of budgets apply to all.
    pub(crate) fn take_without_budget<T: DeserializeOwned>(&mut self, policy: &str) -> Result<T> {
        self.take("budget");
        self.take_all(policy)
    }
}

/// The text of an error of `serde` with JSON's names of types, such as `expected a number`, in the
/// place of Rust's (`expected f32`).
pub fn in_json(message: &str) -> String {
    let Some((found, expected)) = message.split_once(", expected ") else {
        return message.to_string();
    };
    let expected = match expected {
        "u8" | "u32" | "u64" | "usize" => "a whole number of at least 0",
        "i32" | "i64" => "a whole number",
        "f32" | "f64" => "a number",
        "a map" => "an object",
        "a sequence" => "a list",
        kind if kind.starts_with("struct ") => "an object",
        kind if kind.starts_with("internally tagged enum ") => "an object with `type`",
        other => other,
    };
    format!("{found}, expected {expected}")
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
    config[EVICTOR] = inner;
    config
}

/// The error of a configuration that is not what `policy` takes.
pub(crate) fn invalid(policy: &str, reason: String) -> PolicyError {
    PolicyError::InvalidConfig { policy: policy.into(), reason }
}
