//! KeepKV's figure 5, tables 3 and 4, and its lossless mode: retrieval and perplexity.

use kv_core::Budget;
use serde_json::{Value, json};

use crate::args::{Figure, Paper};
use crate::bench::ModelBench;
use crate::options::Attention;
use crate::record::FULL;
use crate::suites::attention;
use crate::suites::paper::quality;

/// Policies that evict by scores.
const EVICTORS: [&str; 5] = ["h2o", "snapkv", "recent-attention", "streaming-llm", "longflow"];
/// The tables' evictors: the paper's two.
const OF_TABLES: [&str; 2] = ["recent-attention", "h2o"];
/// Other methods that merge.
const MERGING: [&str; 3] = ["d2o", "cam", "kvmerger"];
/// When a prompt's tokens are merged: behind the eviction, or before.
const ORDERS: [&str; 2] = ["evict-first", "merge-first"];
/// Cosines that merged keys must exceed.
const THRESHOLDS: [f64; 5] = [0.6, 0.7, 0.8, 0.9, 0.95];
/// Periods of the lossless mode.
const PERIODS: [usize; 4] = [1, 4, 16, 64];
/// Prompts and decode steps over which the attention error is measured.
const ATTENTION: (usize, usize) = (4, 128);
const QUICK_ATTENTION: (usize, usize) = (1, 16);

/// Runs one of them.
///
/// # Errors
/// Where a policy or the device refuses.
pub(crate) fn run(bench: &mut ModelBench<'_>, options: &Paper) -> anyhow::Result<()> {
    let quick = bench.common.quick;
    let budgets = options.budgets(&bench.common);
    let own = super::contenders(&configs(options.figure, &budgets))?;
    let (contenders, _) = quality::run(bench, options, own, &budgets)?;
    if options.figure == Figure::KeepkvLossless {
        let (limit, steps) = if quick { QUICK_ATTENTION } else { ATTENTION };
        let (prompts, lengths) = (options.prompts.clone(), options.lengths.clone());
        let attention = Attention { limit, steps, prompts, lengths, ..Attention::default() };
        attention::measure(bench, &contenders, &attention)?;
    }
    Ok(())
}

/// Who runs; the full cache first.
fn configs(figure: Figure, budgets: &[Budget]) -> Vec<Value> {
    let alone = |name: &str, budget: Budget| json!({"policy": name, "budget": budget});
    let around =
        |name: &str, budget: Budget| json!({"policy": "keepkv", "budget": budget, "evictor": name});
    let with = |mut config: Value, option: &str, value: Value| {
        config[option] = value;
        config
    };
    let mut configs = vec![json!({"policy": FULL})];
    match figure {
        Figure::KeepkvTable3 => {
            for (name, &budget) in of_tables(budgets) {
                configs.push(alone(name, budget));
                for order in ORDERS {
                    configs.push(with(around(name, budget), "order", json!(order)));
                }
            }
        }
        Figure::KeepkvTable4 => {
            for (name, &budget) in of_tables(budgets) {
                configs.push(alone(name, budget));
                for threshold in THRESHOLDS {
                    configs.push(with(around(name, budget), "threshold", json!(threshold)));
                }
            }
        }
        Figure::KeepkvLossless => {
            for &budget in budgets {
                for period in PERIODS {
                    configs.push(with(alone("keepkv", budget), "period", json!(period)));
                }
                configs.push(alone("keepkv", budget));
            }
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

/// The tables' evictors at every budget.
fn of_tables(budgets: &[Budget]) -> impl Iterator<Item = (&'static str, &Budget)> {
    OF_TABLES.into_iter().flat_map(move |name| budgets.iter().map(move |budget| (name, budget)))
}
