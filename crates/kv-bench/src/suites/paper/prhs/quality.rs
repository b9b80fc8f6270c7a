//! PrHS, tables 2 and 6: retrieval and perplexity, and how often heads retrieve.

use kv_core::Budget;
use serde_json::{Value, json};

use super::{HSHARE, cis, hshare};
use crate::args::{Figure, Paper};
use crate::bench::ModelBench;
use crate::record::FULL;
use crate::suites::paper::quality;
use crate::suites::prefill_perplexity;

/// Steps of a block.
const BLOCKS: [usize; 3] = [8, 16, 20];

/// Runs one of them.
///
/// # Errors
/// Where a policy or the device refuses.
pub(crate) fn run(bench: &mut ModelBench<'_>, options: &Paper) -> anyhow::Result<()> {
    let quick = bench.common.quick;
    let budgets = options.budgets(&bench.common);
    let configs = match options.figure {
        Figure::PrhsTable6 => table6(&budgets, bench.model.config().num_layers, quick),
        _ => table2(&budgets),
    };
    let own = bench.common.built(configs, &budgets)?;
    let (contenders, texts) = quality::run(bench, options, own, &budgets)?;
    if options.figure == Figure::PrhsTable6 {
        prefill_perplexity::run(bench, &contenders, &texts)?;
    }
    Ok(())
}

/// Who runs in table 2; the full cache first.
fn table2(budgets: &[Budget]) -> Vec<Value> {
    let mut configs = vec![json!({"policy": FULL})];
    for budget in budgets.iter().map(|budget| json!(budget)) {
        for name in ["top-k-oracle", "h2o", "quest", "double-sparsity"] {
            configs.push(json!({"policy": name, "budget": budget}));
        }
        configs.extend(HSHARE.map(|ratios| hshare(&budget, ratios)));
        for name in ["cis", "cis-star"] {
            configs.extend(BLOCKS.map(|block| cis(name, &budget, block)));
        }
    }
    configs
}

/// Who runs in table 6: the full cache, CIS*, PSAW, ETF and CPE with other parameters.
fn table6(budgets: &[Budget], layers: usize, quick: bool) -> Vec<Value> {
    // From three quarters of the depth, as the paper, and from a quarter.
    let starts = [3 * layers / 4, layers / 4];
    let starts = if quick { &starts[1..] } else { &starts[..] };
    let mut configs = vec![json!({"policy": FULL})];
    configs.extend(budgets.iter().flat_map(|budget| shared(&json!(budget))));
    for &start in starts {
        configs.extend(pruned(start, quick));
        configs.extend(budgets.iter().flat_map(|budget| composed(&json!(budget), start, quick)));
    }
    configs
}

/// CIS* by block, threshold, radius, and by the vectors that are compared.
fn shared(budget: &Value) -> Vec<Value> {
    let parameters =
        [(4, 0.8, 1), (8, 0.8, 1), (8, 0.7, 1), (8, 0.8, 2), (16, 0.8, 1), (32, 0.8, 1)];
    let blocks = parameters.map(|(block, threshold, radius)| {
        let mut config = cis("cis-star", budget, block);
        config["threshold"] = json!(threshold);
        config["radius"] = json!(radius);
        config
    });
    // In place of queries before RoPE.
    let similarities = ["query", "key", "hidden"].map(|similarity| {
        let mut config = cis("cis-star", budget, 8);
        config["similarity"] = json!(similarity);
        config
    });
    blocks.into_iter().chain(similarities).collect()
}

/// PSAW and ETF from a layer on.
fn pruned(start: usize, quick: bool) -> Vec<Value> {
    if quick {
        return ["psaw", "etf"].map(|name| json!({"policy": name, "start": start})).into();
    }
    let psaw = [(0.7, 1.0), (0.5, 1.0), (0.7, 1.5)]
        .map(|(phi, alpha)| json!({"policy": "psaw", "phi": phi, "alpha": alpha, "start": start}));
    let etf = [(0.5, 1.0), (0.5, 1.5), (0.4, 1.0)]
        .map(|(psi, gamma)| json!({"policy": "etf", "psi": psi, "gamma": gamma, "start": start}));
    [psaw, etf].concat()
}

/// CPE, whose windows and frozen tokens begin at a layer.
fn composed(budget: &Value, start: usize, quick: bool) -> Vec<Value> {
    let of = |block: usize| {
        let mut config = cis("cpe", budget, block);
        config["psaw"] = json!({"start": start});
        config["etf"] = json!({"start": start});
        config
    };
    if quick {
        return vec![of(8)];
    }
    // The paper's other setting of all three.
    let mut steeper = of(8);
    steeper["radius"] = json!(2);
    steeper["psaw"]["alpha"] = json!(1.2);
    steeper["etf"]["gamma"] = json!(1.2);
    [8, 16, 32].map(of).into_iter().chain([steeper]).collect()
}
