//! Policies by name, from JSON.

mod config;

use std::sync::Arc;

use kv_core::{Budget, HeadAllocation, LayerAllocation};
use serde_json::Value;

use crate::kvreviver::FOREIGN;
use crate::{
    AnchorRule, BalanceKv, BalanceKvStream, Cam, CamOptions, Cis, CisOptions, Combine, Cpe, D2o,
    D2oOptions, DoubleSparsity, DuoAttention, Etf, Evictor, ExpectedAttention, Full, H2o, HShare,
    KNorm, KeepKv, KeepKvOptions, KeyDiff, KvMerger, KvReviver, KvReviverOptions, LagKv, LongFlow,
    Policy, PolicyError, Psaw, PyramidInfer, Quest, RKv, Random, RecentAttention, Result, Scorer,
    SnapKv, StreamingLlm, TopKOracle, Tova, Uniform, Vatp,
};
use config::{Config, family, invalid};

pub(crate) use config::{config_around, config_of};

/// One policy of the registry.
#[derive(Debug, Clone, Copy)]
pub struct Entry {
    /// Its name in configurations.
    pub name: &'static str,
    /// One line for lists.
    pub summary: &'static str,
    /// The paper; empty for yardsticks.
    pub paper: &'static str,
    build: fn(&mut Config) -> Result<Arc<dyn Policy>>,
}

impl Entry {
    /// Whether a name and a budget make a policy: others need to be told more.
    pub fn needs_no_more(&self) -> bool {
        self.example().is_none()
    }

    /// For those that need more, a configuration that has it.
    pub fn example(&self) -> Option<&'static str> {
        match self.name {
            "combine" => Some(
                r#"{"policy": "combine", "prefill": {"policy": "snapkv"}, "decode": {"policy": "h2o"}}"#,
            ),
            "duo-attention" => Some(r#"{"policy": "duo-attention", "alpha": "GATES.json"}"#),
            _ => None,
        }
    }
}

/// All policies, as `cargo xtask bench --policy` takes them.
pub const POLICIES: &[Entry] = &[
    Entry { name: "full", summary: "keeps everything", paper: "", build: |_| Ok(Arc::new(Full)) },
    Entry {
        name: "streaming-llm",
        summary: "attention sinks and the most recent tokens",
        paper: "https://arxiv.org/abs/2309.17453",
        build: |config| family::<StreamingLlm>("streaming-llm", config, |_, _| {}),
    },
    Entry {
        name: "snapkv",
        summary: "attention of the last queries, pooled",
        paper: "https://arxiv.org/abs/2404.14469",
        build: |config| family::<SnapKv>("snapkv", config, |_, _| {}),
    },
    Entry {
        name: "pyramidkv",
        summary: "SnapKV with budgets that fall with depth",
        paper: "https://arxiv.org/abs/2406.02069",
        build: |config| {
            family::<SnapKv>("pyramidkv", config, |family, _| {
                family.layers = LayerAllocation::Pyramid { beta: 20.0 };
            })
        },
    },
    Entry {
        name: "adakv",
        summary: "SnapKV whose heads compete for slots",
        paper: "https://arxiv.org/abs/2407.11550",
        build: |config| {
            family::<SnapKv>("adakv", config, |family, scorer| {
                family.heads = HeadAllocation::Ada { floor: 0.2 };
                *scorer = SnapKv::of_ada_kv();
            })
        },
    },
    Entry {
        name: "h2o",
        summary: "heavy hitters by accumulated attention, and recents",
        paper: "https://arxiv.org/abs/2306.14048",
        build: |config| family::<H2o>("h2o", config, |_, _| {}),
    },
    Entry {
        name: "vatp",
        summary: "H2O times the value's norm",
        paper: "https://arxiv.org/abs/2406.12335",
        build: |config| family::<Vatp>("vatp", config, |_, _| {}),
    },
    Entry {
        name: "tova",
        summary: "the last query's attention",
        paper: "https://arxiv.org/abs/2401.06104",
        build: |config| family::<Tova>("tova", config, |_, _| {}),
    },
    Entry {
        name: "r-kv",
        summary: "importance against redundancy",
        paper: "https://arxiv.org/abs/2505.24133",
        build: |config| family::<RKv>("r-kv", config, |_, _| {}),
    },
    Entry {
        name: "knorm",
        summary: "small key norms",
        paper: "https://arxiv.org/abs/2406.11430",
        build: |config| family::<KNorm>("knorm", config, |_, _| {}),
    },
    Entry {
        name: "keydiff",
        summary: "keys unlike the mean key",
        paper: "https://arxiv.org/abs/2504.15364",
        build: |config| family::<KeyDiff>("keydiff", config, |_, _| {}),
    },
    Entry {
        name: "expected-attention",
        summary: "attention that future queries would give",
        paper: "https://arxiv.org/abs/2510.00636",
        build: |config| family::<ExpectedAttention>("expected-attention", config, |_, _| {}),
    },
    Entry {
        name: "lagkv",
        summary: "spread of keys and values relative to the next chunk",
        paper: "https://arxiv.org/abs/2504.04704",
        build: |config| family::<LagKv>("lagkv", config, |_, _| {}),
    },
    Entry {
        name: "pyramidinfer",
        summary: "prunes hidden states between layers",
        paper: "https://arxiv.org/abs/2405.12532",
        build: |config| {
            let policy: PyramidInfer = config.take_all("pyramidinfer")?;
            policy.validate()?;
            Ok(Arc::new(policy))
        },
    },
    Entry {
        name: "longflow",
        summary: "overwrites the slot that adds least to the output",
        paper: "https://github.com/yisunlp/LongFLow",
        build: |config| {
            let policy: LongFlow = config.take_all("longflow")?;
            policy.validate()?;
            Ok(Arc::new(policy))
        },
    },
    Entry {
        name: "balancekv",
        summary: "halves blocks so that both halves attend alike",
        paper: "https://arxiv.org/abs/2502.07861",
        build: |config| {
            let policy: BalanceKv = config.take_all("balancekv")?;
            policy.validate()?;
            if policy.anchors > 0.0 || policy.anchors_by != AnchorRule::default() {
                let reason = "`anchors` and `anchors_by` are of `balancekv-augmented`";
                return Err(invalid("balancekv", reason.into()));
            }
            Ok(Arc::new(policy))
        },
    },
    Entry {
        name: "balancekv-augmented",
        summary: "BalanceKV beside tokens that stand apart, exact",
        paper: "https://arxiv.org/abs/2502.07861",
        build: |config| {
            let anchors = serde_json::json!(BalanceKv::AUGMENTED_ANCHORS);
            config.0.entry("anchors").or_insert(anchors);
            let policy: BalanceKv = config.take_all("balancekv-augmented")?;
            policy.validate()?;
            if policy.anchors == 0.0 {
                let reason = "without `anchors` it is `balancekv`";
                return Err(invalid("balancekv-augmented", reason.into()));
            }
            Ok(Arc::new(policy))
        },
    },
    Entry {
        name: "balancekv-stream",
        summary: "BalanceKV in levels, while decoding too",
        paper: "https://arxiv.org/abs/2502.07861",
        build: |config| {
            let policy: BalanceKvStream = config.take_all("balancekv-stream")?;
            policy.validate()?;
            Ok(Arc::new(policy))
        },
    },
    Entry {
        name: "keepkv",
        summary: "merges what another policy evicts, attention unchanged",
        paper: "https://arxiv.org/abs/2504.09936",
        build: |config| {
            let evictor = evictor(config, RecentAttention::NAME)?;
            Ok(Arc::new(KeepKv::new(evictor, config.take_all::<KeepKvOptions>("keepkv")?)?))
        },
    },
    Entry {
        name: "d2o",
        summary: "H2O whose victims are averaged into similar slots",
        paper: "https://arxiv.org/abs/2406.13035",
        build: |config| {
            let evictor = evictor(config, H2o::NAME)?;
            Ok(Arc::new(D2o::new(evictor, config.take_all::<D2oOptions>("d2o")?)?))
        },
    },
    Entry {
        name: "cam",
        summary: "sinks and recents; what decode steps evict is spread on what follows",
        paper: "https://github.com/zyxxmu/cam",
        build: |config| {
            let evictor = evictor(config, StreamingLlm::NAME)?;
            Ok(Arc::new(Cam::new(evictor, config.take_all::<CamOptions>("cam")?)?))
        },
    },
    Entry {
        name: "kvmerger",
        summary: "similar neighbours become one slot",
        paper: "https://arxiv.org/abs/2407.08454",
        build: |config| {
            let policy: KvMerger = config.take_all("kvmerger")?;
            policy.validate()?;
            Ok(Arc::new(policy))
        },
    },
    Entry {
        name: "kvreviver",
        summary: "a sketch from which dropped tokens are estimated; keeps no answers on small \
            models",
        paper: "",
        build: |config| {
            let candidates = candidates(config)?;
            let options =
                config.take_beside::<KvReviverOptions>("kvreviver", "`candidates` with its own")?;
            Ok(Arc::new(KvReviver::new(options, candidates)?))
        },
    },
    Entry {
        name: "recent-attention",
        summary: "PyramidInfer's tokens, without pruning hidden states",
        paper: "https://arxiv.org/abs/2405.12532",
        build: |config| {
            family::<RecentAttention>("recent-attention", config, |family, _| {
                family.layers = LayerAllocation::Cosine { gamma: RecentAttention::GAMMA };
            })
        },
    },
    Entry {
        name: "uniform",
        summary: "uniform sampling, reweighted",
        paper: "https://arxiv.org/abs/2502.07861",
        build: |config| Ok(Arc::new(config.take_all::<Uniform>("uniform")?)),
    },
    Entry {
        name: "random",
        summary: "tokens at random",
        paper: "",
        build: |config| family::<Random>("random", config, |_, _| {}),
    },
    Entry {
        name: "quest",
        summary: "keeps everything, attends to the pages that may matter most",
        paper: "https://arxiv.org/abs/2406.10774",
        build: |config| {
            let policy: Quest = config.take_all("quest")?;
            policy.validate()?;
            Ok(Arc::new(policy))
        },
    },
    Entry {
        name: "double-sparsity",
        summary: "keeps everything, attends to the best by a few channels",
        paper: "https://arxiv.org/abs/2408.07092",
        build: |config| {
            let policy: DoubleSparsity = config.take_all("double-sparsity")?;
            Ok(Arc::new(policy.validated()?))
        },
    },
    Entry {
        name: "hshare",
        summary: "Double Sparsity with choices that queries, heads and layers share",
        paper: "https://github.com/wuhuaijin/HShare",
        build: |config| {
            let policy: HShare = config.take_all("hshare")?;
            Ok(Arc::new(policy.validated()?))
        },
    },
    Entry {
        name: "duo-attention",
        summary: "some heads keep everything, others sinks and recents",
        paper: "https://arxiv.org/abs/2410.10819",
        build: |config| {
            let policy: DuoAttention = config.take_all("duo-attention")?;
            Ok(Arc::new(policy.validated()?))
        },
    },
    Entry {
        name: "top-k-oracle",
        summary: "keeps everything, attends to the best",
        paper: "",
        build: |config| {
            let policy: TopKOracle = config.take_all("top-k-oracle")?;
            policy.validate()?;
            Ok(Arc::new(policy))
        },
    },
    Entry {
        name: "cis",
        summary: "attends to sets that similar steps share",
        paper: "",
        build: |config| Ok(Arc::new(Cis::new(config.take_all::<CisOptions>("cis")?)?)),
    },
    Entry {
        name: "cis-star",
        summary: "CIS whose sets have the budget's size",
        paper: "",
        build: |config| Ok(Arc::new(Cis::star(config.take_all::<CisOptions>("cis-star")?)?)),
    },
    Entry {
        name: "psaw",
        summary: "windows that shrink with depth",
        paper: "",
        build: |config| {
            let policy: Psaw = config.take_without_budget("psaw")?;
            policy.validate("psaw")?;
            Ok(Arc::new(policy))
        },
    },
    Entry {
        name: "etf",
        summary: "deep layers leave a prompt's early tokens as they are",
        paper: "",
        build: |config| {
            let policy: Etf = config.take_without_budget("etf")?;
            policy.validate("etf")?;
            Ok(Arc::new(policy))
        },
    },
    Entry {
        name: "cpe",
        summary: "CIS within PSAW's windows, ETF in prefill",
        paper: "",
        build: |config| {
            let mut part = |name: &str| config.0.remove(name).unwrap_or(serde_json::json!({}));
            let (psaw, etf) = (part("psaw"), part("etf"));
            let wrong = |error: serde_json::Error| invalid("cpe", error.to_string());
            let psaw: Psaw = serde_json::from_value(psaw).map_err(wrong)?;
            let etf: Etf = serde_json::from_value(etf).map_err(wrong)?;
            let cis = config.take_beside::<CisOptions>("cpe", "`psaw` and `etf` with their own")?;
            Ok(Arc::new(Cpe::new(cis, psaw, etf)?))
        },
    },
    Entry {
        name: "combine",
        summary: "one policy for the prompt, another for decoding",
        paper: "",
        build: |config| {
            let mut part = |name: &str| match config.0.remove(name) {
                Some(part) => build(&part),
                None => Err(invalid("combine", format!("`{name}` is missing"))),
            };
            Ok(Arc::new(Combine::new(part("prefill")?, part("decode")?)?))
        },
    },
];

/// The policy in another, by name or configuration, with the other's budget.
fn evictor(config: &mut Config, default: &str) -> Result<Arc<dyn Policy>> {
    let mut evictor = match config.0.remove("evictor") {
        Some(Value::String(name)) => serde_json::json!({ "policy": name }),
        Some(evictor) => evictor,
        None => serde_json::json!({ "policy": default }),
    };
    if let (Some(budget), Some(evictor)) = (config.0.remove("budget"), evictor.as_object_mut()) {
        evictor.insert("budget".into(), budget);
    }
    build(&evictor)
}

/// The policy that scores another's prompts, by name or configuration without a budget.
fn candidates(config: &mut Config) -> Result<Option<Arc<dyn Evictor>>> {
    let mut candidates = match config.0.remove("candidates") {
        None => return Ok(None),
        Some(Value::String(name)) => serde_json::json!({ "policy": name }),
        Some(candidates) => candidates,
    };
    if let Some(candidates) = candidates.as_object_mut() {
        if let Some(key) = FOREIGN.iter().find(|key| candidates.contains_key(**key)) {
            let reason = format!(
                "`{key}` in `candidates`, expected it beside, if at all: they score prompts alone"
            );
            return Err(invalid("kvreviver", reason));
        }
        candidates.insert("budget".into(), serde_json::json!(1.0));
    }
    let policy = build(&candidates)?;
    let name = policy.name();
    let evictor = policy.into_evictor().ok_or_else(|| {
        invalid(
            "kvreviver",
            format!("`candidates` is `{name}`, expected a policy that scores tokens"),
        )
    })?;
    Ok(Some(evictor))
}

/// Builds a policy from its configuration, such as
/// `{"policy": "snapkv", "budget": 512, "window": 64}`. Whole budgets are
/// tokens, those with a point a share of the prompt.
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
    let entry = POLICIES.iter().find(|entry| entry.name == name).ok_or_else(|| unknown(&name))?;
    let mut config = Config(map);
    let policy = (entry.build)(&mut config).map_err(|error| with_example(error, entry))?;
    match config.0.keys().next() {
        // The full cache takes a budget and ignores it, so that lists of budgets apply to all.
        Some(key) if !(name == "full" && key == "budget") => {
            Err(invalid(&name, format!("unknown parameter `{key}`")))
        }
        _ => Ok(policy),
    }
}

/// The error with an example, where a policy needs more than a name and was not told.
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

/// Builds a policy with its paper's defaults.
///
/// # Errors
/// As [`build`].
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
