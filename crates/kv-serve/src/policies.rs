//! Which policies requests may choose.

use std::sync::Arc;

use kv_core::Budget;
use kv_models::check_heads;
use kv_parallel::Shard;
use kv_policies::{
    Composition, Entry, POLICIES, Policy, PolicyError, build, build_named, with_budget,
};
use serde_json::{Map, Value, json};

use crate::error::{ApiError, Result};

/// Options whose values are policies.
const PARTS: [&str; 5] = ["policy", "evictor", "candidates", "prefill", "decode"];

/// Options that name a file of the server, which no request may read.
const FILES: [&str; 2] = ["alpha", "channels"];

/// How a policy's error begins that names an option which the policy does not have.
const UNKNOWN: [&str; 2] = ["unknown field `", "unknown parameter `"];

/// The operator's default policy, and those that requests may name instead.
#[derive(Debug, Clone)]
pub struct Policies {
    /// The default policy's configuration, as the operator gave it.
    default: Value,
    budget: Budget,
    /// The least tokens that a budget of the operator's leaves, under policies whose steps only
    /// append.
    least: usize,
    allowed: Vec<String>,
    /// Whether the operator has chosen `allowed`.
    limits: bool,
    /// The most of a prompt that requests may keep by policies and budgets of their own.
    most: Option<Budget>,
}

impl Policies {
    /// A default policy, by name or as a JSON object, with its default budget; `allowed` are the
    /// names that requests may choose. Where it is empty, requests may choose every policy that needs
    /// no file of the server; for `none`, the default's alone.
    ///
    /// # Errors
    /// A policy that cannot be built, and a name that is no policy.
    pub fn new(policy: &str, budget: Budget, allowed: &[String]) -> kv_policies::Result<Self> {
        let config = match serde_json::from_str(policy) {
            Ok(config @ Value::Object(_)) => config,
            _ => json!({ "policy": policy }),
        };
        let own = build(&with_budget(&config, budget))?.name().to_string();
        let mut names: Vec<String> = match allowed {
            [] => {
                let open = POLICIES.iter().filter(|entry| !needs_file(entry));
                open.map(|entry| entry.name.into()).collect()
            }
            [none] if none == "none" => Vec::new(),
            names => names.to_vec(),
        };
        if let Some(unknown) = names.iter().find(|name| kv_policies::entry(name).is_none()) {
            // For its words, with the nearest name.
            build(&json!({ "policy": unknown }))?;
        }
        if !names.contains(&own) {
            names.push(own);
        }
        Ok(Self {
            default: config,
            budget,
            least: 0,
            allowed: names,
            limits: !allowed.is_empty(),
            most: None,
        })
    }

    /// Checks that the default policy can run where each of several ranks has a part of the heads.
    ///
    /// # Errors
    /// [`kv_models::ModelError::ComparesHeads`], and a policy that cannot be built.
    pub(crate) fn check_ranks(&self, shard: Shard) -> kv_models::Result<()> {
        let policy = build(&with_budget(&self.default, self.budget))?;
        check_heads(shard, &*policy)
    }

    /// Where the operator's budget is a share, it leaves at least so many tokens of a prompt, so
    /// that short prompts are kept whole. Only under policies whose decode steps append and do no
    /// more: under others, each budget is a kind of requests of its own.
    pub fn at_least(self, least: usize) -> Self {
        Self { least, ..self }
    }

    /// Requests with a `kv` object of their own keep at most so much of their prompts, or what the
    /// default policy keeps.
    pub fn at_most(self, most: Option<Budget>) -> Self {
        Self { most, ..self }
    }

    /// Checks how much of a prompt a request's policy keeps. [`Self::choose`] has made the policy
    /// from the request's `kv` object.
    ///
    /// # Errors
    /// More than requests may keep.
    pub(crate) fn check_kept(
        &self,
        kv: &Map<String, Value>,
        policy: &dyn Policy,
        tokens: usize,
    ) -> Result<()> {
        let Some(most) = self.most.filter(|_| !kv.is_empty()) else { return Ok(()) };
        let (kept, limit) = (kept_by(policy, tokens), most.resolve(tokens));
        let by_default = || {
            let policy = self.built(&self.default, tokens);
            policy.map_or(0, |policy| kept_by(&*policy, tokens))
        };
        if kept <= limit || kept <= by_default() {
            return Ok(());
        }
        let message = format!(
            "`{}` may keep {kept} of {tokens} tokens; this server lets requests keep {limit} of \
             them (`--most-kept {}`)",
            policy.name(),
            f64::from(most)
        );
        // A smaller budget helps no policy that keeps everything.
        let by_budget = policy.budget().is_some_and(|budget| budget.resolve(tokens) == kept);
        let param = match by_budget && kv.contains_key("budget") {
            true => "kv.budget",
            false => "kv.policy",
        };
        Err(ApiError::invalid(param, message))
    }

    /// The default policy's configuration.
    pub(crate) fn default_config(&self) -> Value {
        with_budget(&self.default, self.budget)
    }

    /// The least tokens that the default budget leaves of a prompt.
    pub(crate) fn least(&self) -> usize {
        self.least
    }

    /// A policy of a configuration, for a prompt of so many tokens.
    fn built(&self, config: &Value, tokens: usize) -> kv_policies::Result<Arc<dyn Policy>> {
        let policy = build(&with_budget(config, self.budget))?;
        let capabilities = policy.capabilities();
        let appends = !capabilities.changes_decode && !capabilities.renumbers;
        match self.budget {
            Budget::Ratio(_) if appends && self.budget.resolve(tokens) < self.least => {
                build(&with_budget(config, Budget::Tokens(self.least)))
            }
            _ => Ok(policy),
        }
    }

    /// The names that requests may choose.
    pub(crate) fn allowed(&self) -> &[String] {
        &self.allowed
    }

    /// The policy of a request whose prompt has so many tokens, by its `kv` object without
    /// `context`.
    ///
    /// # Errors
    /// What is wrong, about the field of `kv`.
    pub(crate) fn choose(&self, kv: &Map<String, Value>, tokens: usize) -> Result<Arc<dyn Policy>> {
        self.check("kv", kv)?;
        let config = match kv.get("policy") {
            Some(_) => Value::Object(kv.clone()),
            None => {
                let mut config = self.default.clone();
                if let Some(map) = config.as_object_mut() {
                    map.extend(kv.clone());
                }
                config
            }
        };
        self.built(&config, tokens).map_err(|error| {
            let unknown = match &error {
                PolicyError::InvalidConfig { policy, reason } => {
                    self.unknown_option(&config, policy, reason)
                }
                _ => None,
            };
            unknown.unwrap_or_else(|| {
                let message = error.to_string();
                ApiError::invalid(wrong_field(&config, &message), message)
            })
        })
    }

    /// The refusal of an option that a policy does not have, with the nearest one that it has;
    /// `None` where a configuration is wrong for another reason.
    fn unknown_option(&self, config: &Value, policy: &str, reason: &str) -> Option<ApiError> {
        let named = UNKNOWN.iter().find_map(|start| reason.strip_prefix(*start))?;
        let key = named.split('`').next()?;
        let field = path_of("kv", config, policy, key)?;
        let own = build_named(policy, self.budget).map(|own| own.config()).unwrap_or_default();
        let required = kv_policies::entry(policy).map(|entry| entry.required).unwrap_or_default();
        let options = own.as_object().into_iter().flat_map(Map::keys).map(String::as_str);
        let nearest = options
            .chain(required.iter().copied())
            // Lengths first: a request's key may be very long.
            .filter(|known| known.len().abs_diff(key.len()) <= known.len() / 2)
            .map(|known| (strsim::levenshtein(key, known), known))
            .min()
            .filter(|(distance, known)| *distance <= known.len() / 2);
        let hint = nearest.map(|(_, known)| format!(" (did you mean `{known}`?)"));
        let hint = hint.unwrap_or_default();
        let message = format!("`{field}` is not supported by the policy `{policy}`{hint}");
        Some(ApiError::unsupported(field, message))
    }

    /// Checks the policies' names and the budgets of an object, and of the objects within it.
    fn check(&self, path: &str, kv: &Map<String, Value>) -> Result<()> {
        for (key, value) in kv {
            let field = format!("{path}.{key}");
            match value {
                // A name stands for a policy without options.
                Value::String(name) if PARTS.contains(&key.as_str()) => {
                    self.check_name(&field, name)?;
                }
                Value::Array(parts) if PARTS.contains(&key.as_str()) => {
                    for part in parts {
                        match part {
                            Value::String(name) => self.check_name(&field, name)?,
                            Value::Object(inner) => self.check(&field, inner)?,
                            _ => {}
                        }
                    }
                }
                value if key == "policy" && path == "kv" => {
                    let message = format!("a policy's name was expected, not {value}");
                    return Err(ApiError::invalid(field, message));
                }
                Value::String(_) if FILES.contains(&key.as_str()) => {
                    let message = format!(
                        "`{field}` names a file on the server, which only the operator may set, \
                         by `--policy`"
                    );
                    return Err(ApiError::unsupported(field, message));
                }
                value if key == "budget" => {
                    let wrong = |error: String| ApiError::invalid(&*field, error);
                    if !value.is_number() {
                        let message = "a number such as 512 or 0.25 was expected";
                        return Err(wrong(format!("{message}, not {value}")));
                    }
                    let budget: Budget = serde_json::from_value(value.clone())
                        .map_err(|error| wrong(error.to_string()))?;
                    budget.validate().map_err(|error| wrong(error.to_string()))?;
                }
                Value::Object(inner) => self.check(&field, inner)?,
                _ => {}
            }
        }
        Ok(())
    }

    fn check_name(&self, field: &str, name: &str) -> Result<()> {
        if self.allowed.iter().any(|own| own == name) {
            return Ok(());
        }
        let entry = kv_policies::entry(name);
        if !self.limits && entry.is_some_and(needs_file) {
            let message = format!(
                "the policy `{name}` reads a file on the server: only the operator may choose it, \
                 by `--policy`"
            );
            return Err(ApiError::invalid(field, message));
        }
        if self.limits {
            let message = format!(
                "the policy `{name}` is not among those that this server allows: {}",
                self.allowed.join(", ")
            );
            return Err(ApiError::invalid(field, message));
        }
        Ok(())
    }
}

/// Whether a policy cannot be without a file of the server.
fn needs_file(entry: &Entry) -> bool {
    entry.required.iter().any(|key| FILES.contains(key))
}

/// The most of a prompt of `tokens` tokens that a head may keep. Where a policy does not say, its
/// budget bounds it; without a budget it may be all. Of two policies in one, either may keep its
/// part for as long as the sequence lasts.
fn kept_by(policy: &dyn Policy, tokens: usize) -> usize {
    if let Composition::Combined { prefill, decode } = policy.composition() {
        return kept_by(prefill, tokens).max(kept_by(decode, tokens));
    }
    match policy.least_kept(tokens) {
        0 => policy.budget().map_or(tokens, |budget| budget.resolve(tokens)),
        kept => kept,
    }
}

/// The path of the first option whose name or value an error quotes, or of the one that is missing.
fn wrong_field(config: &Value, message: &str) -> String {
    let quoted: Vec<&str> = message.split('`').skip(1).step_by(2).collect();
    let found = quoted.iter().find_map(|quoted| quoted_in("kv", config, quoted));
    let missing = quoted.last().filter(|_| message.contains("missing"));
    found.or_else(|| Some(format!("kv.{}", missing?))).unwrap_or_else(|| "kv".into())
}

/// The path of an option with this name or value, within a configuration. Names of known policies
/// do not count as values: errors begin with the name of the policy that refuses an option.
fn quoted_in(path: &str, config: &Value, quoted: &str) -> Option<String> {
    config.as_object()?.iter().find_map(|(key, value)| {
        let field = format!("{path}.{key}");
        let is_value = value == quoted && kv_policies::entry(quoted).is_none();
        match key == quoted || is_value {
            true => Some(field),
            false => quoted_in(&field, value, quoted),
        }
    })
}

/// The path of an option within a configuration, at the policy that it was given to.
fn path_of(path: &str, config: &Value, policy: &str, key: &str) -> Option<String> {
    let map = config.as_object()?;
    if config["policy"] == policy && map.contains_key(key) {
        return Some(format!("{path}.{key}"));
    }
    map.iter().find_map(|(name, part)| path_of(&format!("{path}.{name}"), part, policy, key))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policies(allowed: &[&str]) -> Policies {
        let allowed: Vec<String> = allowed.iter().map(ToString::to_string).collect();
        Policies::new("snapkv", Budget::Ratio(0.25), &allowed).unwrap()
    }

    fn chosen(policies: &Policies, kv: Value) -> Result<Value, String> {
        let chosen = policies.choose(kv.as_object().unwrap(), 4096);
        chosen.map(|policy| policy.config()).map_err(|error| format!("{:?}", error.body().error))
    }

    #[test]
    fn a_request_changes_the_default_or_names_another() {
        let all = policies(&[]);
        assert_eq!(chosen(&all, json!({})).unwrap()["budget"], 0.25);
        let own = chosen(&all, json!({"budget": 64, "window": 8})).unwrap();
        assert_eq!((&own["budget"], &own["window"]), (&json!(64), &json!(8)));
        let other = chosen(&all, json!({"policy": "h2o"})).unwrap();
        assert_eq!((&other["policy"], &other["budget"]), (&json!("h2o"), &json!(0.25)));
        assert_eq!(chosen(&all, json!({"policy": "full"})).unwrap()["policy"], "full");
    }

    #[test]
    fn short_prompts_are_kept_whole() {
        let config = |policies: &Policies, kv: Value, tokens| {
            policies.choose(kv.as_object().unwrap(), tokens).unwrap().config()["budget"].clone()
        };
        let all = policies(&[]).at_least(128);
        assert_eq!(config(&all, json!({}), 100), 128);
        assert_eq!(config(&all, json!({}), 512), 0.25);
        assert_eq!(config(&all, json!({"policy": "pyramidkv"}), 100), 128);
        // A budget of the request's own stands, and each budget of `h2o` is a kind of its own.
        assert_eq!(config(&all, json!({"budget": 0.25}), 100), 0.25);
        assert_eq!(config(&all, json!({"policy": "h2o"}), 100), 0.25);
        assert_eq!(all.default_config()["budget"], 0.25);
    }

    #[test]
    fn what_may_be_kept_is_bounded() {
        let half = policies(&[]).at_most(Some(Budget::Ratio(0.5)));
        let param = |kv: Value| {
            let kv = kv.as_object().unwrap();
            let policy = half.choose(kv, 200).unwrap();
            half.check_kept(kv, &*policy, 200).err().and_then(|error| error.body().error.param)
        };
        assert_eq!(param(json!({"policy": "snapkv", "budget": 0.5})), None);
        assert_eq!(param(json!({"policy": "snapkv", "budget": 0.6})).as_deref(), Some("kv.budget"));
        let few = json!({"policy": "h2o", "budget": 9});
        for kept in [
            json!({"policy": "full", "budget": 0.1}),
            json!({"policy": "quest", "budget": 0.1}),
            json!({"policy": "combine", "prefill": "full", "decode": few}),
            json!({"policy": "combine", "prefill": few, "decode": "full"}),
        ] {
            assert_eq!(param(kept.clone()).as_deref(), Some("kv.policy"), "{kept}");
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        let all = policies(&[]);
        for (kv, part) in [
            (json!({"policy": "h20"}), "did you mean `h2o`"),
            (json!({"policy": 3}), "kv.policy"),
            (json!({"budget": 0}), "kv.budget"),
            (json!({"budget": 1.5}), "kv.budget"),
            (json!({"budget": "much"}), "kv.budget"),
            (json!({"windw": 3}), "did you mean `window`"),
            (json!({"budgt": 3}), "kv.budgt"),
            (json!({"policy": "knorm", "budgt": 3}), "did you mean `budget`"),
            (json!({"anything": 3}), "kv.anything"),
            (
                json!({"policy": "combine", "prefill": {"policy": "snapkv"},
                    "decode": {"policy": "h2o", "intervall": 2}}),
                "kv.decode.intervall",
            ),
            (
                json!({"policy": "combine", "prefill": {"policy": "snapkv", "budget": 0},
                    "decode": "h2o"}),
                "kv.prefill.budget",
            ),
            (json!({"policy": "combine", "prefill": 3, "decode": "h2o"}), "kv.prefill"),
            (json!({"policy": "combine", "prefill": "snapkv"}), "kv.decode"),
            (json!({"policy": "duo-attention", "alpha": "/etc/passwd"}), "kv.policy"),
            (json!({"policy": "double-sparsity", "channels": "/etc/passwd"}), "kv.channels"),
            (json!({"policy": "x".repeat(20_000_000)}), "20000"),
        ] {
            let error = chosen(&all, kv.clone()).unwrap_err();
            assert!(error.contains(part), "{kv}: {error}");
        }
        let few = policies(&["full"]);
        assert!(chosen(&few, json!({"policy": "h2o"})).unwrap_err().contains("snapkv"));
        let inner = json!({"policy": "combine", "prefill": {"policy": "snapkv"},
            "decode": {"policy": "h2o"}});
        assert!(chosen(&policies(&["combine"]), inner).unwrap_err().contains("kv.decode.policy"));
        assert!(chosen(&policies(&["none"]), json!({"policy": "full"})).is_err());
        assert!(Policies::new("snapkv", Budget::Ratio(0.25), &["h20".into()]).is_err());
    }
}
