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
use crate::sketch::KvReviver;

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
    build: fn(&mut Config) -> Result<Arc<dyn Policy>>,
}

/// The options of `combine` that hold policies.
const PARTS: [&str; 2] = ["prefill", "decode"];

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
    /// Options without which a name and a budget make no policy.
    pub fn required(&self) -> &'static [&'static str] {
        match self.name {
            COMBINE => &PARTS,
            "duo-attention" => &["alpha"],
            _ => &[],
        }
    }

    /// Whether a name and a budget are enough for this policy.
    pub fn needs_no_more(&self) -> bool {
        self.required().is_empty()
    }

    /// An example configuration of a policy that needs more.
    pub fn example(&self) -> Option<&'static str> {
        match self.name {
            COMBINE => Some(
                r#"{"policy": "combine", "prefill": {"policy": "snapkv"}, "decode": {"policy": "h2o"}}"#,
            ),
            "duo-attention" => Some(r#"{"policy": "duo-attention", "alpha": "GATES.json"}"#),
            _ => None,
        }
    }
}

/// All policies, as `cargo xtask bench --policy` takes them.
pub const POLICIES: &[Entry] = &[
    Entry {
        name: "full",
        treatment: None,
        summary: "keeps everything",
        paper: "",
        build: Full::from_config,
    },
    Entry {
        name: "streaming-llm",
        treatment: Some(Treatment::Drop),
        summary: "attention sinks and the most recent tokens",
        paper: "https://arxiv.org/abs/2309.17453",
        build: keep_top::<StreamingLlm>,
    },
    Entry {
        name: "snapkv",
        treatment: Some(Treatment::Drop),
        summary: "attention of the last queries, pooled",
        paper: "https://arxiv.org/abs/2404.14469",
        build: keep_top::<SnapKv>,
    },
    Entry {
        name: "pyramidkv",
        treatment: Some(Treatment::Drop),
        summary: "SnapKV with budgets that fall with depth",
        paper: "https://arxiv.org/abs/2406.02069",
        build: pyramidkv::from_config,
    },
    Entry {
        name: "adakv",
        treatment: Some(Treatment::Drop),
        summary: "SnapKV whose heads compete for slots",
        paper: "https://arxiv.org/abs/2407.11550",
        build: adakv::from_config,
    },
    Entry {
        name: "h2o",
        treatment: Some(Treatment::Drop),
        summary: "heavy hitters by accumulated attention, and recents",
        paper: "https://arxiv.org/abs/2306.14048",
        build: keep_top::<H2o>,
    },
    Entry {
        name: "vatp",
        treatment: Some(Treatment::Drop),
        summary: "H2O times the value's norm",
        paper: "https://arxiv.org/abs/2406.12335",
        build: keep_top::<Vatp>,
    },
    Entry {
        name: "tova",
        treatment: Some(Treatment::Drop),
        summary: "the last query's attention",
        paper: "https://arxiv.org/abs/2401.06104",
        build: keep_top::<Tova>,
    },
    Entry {
        name: "r-kv",
        treatment: Some(Treatment::Drop),
        summary: "importance against redundancy",
        paper: "https://arxiv.org/abs/2505.24133",
        build: keep_top::<RKv>,
    },
    Entry {
        name: "knorm",
        treatment: Some(Treatment::Drop),
        summary: "small key norms",
        paper: "https://arxiv.org/abs/2406.11430",
        build: keep_top::<KNorm>,
    },
    Entry {
        name: "keydiff",
        treatment: Some(Treatment::Drop),
        summary: "keys unlike the mean key",
        paper: "https://arxiv.org/abs/2504.15364",
        build: keep_top::<KeyDiff>,
    },
    Entry {
        name: "expected-attention",
        treatment: Some(Treatment::Drop),
        summary: "attention that future queries would give",
        paper: "https://arxiv.org/abs/2510.00636",
        build: keep_top::<ExpectedAttention>,
    },
    Entry {
        name: "lagkv",
        treatment: Some(Treatment::Drop),
        summary: "spread of keys and values relative to the next chunk",
        paper: "https://arxiv.org/abs/2504.04704",
        build: keep_top::<LagKv>,
    },
    Entry {
        name: "pyramidinfer",
        treatment: Some(Treatment::Drop),
        summary: "prunes hidden states between layers",
        paper: "https://arxiv.org/abs/2405.12532",
        build: PyramidInfer::from_config,
    },
    Entry {
        name: "longflow",
        treatment: Some(Treatment::Overwrite),
        summary: "overwrites the slot that adds least to the output",
        paper: "https://github.com/yisunlp/LongFLow",
        build: LongFlow::from_config,
    },
    Entry {
        name: "balancekv",
        treatment: Some(Treatment::Sample),
        summary: "halves blocks so that both halves attend alike",
        paper: "https://arxiv.org/abs/2502.07861",
        build: BalanceKv::from_config,
    },
    Entry {
        name: "balancekv-augmented",
        treatment: Some(Treatment::Sample),
        summary: "BalanceKV beside tokens that stand apart, exact",
        paper: "https://arxiv.org/abs/2502.07861",
        build: BalanceKv::augmented_from_config,
    },
    Entry {
        name: "balancekv-stream",
        treatment: Some(Treatment::Sample),
        summary: "BalanceKV in levels, while decoding too",
        paper: "https://arxiv.org/abs/2502.07861",
        build: BalanceKvStream::from_config,
    },
    Entry {
        name: "keepkv",
        treatment: Some(Treatment::Merge),
        summary: "merges what another policy evicts, attention unchanged",
        paper: "https://arxiv.org/abs/2504.09936",
        build: KeepKv::from_config,
    },
    Entry {
        name: "d2o",
        treatment: Some(Treatment::Merge),
        summary: "H2O whose victims are averaged into similar slots",
        paper: "https://arxiv.org/abs/2406.13035",
        build: D2o::from_config,
    },
    Entry {
        name: "cam",
        treatment: Some(Treatment::Merge),
        summary: "sinks and recents; what decode steps evict is spread on what follows",
        paper: "https://github.com/zyxxmu/cam",
        build: Cam::from_config,
    },
    Entry {
        name: "kvmerger",
        treatment: Some(Treatment::Merge),
        summary: "similar neighbours become one slot",
        paper: "https://arxiv.org/abs/2407.08454",
        build: KvMerger::from_config,
    },
    Entry {
        name: "kvreviver",
        treatment: Some(Treatment::Summarise),
        summary: "a sketch from which dropped tokens are estimated; keeps no answers on small \
            models",
        paper: "",
        build: KvReviver::from_config,
    },
    Entry {
        name: "recent-attention",
        treatment: Some(Treatment::Drop),
        summary: "PyramidInfer's tokens, without pruning hidden states",
        paper: "https://arxiv.org/abs/2405.12532",
        build: recent_attention::from_config,
    },
    Entry {
        name: "uniform",
        treatment: Some(Treatment::Sample),
        summary: "uniform sampling, reweighted",
        paper: "https://arxiv.org/abs/2502.07861",
        build: Uniform::from_config,
    },
    Entry {
        name: "random",
        treatment: None,
        summary: "tokens at random",
        paper: "",
        build: keep_top::<Random>,
    },
    Entry {
        name: "quest",
        treatment: Some(Treatment::Read),
        summary: "keeps everything, attends to the pages that may matter most",
        paper: "https://arxiv.org/abs/2406.10774",
        build: Quest::from_config,
    },
    Entry {
        name: "double-sparsity",
        treatment: Some(Treatment::Read),
        summary: "keeps everything, attends to the best by a few channels",
        paper: "https://arxiv.org/abs/2408.07092",
        build: DoubleSparsity::from_config,
    },
    Entry {
        name: "hshare",
        treatment: Some(Treatment::Read),
        summary: "Double Sparsity with choices that queries, heads and layers share",
        paper: "https://github.com/wuhuaijin/HShare",
        build: HShare::from_config,
    },
    Entry {
        name: "duo-attention",
        treatment: Some(Treatment::Drop),
        summary: "some heads keep everything, others sinks and recents",
        paper: "https://arxiv.org/abs/2410.10819",
        build: DuoAttention::from_config,
    },
    Entry {
        name: "top-k-oracle",
        treatment: None,
        summary: "keeps everything, attends to the best",
        paper: "",
        build: TopKOracle::from_config,
    },
    Entry {
        name: "cis",
        treatment: Some(Treatment::Read),
        summary: "attends to sets that similar steps share",
        paper: "",
        build: Cis::from_config,
    },
    Entry {
        name: "cis-star",
        treatment: Some(Treatment::Read),
        summary: "CIS whose sets have the budget's size",
        paper: "",
        build: Cis::star_from_config,
    },
    Entry {
        name: "psaw",
        treatment: Some(Treatment::Read),
        summary: "windows that shrink with depth",
        paper: "",
        build: Psaw::from_config,
    },
    Entry {
        name: "etf",
        treatment: Some(Treatment::Read),
        summary: "deep layers leave a prompt's early tokens as they are",
        paper: "",
        build: Etf::from_config,
    },
    Entry {
        name: "cpe",
        treatment: Some(Treatment::Read),
        summary: "CIS within PSAW's windows, ETF in prefill",
        paper: "",
        build: Cpe::from_config,
    },
    Entry {
        name: COMBINE,
        treatment: None,
        summary: "one policy for the prompt, another for decoding",
        paper: "",
        build: Combine::from_config,
    },
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
    match (error, entry.example()) {
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
            .filter(|part| part.is_object())
            .any(leaves_budget_open),
        false => config.get("budget").is_none(),
    }
}

/// The configuration with a budget wherever it gives none.
pub fn with_budget(config: &Value, budget: Budget) -> Value {
    let mut config = config.clone();
    if config["policy"] == COMBINE {
        for part in PARTS {
            if config[part].is_object() {
                config[part] = with_budget(&config[part], budget);
            }
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
