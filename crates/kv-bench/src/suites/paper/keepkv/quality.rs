//! KeepKV's figure 5, tables 3 and 4, and its lossless mode: retrieval and perplexity.

use serde_json::{Value, json};

use super::BUDGET;
use crate::args::{Attention, Figure, Mode, Paper};
use crate::prompts::Prompts;
use crate::record::FULL;
use crate::run::Bench;
use crate::suites::perplexity::{self, Text};
use crate::suites::{attention, quality};

/// Policies that evict by scores.
const EVICTORS: [&str; 5] = ["h2o", "snapkv", "recent-attention", "streaming-llm", "longflow"];
/// Those of the tables: the paper's two.
const OF_TABLES: [&str; 2] = ["recent-attention", "h2o"];
/// Other methods that merge.
const MERGING: [&str; 3] = ["d2o", "cam", "kvmerger"];
/// Shares kept.
const BUDGETS: [f64; 4] = [0.5, 0.25, 0.1, 0.05];
const QUICK_BUDGETS: [f64; 2] = [0.25, 0.1];
/// When a prompt's tokens are merged: behind the eviction, or before.
const ORDERS: [&str; 2] = ["evict-first", "merge-first"];
/// Cosines that merged keys must exceed.
const THRESHOLDS: [f64; 5] = [0.6, 0.7, 0.8, 0.9, 0.95];
/// Periods of the lossless mode.
const PERIODS: [usize; 4] = [1, 4, 16, 64];
/// Prompts of the quick form.
const QUICK_PROMPTS: usize = 4;
/// Prompts and decode steps over which the attention error is measured.
const ATTENTION: (usize, usize) = (4, 128);
const QUICK_ATTENTION: (usize, usize) = (1, 16);

/// Runs one of them.
///
/// # Errors
/// Where a policy or the device refuses.
pub(crate) fn run(bench: &mut Bench<'_>, options: &Paper) -> anyhow::Result<()> {
    let quick = bench.common.quick;
    let contenders = super::contenders(&configs(options.figure, quick))?;
    let mut prompts = Prompts::load(options.prompts.as_deref())?;
    if let Some(limit) = options.limit.or(quick.then_some(QUICK_PROMPTS)) {
        prompts.limit(limit);
    }
    // Read first: a text that is not there must not cost a finished retrieval.
    let texts = Text::read(bench, options.text.as_deref(), &options.contexts)?;
    let mode = if quick { Mode::QuestionAware } else { Mode::Both };
    quality::retrieval(bench, &contenders, prompts, mode)?;
    perplexity::run(bench, &contenders, texts)?;
    if options.figure == Figure::KeepkvLossless {
        let (limit, steps) = if quick { QUICK_ATTENTION } else { ATTENTION };
        let prompts = options.prompts.clone();
        let attention = Attention { limit, steps, prompts, ..Attention::default() };
        attention::measure(bench, &contenders, &attention)?;
    }
    if quick {
        bench.note("few prompts, little text: a first look, no comparison".into());
    }
    Ok(())
}

/// Who runs; the full cache first.
fn configs(figure: Figure, quick: bool) -> Vec<Value> {
    let budgets: &[f64] = if quick { &QUICK_BUDGETS } else { &BUDGETS };
    let alone = |name: &str, budget: f64| json!({"policy": name, "budget": budget});
    let around =
        |name: &str, budget: f64| json!({"policy": "keepkv", "budget": budget, "evictor": name});
    let with = |mut config: Value, option: &str, value: Value| {
        config[option] = value;
        config
    };
    let mut configs = vec![json!({"policy": FULL})];
    match figure {
        Figure::KeepkvTable3 => {
            for name in OF_TABLES {
                configs.push(alone(name, BUDGET));
                for order in ORDERS {
                    configs.push(with(around(name, BUDGET), "order", json!(order)));
                }
            }
        }
        Figure::KeepkvTable4 => {
            for name in OF_TABLES {
                configs.push(alone(name, BUDGET));
                for threshold in THRESHOLDS {
                    configs.push(with(around(name, BUDGET), "threshold", json!(threshold)));
                }
            }
        }
        Figure::KeepkvLossless => {
            for period in PERIODS {
                configs.push(with(alone("keepkv", BUDGET), "period", json!(period)));
            }
            configs.push(alone("keepkv", BUDGET));
        }
        _ => {
            for name in EVICTORS {
                configs.extend(budgets.iter().map(|&budget| alone(name, budget)));
                configs.extend(budgets.iter().map(|&budget| around(name, budget)));
            }
            for name in MERGING {
                configs.extend(budgets.iter().map(|&budget| alone(name, budget)));
            }
        }
    }
    configs
}
