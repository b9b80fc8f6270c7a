//! PrHS, figures 7 and 8: attention mass that is read of real prompts, by retrieval ratio and by how many
//! tokens bring their neighbours along.

use serde_json::{Value, json};

use super::contenders;
use crate::args::{Attention, Figure, Paper};
use crate::record::FULL;
use crate::run::Bench;
use crate::suites::attention;

/// The paper's budgets.
const BUDGETS: [usize; 2] = [128, 512];
/// Steps of a block, for ever fewer retrievals.
const BLOCKS: [usize; 5] = [4, 8, 16, 20, 32];
/// HShare's shares of layers, heads and queries, for ever fewer retrievals.
const HSHARE: [[f64; 3]; 4] =
    [[0.75, 0.75, 0.5], [0.75, 0.5, 0.5], [0.75, 0.5, 0.25], [0.5, 0.5, 0.25]];
/// Shares of a set that bring their neighbours along.
const DILATED: [f64; 5] = [0.0, 1.0 / 6.0, 1.0 / 3.0, 2.0 / 3.0, 1.0];
/// Prompts and decode steps.
const SIZE: (usize, usize) = (8, 128);
const QUICK_SIZE: (usize, usize) = (1, 24);

/// Runs one of them.
///
/// # Errors
/// Where a policy or the device refuses.
pub(crate) fn run(bench: &mut Bench<'_>, options: &Paper) -> anyhow::Result<()> {
    let quick = bench.common.quick;
    let budgets = if quick { &BUDGETS[..1] } else { &BUDGETS[..] };
    let mut configs = vec![json!({"policy": FULL})];
    for budget in budgets {
        configs.push(json!({"policy": "top-k-oracle", "budget": budget}));
        configs.extend(match options.figure {
            Figure::PrhsFig8 => fig8(*budget),
            _ => fig7(*budget),
        });
    }
    let (limit, steps) = if quick { QUICK_SIZE } else { SIZE };
    let attention = Attention {
        limit: options.limit.unwrap_or(limit),
        steps,
        prompts: options.prompts.clone(),
        certificates: true,
        ..Attention::default()
    };
    attention::measure(bench, &contenders(bench.common, &configs)?, &attention)
}

/// CIS, without neighbours too, HShare, and what chooses anew every step.
fn fig7(budget: usize) -> Vec<Value> {
    let mut configs = vec![json!({"policy": "quest", "budget": budget, "dense_layers": 0})];
    configs.push(json!({"policy": "double-sparsity", "budget": budget, "dense_layers": 0}));
    for [layers, heads, queries] in HSHARE {
        configs.push(json!({
            "policy": "hshare", "budget": budget, "layers": layers, "heads": heads, "queries": queries
        }));
    }
    for block in BLOCKS {
        let cis = |name: &str| json!({"policy": name, "budget": budget, "block": block, "certified": true});
        configs.push(cis("cis"));
        configs.push(cis("cis-star"));
        let mut alone = cis("cis");
        alone["dilated"] = json!(0.0);
        configs.push(alone);
    }
    configs
}

/// CIS by how many bring their neighbours along.
fn fig8(budget: usize) -> Vec<Value> {
    let cis = |dilated: f64, radius: usize| {
        json!({
            "policy": "cis", "budget": budget, "dilated": dilated, "radius": radius
        })
    };
    let mut configs: Vec<Value> = DILATED.iter().map(|&dilated| cis(dilated, 1)).collect();
    configs.extend([2, 4].map(|radius| cis(1.0 / 3.0, radius)));
    configs
}
