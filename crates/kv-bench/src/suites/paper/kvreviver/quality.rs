//! KVReviver's tables 2 and 3, and figures 5 and 6: retrieval and perplexity.

use kv_core::Budget;
use kv_models::Fisher;
use serde_json::{Value, json};

use crate::args::{Figure, Paper};
use crate::bench::ModelBench;
use crate::suites::paper::quality;

/// The sketch's shares of table 2.
const VAGUE: [f64; 5] = [0.1, 0.15, 0.2, 0.3, 0.4];
/// Candidates' and recents' shares of table 3.
const EXACT: [(f64, f64); 6] =
    [(0.7, 0.2), (0.6, 0.3), (0.5, 0.4), (0.45, 0.45), (0.4, 0.5), (0.3, 0.6)];
/// The policies that the paper compares with.
const OTHERS: [&str; 4] = ["streaming-llm", "h2o", "cam", "snapkv"];
/// Where a model has no file of Fisher information.
const UNIFORM: &str = "kvreviver's layers share the budget evenly, as the model's folder has no \
    fisher.json: the paper divides it by Fisher information, which `cargo xtask bench fisher` \
    measures";
/// Results of the paper's tables.
const TABLE_2: &str = "the paper, ROUGE-1 on XSum at 10 %, by the sketch's share: 0.1 35.7, 0.15 \
    35.2, 0.2 34.4, 0.3 34.1, 0.4 33.3";
const TABLE_3: &str = "the paper, ROUGE-1 on XSum at 10 %, by the shares of candidates and \
    recents: 0.7/0.2 32.9, 0.6/0.3 34.5, 0.5/0.4 35.6, 0.45/0.45 35.7, 0.4/0.5 35.0, 0.3/0.6 35.5";

/// Runs one of them.
///
/// # Errors
/// Where a policy or the device refuses.
pub(crate) fn run(bench: &mut ModelBench<'_>, options: &Paper) -> anyhow::Result<()> {
    let budgets = options.budgets(&bench.common);
    // The paper divides a budget among layers by their Fisher information.
    let fisher = Fisher::beside(&bench.common.model).ok().filter(|path| path.is_file());
    let own = configs(options.figure, &budgets, fisher.is_some());
    let own = bench.common.built(own, &budgets)?;
    quality::run(bench, options, own, &budgets)?;
    if fisher.is_none() {
        bench.note(UNIFORM.into());
    }
    match options.figure {
        Figure::KvreviverTable2 => bench.note(TABLE_2.into()),
        Figure::KvreviverTable3 => bench.note(TABLE_3.into()),
        _ => {}
    }
    Ok(())
}

/// Who runs, the full cache aside.
fn configs(figure: Figure, budgets: &[Budget], by_fisher: bool) -> Vec<Value> {
    let alone = |name: &str, budget: Budget| json!({"policy": name, "budget": budget});
    let reviver = |budget: Budget| {
        let mut config = alone("kvreviver", budget);
        if by_fisher {
            config["layers"] = json!("fisher");
        }
        config
    };
    // The paper's, and those whose keys have signs too.
    let revivers = |budget: Budget| {
        [false, true].map(|signed| {
            let mut config = reviver(budget);
            config["signed_keys"] = json!(signed);
            config
        })
    };
    let shares = |vague: f64, candidate: f64, recent: f64, budget: Budget| {
        let mut config = reviver(budget);
        config["vague"] = json!(vague);
        config["candidate"] = json!(candidate);
        config["recent"] = json!(recent);
        config
    };
    let mut configs = Vec::new();
    match figure {
        Figure::KvreviverTable2 => {
            for &budget in budgets {
                configs.extend(VAGUE.map(|vague| {
                    // To four digits, as they are written.
                    let exact = ((1.0 - vague) / 2.0 * 1e4).round() / 1e4;
                    shares(vague, exact, exact, budget)
                }));
            }
        }
        Figure::KvreviverTable3 => {
            for &budget in budgets {
                configs.extend(
                    EXACT.map(|(candidate, recent)| shares(0.1, candidate, recent, budget)),
                );
            }
        }
        _ => {
            for name in OTHERS {
                configs.extend(budgets.iter().map(|&budget| alone(name, budget)));
            }
            configs.extend(budgets.iter().flat_map(|&budget| revivers(budget)));
        }
    }
    configs
}
