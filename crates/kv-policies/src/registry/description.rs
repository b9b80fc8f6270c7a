//! Policies in a few words: the name, and the options that are not the defaults.

use std::collections::BTreeMap;

use kv_core::Budget;
use serde_json::{Map, Value, json};

use super::{Treatment, build, entry};
use crate::policy::error::Result;
use crate::policy::{Composition, Policy};
use crate::reading::Channels;

/// A policy's name, and how it departs from the policy that the name and the budget alone make.
#[derive(Debug, Clone, PartialEq)]
pub struct Description {
    /// The registry's name.
    pub name: &'static str,
    /// What the policy does with slots ([`super::Entry::treatment`]).
    pub treatment: Option<Treatment>,
    /// Slots that a head keeps, or tokens that it reads, of a prompt.
    pub budget: Option<Budget>,
    /// The options that differ from the defaults. Where an option has options of its own, as the
    /// default has, only those that differ.
    ///
    /// Values that the configuration writes by another name, such as a file's, have that name; all
    /// others are as [`Policy::config`] has them.
    pub options: BTreeMap<String, Value>,
    /// The policy that this one is around, where it is not the default one.
    pub inner: Option<Box<Description>>,
    /// The policies of prompts and of decode steps, where this one combines two.
    pub combined: Option<Box<[Description; 2]>>,
}

impl Description {
    /// The file that the policy's [`crate::Channels`] were read from, where they came from one.
    pub fn channels_file(&self) -> Option<&str> {
        self.options.get(Channels::OPTION)?.as_str()
    }
}

/// Describes a policy that was built from the configuration `written`. Files have their names in
/// the description, not their contents.
///
/// ```
/// use kv_policies::{build, describe};
/// use serde_json::json;
///
/// let written = json!({"policy": "keepkv", "budget": 64, "evictor": "h2o", "threshold": 0.5});
/// let described = describe(&*build(&written)?, &written)?;
/// assert_eq!(described.name, "keepkv");
/// assert_eq!(described.options.keys().collect::<Vec<_>>(), ["threshold"]);
/// assert_eq!(described.inner.unwrap().name, "h2o");
/// # Ok::<(), kv_policies::PolicyError>(())
/// ```
///
/// # Errors
/// Where the registry does not build the policy that the name and the budget alone make.
pub fn describe(policy: &dyn Policy, written: &Value) -> Result<Description> {
    let name = policy.name();
    let entry = entry(name);
    let treatment = entry.and_then(|entry| entry.treatment);
    if let Composition::Combined { prefill, decode } = policy.composition() {
        let [prefill, decode] = [(prefill, "prefill"), (decode, "decode")]
            .map(|(part, key)| describe(part, &written[key]));
        let (prefill, decode) = (prefill?, decode?);
        let budget = prefill.budget.or(decode.budget);
        let combined = Some(Box::new([prefill, decode]));
        let options = BTreeMap::new();
        return Ok(Description { name, treatment, budget, options, inner: None, combined });
    }

    let (config, budget) = (policy.config(), policy.budget());
    let required = entry.map(|entry| entry.required).unwrap_or_default();
    let mut bare = json!({"policy": name, "budget": budget});
    for key in required {
        bare[key] = config[key].clone();
    }
    // A form is compared with the defaults of this form.
    let form = entry.and_then(|entry| entry.form).filter(|form| config.get(form).is_some());
    if let Some(form) = form {
        bare[form] = config[form].clone();
    }
    let default = build(&bare)?;
    let inner = match (policy.composition(), default.composition()) {
        (Composition::Around { inner, .. }, Composition::Around { inner: usual, .. })
            if inner.config() == usual.config() =>
        {
            None
        }
        (Composition::Around { option, inner }, _) => {
            Some(Box::new(describe(inner, &written[option])?))
        }
        _ => None,
    };
    let part = match policy.composition() {
        Composition::Around { option, .. } => Some(option),
        _ => None,
    };
    let (default, empty) = (default.config(), Map::new());
    let mut options = BTreeMap::new();
    for (key, value) in config.as_object().unwrap_or(&empty) {
        let shown = as_written(value, &written[key]);
        // An option that a policy cannot be without is no departure; the name of a file is shown.
        let differs =
            default.get(key) != Some(value) || required.contains(&key.as_str()) && shown != *value;
        let differs = differs || form == Some(key.as_str());
        if differs && Some(key.as_str()) != part {
            options.insert(key.clone(), departures(default.get(key), value, shown));
        }
    }
    Ok(Description { name, treatment, budget, options, inner, combined: None })
}

/// The value as `written` has it, if that is a text or an object in the value's place, and not
/// another form of its numbers.
fn as_written(value: &Value, written: &Value) -> Value {
    match (value, written) {
        (Value::String(_), _) | (_, Value::Null) => value.clone(),
        (_, Value::String(_)) => written.clone(),
        (Value::Object(own), Value::Object(other)) => {
            if other.keys().any(|key| !own.contains_key(key)) {
                return written.clone();
            }
            let each = own.iter().map(|(key, value)| {
                (key.clone(), as_written(value, other.get(key).unwrap_or(&Value::Null)))
            });
            Value::Object(each.collect())
        }
        _ => value.clone(),
    }
}

/// The options of `value` that differ from the default's, where both have options.
fn departures(default: Option<&Value>, value: &Value, shown: Value) -> Value {
    let (Some(Value::Object(usual)), Value::Object(own)) = (default, value) else { return shown };
    match shown {
        Value::Object(shown) => {
            let differs = |(key, _): &(String, Value)| {
                own.get(key).is_none_or(|own| usual.get(key) != Some(own))
            };
            Value::Object(shown.into_iter().filter(differs).collect())
        }
        shown => shown,
    }
}
