//! Policies by name, from JSON.

pub(crate) mod description;

use std::sync::Arc;

use kv_core::Budget;
use serde_json::Value;

use crate::combine::{COMBINE, Combine};
use crate::full::Full;
use crate::keep_top::build::keep_top;
use crate::keep_top::{
    ExpectedAttention, H2o, KNorm, KeyDiff, LagKv, RKv, Random, SnapKv, StreamingLlm, Tova, Vatp,
    adakv, pyramidkv, recent_attention,
};
use crate::merging::{Cam, D2o, KeepKv, KvMerger};
use crate::overwriting::{DuoAttention, LongFlow};
use crate::policy::Policy;
use crate::policy::config::{Config, invalid};
use crate::policy::error::{PolicyError, Result};
use crate::prefill::{Etf, Psaw, PyramidInfer};
use crate::reading::{Cis, Cpe, DoubleSparsity, HShare, Quest, TopKOracle};
use crate::sampling::{BalanceKv, BalanceKvStream, Uniform};
use crate::sketch::{KvReviver, VAGUE};

/// One policy of the registry.
#[derive(Debug, Clone, Copy)]
pub struct Entry {
    /// Its name in configurations.
    pub name: &'static str,
    /// What it does with slots; `None` for the full cache, for a combination of two policies, and
    /// for yardsticks that are no methods.
    pub treatment: Option<Treatment>,
    /// One line for lists.
    pub summary: &'static str,
    /// The paper; empty for yardsticks.
    pub paper: &'static str,
    /// Options without which a name and a budget make no policy.
    pub required: &'static [&'static str],
    /// The option that names the form of a policy that has several, each with options of its own.
    pub form: Option<&'static str>,
    /// An example configuration of a policy that needs more than a name and a budget.
    pub example: Option<&'static str>,
    build: Build,
}

/// Builds a policy from the options that are left of its configuration.
type Build = fn(&mut Config) -> Result<Arc<dyn Policy>>;

/// The options of `combine` that hold policies.
const PARTS: [&str; 2] = ["prefill", "decode"];

/// An example of `combine`.
const COMBINED: &str =
    r#"{"policy": "combine", "prefill": {"policy": "snapkv"}, "decode": {"policy": "h2o"}}"#;

/// What a policy does with slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Treatment {
    /// Removes tokens.
    Drop,
    /// Writes each new token over an old one.
    Overwrite,
    /// Removes tokens and gives the others larger weights.
    Sample,
    /// Joins tokens into one.
    Merge,
    /// Moves tokens into a smaller summary.
    Summarise,
    /// Keeps all tokens and attends to some of them.
    Read,
}

impl Entry {
    /// Whether a name and a budget are enough for this policy.
    pub fn needs_no_more(&self) -> bool {
        self.required.is_empty()
    }

    const fn summary(self, summary: &'static str) -> Self {
        Self { summary, ..self }
    }

    const fn paper(self, paper: &'static str) -> Self {
        Self { paper, ..self }
    }

    const fn form(self, option: &'static str) -> Self {
        Self { form: Some(option), ..self }
    }

    const fn required(self, required: &'static [&'static str], example: &'static str) -> Self {
        Self { required, example: Some(example), ..self }
    }
}

/// An entry of the full cache, a combination or a yardstick, still without a summary.
const fn other(name: &'static str, build: Build) -> Entry {
    Entry {
        name,
        treatment: None,
        summary: "",
        paper: "",
        required: &[],
        form: None,
        example: None,
        build,
    }
}

/// An entry of a method, still without a summary and a paper.
const fn method(treatment: Treatment, name: &'static str, build: Build) -> Entry {
    Entry { treatment: Some(treatment), ..other(name, build) }
}

/// All policies, as `cargo xtask bench --policy` takes them.
pub const POLICIES: &[Entry] = &[
    other("full", Full::from_config).summary("keeps everything"),
    method(Treatment::Drop, "streaming-llm", keep_top::<StreamingLlm>)
        .summary("attention sinks and the most recent tokens")
        .paper("https://arxiv.org/abs/2309.17453"),
    method(Treatment::Drop, "snapkv", keep_top::<SnapKv>)
        .summary("attention of the last queries, pooled")
        .paper("https://arxiv.org/abs/2404.14469"),
    method(Treatment::Drop, "pyramidkv", pyramidkv::from_config)
        .summary("SnapKV with budgets that fall with depth")
        .paper("https://arxiv.org/abs/2406.02069"),
    method(Treatment::Drop, "adakv", adakv::from_config)
        .summary("SnapKV whose heads compete for slots")
        .paper("https://arxiv.org/abs/2407.11550"),
    method(Treatment::Drop, "h2o", keep_top::<H2o>)
        .summary("heavy hitters by accumulated attention, and recents")
        .paper("https://arxiv.org/abs/2306.14048"),
    method(Treatment::Drop, "vatp", keep_top::<Vatp>)
        .summary("H2O times the value's norm")
        .paper("https://arxiv.org/abs/2406.12335"),
    method(Treatment::Drop, "tova", keep_top::<Tova>)
        .summary("the last query's attention")
        .paper("https://arxiv.org/abs/2401.06104"),
    method(Treatment::Drop, "r-kv", keep_top::<RKv>)
        .summary("importance against redundancy")
        .paper("https://arxiv.org/abs/2505.24133"),
    method(Treatment::Drop, "knorm", keep_top::<KNorm>)
        .summary("small key norms")
        .paper("https://arxiv.org/abs/2406.11430"),
    method(Treatment::Drop, "keydiff", keep_top::<KeyDiff>)
        .summary("keys unlike the mean key")
        .paper("https://arxiv.org/abs/2504.15364"),
    method(Treatment::Drop, "expected-attention", keep_top::<ExpectedAttention>)
        .summary("attention that future queries would give")
        .paper("https://arxiv.org/abs/2510.00636"),
    method(Treatment::Drop, "lagkv", keep_top::<LagKv>)
        .summary("spread of keys and values relative to the next chunk")
        .paper("https://arxiv.org/abs/2504.04704"),
    method(Treatment::Drop, "pyramidinfer", PyramidInfer::from_config)
        .summary("prunes hidden states between layers")
        .paper("https://arxiv.org/abs/2405.12532"),
    method(Treatment::Overwrite, "longflow", LongFlow::from_config)
        .summary("overwrites the slot that adds least to the output")
        .paper("https://github.com/yisunlp/LongFLow"),
    method(Treatment::Sample, "balancekv", BalanceKv::from_config)
        .summary("halves blocks so that both halves attend alike")
        .paper("https://arxiv.org/abs/2502.07861"),
    method(Treatment::Sample, "balancekv-augmented", BalanceKv::augmented_from_config)
        .summary("BalanceKV beside tokens that stand apart, exact")
        .paper("https://arxiv.org/abs/2502.07861"),
    method(Treatment::Sample, "balancekv-stream", BalanceKvStream::from_config)
        .summary("BalanceKV in levels, while decoding too")
        .paper("https://arxiv.org/abs/2502.07861"),
    method(Treatment::Merge, "keepkv", KeepKv::from_config)
        .summary("merges what another policy evicts, attention unchanged")
        .paper("https://arxiv.org/abs/2504.09936"),
    method(Treatment::Merge, "d2o", D2o::from_config)
        .summary("H2O whose victims are averaged into similar slots")
        .paper("https://arxiv.org/abs/2406.13035"),
    method(Treatment::Merge, "cam", Cam::from_config)
        .summary("sinks and recents; what decode steps evict is spread on what follows")
        .paper("https://github.com/zyxxmu/cam"),
    method(Treatment::Merge, "kvmerger", KvMerger::from_config)
        .summary("similar neighbours become one slot")
        .paper("https://arxiv.org/abs/2407.08454"),
    method(Treatment::Summarise, "kvreviver", KvReviver::from_config)
        .summary("a few bits of each number of dropped tokens, or a sketch that estimates them")
        .form(VAGUE),
    method(Treatment::Drop, "recent-attention", recent_attention::from_config)
        .summary("PyramidInfer's tokens, without pruning hidden states")
        .paper("https://arxiv.org/abs/2405.12532"),
    method(Treatment::Sample, "uniform", Uniform::from_config)
        .summary("uniform sampling, reweighted")
        .paper("https://arxiv.org/abs/2502.07861"),
    other("random", keep_top::<Random>).summary("tokens at random"),
    method(Treatment::Read, "quest", Quest::from_config)
        .summary("keeps everything, attends to the pages that may matter most")
        .paper("https://arxiv.org/abs/2406.10774"),
    method(Treatment::Read, "double-sparsity", DoubleSparsity::from_config)
        .summary("keeps everything, attends to the best by a few channels")
        .paper("https://arxiv.org/abs/2408.07092"),
    method(Treatment::Read, "hshare", HShare::from_config)
        .summary("Double Sparsity with choices that queries, heads and layers share")
        .paper("https://github.com/wuhuaijin/HShare"),
    method(Treatment::Drop, "duo-attention", DuoAttention::from_config)
        .summary("some heads keep everything, others sinks and recents")
        .paper("https://arxiv.org/abs/2410.10819")
        .required(&["alpha"], r#"{"policy": "duo-attention", "alpha": "GATES.json"}"#),
    other("top-k-oracle", TopKOracle::from_config).summary("keeps everything, attends to the best"),
    method(Treatment::Read, "cis", Cis::from_config)
        .summary("attends to sets that similar steps share"),
    method(Treatment::Read, "cis-star", Cis::star_from_config)
        .summary("CIS whose sets have the budget's size"),
    method(Treatment::Read, "psaw", Psaw::from_config).summary("windows that shrink with depth"),
    method(Treatment::Read, "etf", Etf::from_config)
        .summary("deep layers leave a prompt's early tokens as they are"),
    method(Treatment::Read, "cpe", Cpe::from_config)
        .summary("CIS within PSAW's windows, ETF in prefill"),
    other(COMBINE, Combine::from_config)
        .summary("one policy for the prompt, another for decoding")
        .required(&PARTS, COMBINED),
];

/// Builds a policy from its configuration, such as
/// `{"policy": "snapkv", "budget": 512, "window": 64}`. Whole budgets are tokens, budgets with a
/// point a share of the prompt.
///
/// ```
/// use kv_policies::build;
/// use serde_json::json;
///
/// let policy = build(&json!({"policy": "h2o", "budget": 0.25, "sinks": 2}))?;
/// assert_eq!(policy.name(), "h2o");
/// assert_eq!(policy.config()["sinks"], 2);
///
/// let error = build(&json!({"policy": "h20", "budget": 0.25})).unwrap_err();
/// assert!(error.to_string().contains("`h2o`"));
/// # Ok::<(), kv_policies::PolicyError>(())
/// ```
///
/// # Errors
/// [`PolicyError::UnknownPolicy`] suggests the nearest name; [`PolicyError::InvalidConfig`] names
/// the parameter that is unknown, missing or out of range.
pub fn build(config: &Value) -> Result<Arc<dyn Policy>> {
    let Value::Object(map) = config else {
        let reason = format!("expected an object with a `policy`, found {config}");
        return Err(invalid("?", reason));
    };
    let mut map = map.clone();
    let Some(Value::String(name)) = map.remove("policy") else {
        return Err(invalid("?", "`policy` is missing".into()));
    };
    let entry = entry(&name).ok_or_else(|| unknown(&name))?;
    let mut config = Config::new(map, build);
    let policy = (entry.build)(&mut config).map_err(|error| with_example(error, entry))?;
    match config.first_left() {
        Some(key) => Err(invalid(&name, format!("unknown parameter `{key}`"))),
        None => Ok(policy),
    }
}

/// The error, with an example where a policy's configuration lacks a required option.
fn with_example(error: PolicyError, entry: &Entry) -> PolicyError {
    match (error, entry.example) {
        (PolicyError::InvalidConfig { policy, reason }, Some(example))
            if policy == entry.name && reason.contains("missing") =>
        {
            PolicyError::InvalidConfig { policy, reason: format!("{reason}, as in {example}") }
        }
        (error, _) => error,
    }
}

/// The policy of this name in the registry.
pub fn entry(name: &str) -> Option<&'static Entry> {
    POLICIES.iter().find(|entry| entry.name == name)
}

/// Whether a configuration, or a part of one, gives no budget.
pub fn leaves_budget_open(config: &Value) -> bool {
    match config["policy"] == COMBINE {
        true => PARTS
            .iter()
            .map(|part| &config[part])
            .any(|part| part.is_string() || part.is_object() && leaves_budget_open(part)),
        false => config.get("budget").is_none(),
    }
}

/// The configuration with a budget wherever it gives none.
pub fn with_budget(config: &Value, budget: Budget) -> Value {
    let mut config = config.clone();
    if config["policy"] == COMBINE {
        for part in PARTS {
            let Some(own) = config.get_mut(part) else { continue };
            *own = match own.take() {
                Value::String(name) => serde_json::json!({ "policy": name, "budget": budget }),
                part @ Value::Object(_) => with_budget(&part, budget),
                other => other,
            };
        }
    } else if let Some(map) = config.as_object_mut() {
        map.entry("budget").or_insert_with(|| serde_json::json!(budget));
    }
    config
}

/// Builds a policy with its paper's defaults.
///
/// # Errors
/// The errors of [`build`].
pub fn build_named(name: &str, budget: Budget) -> Result<Arc<dyn Policy>> {
    build(&serde_json::json!({ "policy": name, "budget": budget }))
}

fn unknown(name: &str) -> PolicyError {
    let names = POLICIES.iter().map(|entry| entry.name);
    let nearest = names
        .clone()
        // Lengths first: a distance takes time by the product of both lengths.
        .filter(|known| known.len().abs_diff(name.len()) <= known.len() / 2)
        .map(|known| (strsim::damerau_levenshtein(name, known), known))
        .min()
        .filter(|(distance, known)| *distance <= known.len() / 2);
    PolicyError::UnknownPolicy {
        name: name.into(),
        suggestion: nearest
            .map(|(_, known)| format!(" (did you mean `{known}`?)"))
            .unwrap_or_default(),
        known: names.collect::<Vec<_>>().join(", "),
    }
}
