//! The policies that run, their budgets and their labels.

mod fisher_layers;

use std::sync::Arc;

use anyhow::{Context, bail};
use kv_core::Budget;
use kv_policies::{
    Composition, Description, POLICIES, Policy, Treatment, build, build_named, describe,
    leaves_budget_open, with_budget,
};
use serde_json::{Value, json};

use crate::format;
use crate::options::Common;
use crate::record::FULL;
use fisher_layers::FisherLayers;

const ONE_TOKEN: &str =
    "a budget of one token would read as 100 % in records; take 2, or 1.0 for all";

/// A policy to run, and how it appears in records.
#[derive(Debug, Clone)]
pub(crate) struct PolicyRun {
    pub(crate) label: String,
    pub(crate) budget: Option<f64>,
    pub(crate) policy: Arc<dyn Policy>,
    /// The file that its channels were read from.
    pub(crate) channels: Option<String>,
    /// The policy's treatment of slots.
    pub(crate) treatment: Option<Treatment>,
}

impl Common {
    /// Every policy at every budget, the full cache first.
    ///
    /// # Errors
    /// For names and configurations that the registry refuses.
    pub(crate) fn policy_runs(&self, default_budgets: &[f64]) -> anyhow::Result<Vec<PolicyRun>> {
        match &self.budget {
            Some(budgets) => self.policy_runs_at(budgets),
            None => {
                let budgets = default_budgets.iter().map(|&share| Budget::Ratio(share));
                self.policy_runs_at(&budgets.collect::<Vec<_>>())
            }
        }
    }

    /// Every policy at these budgets. `--budget` does not count.
    ///
    /// # Errors
    /// As [`Self::policy_runs`].
    pub(crate) fn policy_runs_at(&self, budgets: &[Budget]) -> anyhow::Result<Vec<PolicyRun>> {
        if budgets.contains(&Budget::Tokens(1)) {
            bail!("{ONE_TOKEN}");
        }
        self.build_runs(self.wanted()?, budgets)
    }

    /// The full cache, and the policies of configurations, each at all of these budgets where the
    /// configuration leaves its budget open.
    ///
    /// # Errors
    /// As [`Self::policy_runs`].
    pub(crate) fn build_runs(
        &self,
        configs: Vec<Value>,
        budgets: &[Budget],
    ) -> anyhow::Result<Vec<PolicyRun>> {
        let mut policy_runs = vec![PolicyRun::of(&json!({"policy": FULL}))?];
        let fisher = FisherLayers::of(self.model());
        for config in configs {
            let written = config.clone();
            let config = fisher.resolved(config)?;
            let configs = match leaves_budget_open(&config) {
                true => budgets.iter().map(|&budget| with_budget(&config, budget)).collect(),
                false => vec![config],
            };
            for config in configs {
                let policy_run = PolicyRun::written(build(&config)?, &written)?;
                let config = policy_run.policy.config();
                if policy_run.policy.budget() == Some(Budget::Tokens(1)) {
                    bail!("{ONE_TOKEN}");
                }
                // Records of two equal policies would be averaged.
                if policy_runs.iter().all(|known| known.policy.config() != config) {
                    policy_runs.push(policy_run);
                }
            }
        }
        Ok(policy_runs)
    }

    /// The table's own policies that `--policy` names, whatever their options; without `--policy`,
    /// all of the table's own policies. A policy around another policy is named by both names, as
    /// in the table.
    ///
    /// # Errors
    /// For names that the table does not have.
    pub(crate) fn select(&self, policy_runs: Vec<PolicyRun>) -> anyhow::Result<Vec<PolicyRun>> {
        match &self.policy {
            None => Ok(policy_runs),
            Some(list) => named(policy_runs, &list.split(',').map(str::trim).collect::<Vec<_>>()),
        }
    }

    /// [`Self::select`] among configurations. The first configuration is the full cache's; the full
    /// cache always runs, before all other policies.
    ///
    /// # Errors
    /// As [`Self::select`], and for configurations that the registry refuses.
    pub(crate) fn select_beside_full(&self, configs: &[Value]) -> anyhow::Result<Vec<PolicyRun>> {
        // Only the policies that are asked for must be possible to build; a name that the table
        // lacks is refused with a list of all names that it has.
        let names: Option<Vec<&str>> = self.policy.as_deref().map(|list| {
            list.split(',').filter_map(|name| name.split_whitespace().next()).collect()
        });
        let has = |name: &&str| configs.iter().any(|config| config["policy"] == *name);
        let names = names.filter(|names| !names.is_empty() && names.iter().all(has));
        let asked = |config: &&Value| {
            names.as_ref().is_none_or(|names| names.iter().any(|name| config["policy"] == *name))
        };
        let built = configs.iter().filter(asked).map(PolicyRun::of);
        let mut chosen = self.select(built.collect::<anyhow::Result<_>>()?)?;
        if chosen.iter().all(|own| own.label != FULL) {
            chosen.insert(0, PolicyRun::of(&configs[0])?);
        }
        Ok(chosen)
    }

    /// The full cache, then the policies of [`Self::select`], then the configurations in
    /// `--policy`. A configuration without a budget runs at each of `budgets`.
    ///
    /// # Errors
    /// As [`Self::select`] and [`Self::build_runs`].
    pub(crate) fn select_or_add(
        &self,
        own: Vec<PolicyRun>,
        budgets: &[Budget],
    ) -> anyhow::Result<Vec<PolicyRun>> {
        let Some(text) = &self.policy else { return Ok(own) };
        let (names, configs): (Vec<Value>, Vec<Value>) =
            entries(text)?.into_iter().partition(Value::is_string);
        let names: Vec<&str> = names.iter().filter_map(Value::as_str).map(str::trim).collect();
        let mut all = self.build_runs(configs, budgets)?;
        if !names.is_empty() {
            let own = named(own, &names)?.into_iter().filter(|own| own.label != FULL);
            all.splice(1..1, own);
        }
        Ok(all)
    }

    /// Builds the configurations in `--policy`, to refuse them early.
    ///
    /// # Errors
    /// As [`Self::build_runs`].
    pub(crate) fn check_configurations(&self) -> anyhow::Result<()> {
        let entries = self.policy.as_deref().map_or_else(|| Ok(Vec::new()), entries)?;
        let configs = entries.into_iter().filter(Value::is_object).collect();
        self.build_runs(configs, &[Budget::Ratio(0.5)]).map(drop)
    }

    /// Configurations, a name standing for one without options.
    fn wanted(&self) -> anyhow::Result<Vec<Value>> {
        let named = |name: &str| json!({"policy": name.trim()});
        let Some(text) = &self.policy else {
            let runnable = POLICIES.iter().filter(|entry| entry.needs_no_more());
            return Ok(runnable.map(|entry| named(entry.name)).collect());
        };
        let config = |entry| match entry {
            Value::String(name) => named(&name),
            config => config,
        };
        Ok(entries(text)?.into_iter().map(config).collect())
    }
}

/// The entries of `--policy`: names as strings, configurations as objects.
fn entries(text: &str) -> anyhow::Result<Vec<Value>> {
    if !text.trim_start().starts_with(['{', '[']) {
        return Ok(text.split(',').map(|name| json!(name.trim())).collect());
    }
    let list = match serde_json::from_str(text).context("--policy is not valid JSON")? {
        Value::Array(list) if list.is_empty() => bail!("--policy is an empty list"),
        Value::Array(list) => list,
        one => vec![one],
    };
    if let Some(other) = list.iter().find(|entry| !entry.is_string() && !entry.is_object()) {
        bail!("--policy holds {other}, which is neither a name nor a configuration");
    }
    Ok(list)
}

/// The table's own policies that have these names.
fn named(mut policy_runs: Vec<PolicyRun>, names: &[&str]) -> anyhow::Result<Vec<PolicyRun>> {
    let called = |own: &PolicyRun, name: &str| {
        own.label.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with(' '))
    };
    if let Some(unknown) =
        names.iter().find(|name| !policy_runs.iter().any(|own| called(own, name)))
    {
        let mut labels: Vec<_> = policy_runs.iter().map(|own| own.label.as_str()).collect();
        labels.dedup();
        bail!("--policy: the table has no `{unknown}`, but {}", labels.join(", "));
    }
    policy_runs.retain(|own| names.iter().any(|name| called(own, name)));
    Ok(policy_runs)
}

impl PolicyRun {
    /// The policy that a configuration describes.
    pub(crate) fn of(config: &Value) -> anyhow::Result<Self> {
        Self::written(build(config)?, config)
    }

    /// A policy, and the configuration that it was built from as the user wrote it.
    fn written(policy: Arc<dyn Policy>, config: &Value) -> anyhow::Result<Self> {
        let described = describe(&*policy, config)?;
        Ok(Self {
            label: label(&described),
            budget: described.budget.map(as_number),
            policy,
            channels: described.channels_file().map(Into::into),
            treatment: described.treatment,
        })
    }

    /// The label and budget, by which records name it.
    pub(crate) fn setup(&self) -> (&str, Option<f64>) {
        (&self.label, self.budget)
    }

    /// The policies of some runs.
    pub(crate) fn policies(policy_runs: &[Self]) -> Vec<Arc<dyn Policy>> {
        policy_runs.iter().map(|own| own.policy.clone()).collect()
    }

    /// The policies that configurations describe.
    ///
    /// # Errors
    /// For configurations that the registry refuses.
    pub(crate) fn all(configs: &[Value]) -> anyhow::Result<Vec<Self>> {
        configs.iter().map(Self::of).collect()
    }

    /// Slots that the policy holds or reads behind a prompt of `prompt` tokens; `None` without a
    /// budget. Of a combination, the slots of the policy that decodes.
    pub(crate) fn tokens(&self, prompt: usize) -> Option<usize> {
        Some(self.policy.budget()?.resolve(prompt))
    }
}

/// A budget as records bear it.
fn as_number(budget: Budget) -> f64 {
    match budget {
        Budget::Tokens(tokens) => tokens as f64,
        Budget::Ratio(ratio) => ratio,
    }
}

/// A policy's name, and its options that differ from the defaults. A combination has the label
/// `a + b`, a policy around another policy the label `a(b)`.
fn label(described: &Description) -> String {
    if let Some([prefill, decode]) = described.combined.as_deref() {
        let own = decode.budget.filter(|own| prefill.budget.is_some_and(|other| other != *own));
        let own = own.map(|own| format!(" budget={}", format::budget(Some(as_number(own)))));
        return format!("{} + {}{}", label(prefill), label(decode), own.unwrap_or_default());
    }
    let inner = described.inner.as_ref().map(|inner| format!("({})", label(inner)));
    let options = described.options.iter().map(|(key, value)| format!(" {}", option(key, value)));
    format!("{}{}{}", described.name, inner.unwrap_or_default(), options.collect::<String>())
}

/// The label of the policy that `outer` is around, given the label of `outer`; `None` where `outer`
/// has options of its own.
pub(crate) fn inner_label(outer: &str, label: &str) -> Option<String> {
    let rest = label.strip_prefix(outer)?;
    if let Some(inner) = rest.strip_prefix('(').and_then(|rest| rest.strip_suffix(')')) {
        return Some(inner.into());
    }
    let default = rest.is_empty().then(|| build_named(outer, Budget::Ratio(0.5)).ok()).flatten()?;
    match default.composition() {
        Composition::Around { inner, .. } => Some(inner.name().into()),
        _ => None,
    }
}

/// An option as `key=value`, and `key(inner=value)` where the value has options of its own.
fn option(key: &str, value: &Value) -> String {
    match value {
        Value::Object(inner) => {
            let inner: Vec<_> = inner.iter().map(|(key, value)| option(key, value)).collect();
            format!("{key}({})", inner.join(" "))
        }
        Value::String(text) => format!("{key}={text}"),
        // Single precision as it was written: 0.6, not 0.6000000238418579.
        Value::Number(number) => match number.as_f64().filter(|_| number.is_f64()) {
            Some(wide) if f64::from(wide as f32) == wide => format!("{key}={:?}", wide as f32),
            _ => format!("{key}={number}"),
        },
        other => format!("{key}={other}"),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use serde_json::json;

    use kv_core::Budget;

    use super::PolicyRun;
    use crate::args::Args;
    use crate::record::FULL;

    fn policy_runs(policy: &str, budget: &str) -> anyhow::Result<Vec<(String, Option<f64>)>> {
        let args = ["kv-bench", "--policy", policy, "--budget", budget];
        let policy_runs = Args::try_parse_from(args)?.common.policy_runs(&[])?;
        Ok(policy_runs.into_iter().map(|c| (c.label, c.budget)).collect())
    }

    #[test]
    fn names_and_configurations_run_at_every_budget() {
        let full = ("full".to_string(), None);
        let at = |label: &str, budget| (label.to_string(), Some(budget));
        let expected = [full, at("snapkv", 0.5), at("snapkv", 64.0), at("h2o interval=8", 0.5)];
        let list = r#"["snapkv", {"policy": "h2o", "budget": 0.5, "interval": 8}]"#;
        assert_eq!(policy_runs(list, "0.5,64").unwrap(), expected);
        assert_eq!(policy_runs(" snapkv, full,snapkv", "0.5,64").unwrap(), expected[..3]);
        let nested = r#"{"policy": "snapkv", "layers": {"pyramid": {"beta": 8.0}}}"#;
        assert_eq!(policy_runs(nested, "0.5").unwrap()[1].0, "snapkv layers(pyramid(beta=8.0))");
    }

    #[test]
    fn a_combination_is_named_by_its_parts_and_shares_the_budget() {
        let combine = |prefill: &str, decode: &str| {
            format!(
                r#"{{"policy": "combine", "prefill": {{"policy": {prefill}}},
                "decode": {{"policy": {decode}}}}}"#
            )
        };
        let found = policy_runs(&combine(r#""snapkv""#, r#""h2o""#), "0.5,0.25").unwrap();
        assert_eq!(found[1..], [0.5, 0.25].map(|b| ("snapkv + h2o".to_string(), Some(b))));
        let parts = combine(r#""snapkv", "window": 16"#, r#""h2o", "budget": 96"#);
        let found = policy_runs(&parts, "0.5").unwrap();
        assert_eq!(found[1], ("snapkv window=16 + h2o budget=96".to_string(), Some(0.5)));
        let missing = policy_runs(r#"{"policy": "combine"}"#, "0.5").unwrap_err();
        assert!(missing.to_string().contains("`prefill` is missing"), "{missing}");
    }

    #[test]
    fn a_policy_around_another_is_named_by_both() {
        let around = r#"["keepkv", {"policy": "keepkv", "evictor": "h2o", "key": "votes"},
            {"policy": "keepkv", "evictor": {"policy": "h2o", "interval": 8}}]"#;
        let found = policy_runs(around, "0.5").unwrap();
        let names: Vec<&str> = found[1..].iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["keepkv", "keepkv(h2o) key=votes", "keepkv(h2o interval=8)"]);
        assert!(found[1..].iter().all(|(_, budget)| *budget == Some(0.5)));
    }

    #[test]
    fn a_table_s_own_are_chosen_by_name_whatever_their_options() {
        let chosen = |names: &str| {
            let own = [
                json!({"policy": FULL}),
                json!({"policy": "keepkv", "budget": 0.2, "evictor": "h2o"}),
                json!({"policy": "keepkv", "budget": 0.2}),
                json!({"policy": "h2o", "budget": 0.2, "interval": 8}),
                json!({"policy": "h2o", "budget": 0.2}),
            ];
            let args = ["kv-bench", "--policy", names];
            let own = own.iter().map(PolicyRun::of).collect::<anyhow::Result<_>>()?;
            let chosen = Args::try_parse_from(args)?.common.select(own)?;
            anyhow::Ok(chosen.into_iter().map(|own| own.label).collect::<Vec<_>>())
        };
        assert_eq!(chosen("keepkv").unwrap(), ["keepkv"]);
        assert_eq!(chosen("keepkv(h2o), full").unwrap(), ["full", "keepkv(h2o)"]);
        assert_eq!(chosen("h2o").unwrap(), ["h2o interval=8", "h2o"]);
        let unknown = chosen("full,d2o").unwrap_err().to_string();
        assert!(unknown.contains("no `d2o`, but full, keepkv(h2o), keepkv"), "{unknown}");
    }

    #[test]
    fn configurations_join_those_that_a_table_names() {
        let chosen = |policy: &str| {
            let own = [
                json!({"policy": FULL}),
                json!({"policy": "snapkv", "budget": 0.2}),
                json!({"policy": "h2o", "budget": 0.2}),
            ];
            let own = own.iter().map(PolicyRun::of).collect::<anyhow::Result<_>>()?;
            let args = Args::try_parse_from(["kv-bench", "--policy", policy])?;
            let budgets = [Budget::Ratio(0.2), Budget::Tokens(64)];
            let chosen = args.common.select_or_add(own, &budgets)?;
            anyhow::Ok(chosen.into_iter().map(|c| (c.label, c.budget)).collect::<Vec<_>>())
        };
        let at = |label: &str, budget| (label.to_string(), Some(budget));
        let full = ("full".to_string(), None);
        let added = r#"["h2o", {"policy": "h2o", "interval": 8}]"#;
        let expected =
            [full.clone(), at("h2o", 0.2), at("h2o interval=8", 0.2), at("h2o interval=8", 64.0)];
        assert_eq!(chosen(added).unwrap(), expected);
        assert_eq!(chosen("snapkv").unwrap(), [full.clone(), at("snapkv", 0.2)]);
        let alone = r#"{"policy": "tova", "budget": 0.5}"#;
        assert_eq!(chosen(alone).unwrap(), [full, at("tova", 0.5)]);
        let unknown = chosen(r#"["tova"]"#).unwrap_err().to_string();
        assert!(unknown.contains("no `tova`, but full, snapkv, h2o"), "{unknown}");
    }

    #[test]
    fn entries_of_sketches_are_shared_by_tokens() {
        let load = |config| PolicyRun::of(&config).unwrap().policy.sketch_load(2_000);
        // 300 slots keep tokens as they are; 200 entries in 2 buckets stand for the other 1,700.
        let options = json!({"policy": "kvreviver", "budget": 0.25, "buckets": 2, "vague": 0.4,
            "candidate": 0.3, "recent": 0.3});
        assert!((load(options).unwrap() - 17.0).abs() < 1e-9);
        assert_eq!(load(json!({"policy": "h2o", "budget": 0.25})), None);
        // The paper's shares at its quarter.
        let paper =
            load(json!({"policy": "kvreviver", "vague": "sketch", "budget": 0.25})).unwrap();
        assert!((paper - 93.0).abs() < 1e-9, "{paper}");
    }

    #[test]
    fn a_number_is_no_policy_whatever_its_name() {
        let list = r#"[{"policy": "cam", "candidates": 8},
            {"policy": "cam", "candidates": 8, "evictor": {"policy": "h2o", "interval": 8}}]"#;
        let found = policy_runs(list, "0.5").unwrap();
        let names: Vec<&str> = found[1..].iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["cam candidates=8", "cam(h2o interval=8) candidates=8"]);
    }

    #[test]
    fn options_are_named_as_they_were_written() {
        let list = r#"[{"policy": "keepkv", "threshold": 0.6, "alpha": 0.95, "window": 8}]"#;
        let found = policy_runs(list, "0.5").unwrap();
        assert_eq!(found[1].0, "keepkv alpha=0.95 threshold=0.6 window=8");
        // Of parts, only the options that differ from theirs.
        let list = r#"{"policy": "cpe", "psaw": {"start": 2, "phi": 0.5}, "etf": {"psi": 0.5}}"#;
        let found = policy_runs(list, "0.5").unwrap();
        assert_eq!(found[1].0, "cpe psaw(phi=0.5 start=2)");
    }

    #[test]
    fn files_are_named_rather_than_what_they_hold() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = folder.path().join(name).display().to_string();
            std::fs::write(&path, text).unwrap();
            path
        };
        let gates = file("gates.tsv", "0.1\t0.9\n");
        let channels = file("channels.json", r#"{"layers": [[[1, 0]]]}"#);
        let list = serde_json::json!([
            {"policy": "duo-attention", "alpha": gates},
            {"policy": "duo-attention", "alpha": [[0.1, 0.9]], "sinks": 4},
            {"policy": "combine", "prefill": {"policy": "snapkv"},
             "decode": {"policy": "hshare", "channels": channels}},
        ]);
        let found = policy_runs(&list.to_string(), "0.5").unwrap();
        let names: Vec<&str> = found[1..].iter().map(|(name, _)| name.as_str()).collect();
        let expected = [
            format!("duo-attention alpha={gates}"),
            "duo-attention sinks=4".into(),
            format!("snapkv + hshare channels={channels}"),
        ];
        assert_eq!(names, expected);
    }

    #[test]
    fn what_is_no_policy_is_refused() {
        for (policy, part) in [("[1,2]", "holds 1"), ("[[\"h2o\"]]", "neither"), ("{", "JSON")] {
            let error = policy_runs(policy, "0.5").unwrap_err().to_string();
            assert!(error.contains(part), "{policy}: {error}");
        }
    }
}
