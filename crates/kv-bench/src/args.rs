//! The command line.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context;
use burn::tensor::DType;
use clap::{Parser, Subcommand, ValueEnum};
use kv_core::{Budget, DeviceChoice};
use kv_policies::{POLICIES, Policy, build, build_named};
use serde_json::Value;

/// What each KV-cache compression policy costs and keeps.
///
/// Without a suite: a quick comparison of all policies on the embedded model and prompts.
#[derive(Debug, Parser)]
#[command(name = "kv-bench", version)]
pub(crate) struct Args {
    /// What to measure.
    #[command(subcommand)]
    pub(crate) suite: Option<Suite>,
    #[command(flatten)]
    pub(crate) common: Common,
}

/// The suites.
#[derive(Debug, Clone, Subcommand)]
pub(crate) enum Suite {
    /// Retrieval and perplexity: exact match, the answer's log-probability, agreement with the full
    /// cache, by task, length and depth.
    Quality(Quality),
    /// Relative output error and retained attention mass on real queries, keys and values.
    Attention(Attention),
    /// Prefill and decode speed, time to the first token, bytes.
    Throughput(Throughput),
    /// Lists policies, models and devices.
    List,
}

/// Options of all suites.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Common {
    /// A model folder, a hub id, `random:PRESET`, or `needle-1m`.
    #[arg(long, global = true, default_value = "needle-1m")]
    pub(crate) model: String,
    /// `auto`, `cpu`, `wgpu[:i]`, `vulkan[:i]`, `metal[:i]` or `cuda[:i]`.
    #[arg(long, global = true, default_value = "auto")]
    pub(crate) device: DeviceChoice,
    /// Weights, activations and cache; by default f32 on the CPU, the model's own elsewhere.
    #[arg(long, global = true, value_enum)]
    pub(crate) dtype: Option<Float>,
    /// Policies, by name or as JSON objects; all by default. The full cache always runs along.
    #[arg(long, global = true, value_name = "A,B")]
    pub(crate) policy: Option<String>,
    /// Budgets: shares to keep (0.25) or tokens (512).
    #[arg(long, global = true, value_delimiter = ',', value_name = "0.25,512")]
    pub(crate) budget: Option<Vec<Budget>>,
    /// Writes the records here.
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Adds records of other runs, such as another device's or a peer's, to tables and report.
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) merge: Vec<PathBuf>,
    /// The HTML report; target/kv-bench/SUITE.html by default.
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) report: Option<PathBuf>,
    /// Fewer cases, smaller sizes.
    #[arg(long, global = true)]
    pub(crate) quick: bool,
    /// Seed of policies that draw.
    #[arg(long, global = true, default_value_t = 0)]
    pub(crate) seed: u64,
}

/// Options of `quality`.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct Quality {
    /// Prompts: JSON lines with task, length, depth, prompt, answer.
    #[arg(long, value_name = "FILE.jsonl")]
    pub(crate) prompts: Option<PathBuf>,
    /// At most this many prompts.
    #[arg(long)]
    pub(crate) limit: Option<usize>,
    /// Only prompts of these lengths.
    #[arg(long, value_delimiter = ',')]
    pub(crate) lengths: Vec<usize>,
    /// Only these tasks.
    #[arg(long, value_delimiter = ',')]
    pub(crate) tasks: Vec<String>,
    /// When compression happens.
    #[arg(long, value_enum, default_value_t = Mode::Both)]
    pub(crate) mode: Mode,
    /// Text whose perplexity to measure behind a compressed context.
    #[arg(long, value_name = "FILE.txt")]
    pub(crate) text: Option<PathBuf>,
    /// Leave perplexity out.
    #[arg(long)]
    pub(crate) no_perplexity: bool,
}

/// Options of `attention`.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct Attention {
    /// Layers, all by default.
    #[arg(long, value_delimiter = ',')]
    pub(crate) layers: Vec<usize>,
    /// Prompts, as in `quality`; the first few are used.
    #[arg(long, value_name = "FILE.jsonl")]
    pub(crate) prompts: Option<PathBuf>,
    /// Number of prompts.
    #[arg(long, default_value_t = 4)]
    pub(crate) limit: usize,
    /// Decode steps behind each prompt.
    #[arg(long, default_value_t = 16)]
    pub(crate) steps: usize,
    /// Also shows a row for each layer.
    #[arg(long)]
    pub(crate) by_layer: bool,
}

/// Options of `throughput`.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Throughput {
    /// Prompt tokens.
    #[arg(long, value_delimiter = ',', default_value = "1000")]
    pub(crate) lengths: Vec<usize>,
    /// Sequences that decode together.
    #[arg(long, value_delimiter = ',', default_value = "1")]
    pub(crate) batches: Vec<usize>,
    /// Decode steps that are timed, behind a few that are not.
    #[arg(long, default_value_t = 64)]
    pub(crate) steps: usize,
    /// Memory in GiB for which to say how large a batch would be, from the bytes measured.
    #[arg(long, value_name = "GIB")]
    pub(crate) memory_cap: Option<f64>,
}

/// When compression happens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Mode {
    /// The whole prompt is prefilled, then compressed.
    QuestionAware,
    /// Everything before the question is prefilled and compressed, then the question appended.
    QuestionAgnostic,
    /// Both.
    #[default]
    Both,
}

/// Floating-point types.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Float {
    /// 32 bits.
    F32,
    /// IEEE half precision.
    F16,
    /// Brain floats.
    Bf16,
}

impl From<Float> for DType {
    fn from(float: Float) -> Self {
        match float {
            Float::F32 => Self::F32,
            Float::F16 => Self::F16,
            Float::Bf16 => Self::BF16,
        }
    }
}

/// A policy to run, and how it appears in records.
#[derive(Debug, Clone)]
pub(crate) struct Contender {
    pub(crate) label: String,
    pub(crate) budget: Option<f64>,
    pub(crate) policy: Arc<dyn Policy>,
}

impl Common {
    /// Every policy at every budget, the full cache first.
    ///
    /// # Errors
    /// For names and configurations that the registry refuses.
    pub(crate) fn contenders(&self, default_budgets: &[f64]) -> anyhow::Result<Vec<Contender>> {
        let budgets = match &self.budget {
            Some(budgets) => budgets.clone(),
            None => default_budgets.iter().map(|&share| Budget::Ratio(share)).collect(),
        };
        let mut contenders = vec![Contender {
            label: "full".into(),
            budget: None,
            policy: build(&serde_json::json!({"policy": "full"}))?,
        }];
        for wanted in self.wanted()? {
            match wanted {
                Value::String(name) if name == "full" => {}
                Value::String(name) => {
                    for &budget in &budgets {
                        let policy = build_named(&name, budget)?;
                        let budget = Some(budget.into());
                        contenders.push(Contender { label: name.clone(), budget, policy });
                    }
                }
                config if config.get("budget").is_some() || config["policy"] == "combine" => {
                    contenders.push(labelled(&config, config["budget"].as_f64())?);
                }
                config => {
                    for &budget in &budgets {
                        let mut config = config.clone();
                        config["budget"] = f64::from(budget).into();
                        contenders.push(labelled(&config, Some(budget.into()))?);
                    }
                }
            }
        }
        Ok(contenders)
    }

    /// Names or configurations, as given.
    fn wanted(&self) -> anyhow::Result<Vec<Value>> {
        let Some(text) = &self.policy else {
            let runnable = POLICIES.iter().filter(|entry| entry.name != "combine");
            return Ok(runnable.map(|entry| entry.name.into()).collect());
        };
        if text.trim_start().starts_with(['{', '[']) {
            let value: Value = serde_json::from_str(text).context("--policy is not valid JSON")?;
            return Ok(match value {
                Value::Array(list) => list,
                one => vec![one],
            });
        }
        Ok(text.split(',').map(|name| name.trim().into()).collect())
    }
}

/// A configured policy under its name and the options that differ from the defaults.
fn labelled(config: &Value, budget: Option<f64>) -> anyhow::Result<Contender> {
    let policy = build(config)?;
    let mut options: Vec<String> = config
        .as_object()
        .into_iter()
        .flatten()
        .filter(|(key, _)| *key != "policy" && *key != "budget")
        .map(|(key, value)| format!("{key}={value}"))
        .collect();
    options.sort();
    let name = policy.name();
    let label =
        if options.is_empty() { name.into() } else { format!("{name} {}", options.join(" ")) };
    Ok(Contender { label, budget, policy })
}
