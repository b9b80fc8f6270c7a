//! PrHS, figures 7 and 8: what is read of real prompts, its attention mass and how much of it are
//! tokens of most attention, by retrieval ratio and by how many tokens bring their neighbours
//! along.

use serde_json::{Value, json};

use super::contenders;
use crate::args::{Figure, Paper};
use crate::bench::ModelBench;
use crate::options::Attention;
use crate::record::FULL;
use crate::suites::attention;

/// The paper's budgets.
const BUDGETS: [usize; 2] = [128, 512];
/// Steps of a block, at the paper's threshold.
const BLOCKS: [usize; 3] = [8, 16, 32];
/// Steps of a block that all share, whatever their queries, for ever fewer retrievals: 0.25 to
/// 0.0625 of the steps.
const SHARED_BLOCKS: [usize; 4] = [4, 6, 12, 16];
/// HShare's shares of heads and of queries, for as many retrievals. Layers are seen by themselves.
const HSHARE: [[f64; 2]; 5] = [[0.75, 0.5], [0.5, 0.5], [0.75, 0.25], [0.375, 0.25], [0.5, 0.125]];
/// Shares of a set that bring their neighbours along.
const DILATED: [f64; 5] = [0.0, 1.0 / 6.0, 1.0 / 3.0, 2.0 / 3.0, 1.0];
/// Prompts and decode steps.
const SIZE: (usize, usize) = (8, 128);
const QUICK_SIZE: (usize, usize) = (1, 24);

/// Runs one of them.
///
/// # Errors
/// Where a policy or the device refuses.
pub(crate) fn run(bench: &mut ModelBench<'_>, options: &Paper) -> anyhow::Result<()> {
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
        lengths: options.lengths.clone(),
        certificates: true,
        ..Attention::default()
    };
    attention::measure(bench, &contenders(&bench.common, &configs)?, &attention)
}

/// CIS, without neighbours too, HShare, and what chooses anew every step.
fn fig7(budget: usize) -> Vec<Value> {
    let mut configs = vec![json!({"policy": "quest", "budget": budget, "dense_layers": 0})];
    configs.push(json!({"policy": "double-sparsity", "budget": budget, "dense_layers": 0}));
    for [heads, queries] in HSHARE {
        configs.push(json!({
            "policy": "hshare", "budget": budget, "layers": 1.0, "heads": heads, "queries": queries
        }));
    }
    let similar = BLOCKS.map(|block| (block, None));
    let all = SHARED_BLOCKS.map(|block| (block, Some(-1.0)));
    for (block, threshold) in similar.into_iter().chain(all) {
        let mut cis = json!({"policy": "cis", "budget": budget, "block": block});
        if let Some(threshold) = threshold {
            cis["threshold"] = json!(threshold);
        }
        let (mut star, mut alone) = (cis.clone(), cis.clone());
        star["policy"] = json!("cis-star");
        // Of the budget's size exactly.
        alone["dilated"] = json!(0.0);
        configs.extend([cis, star, alone]);
    }
    configs
}

/// CIS, and CIS* as in the paper, by how many bring their neighbours along.
fn fig8(budget: usize) -> Vec<Value> {
    let of = |name: &str| {
        let cis = |dilated: f64, radius: usize| {
            json!({
                "policy": name, "budget": budget, "dilated": dilated, "radius": radius
            })
        };
        let mut configs: Vec<Value> = DILATED.iter().map(|&dilated| cis(dilated, 1)).collect();
        configs.extend([2, 4].map(|radius| cis(1.0 / 3.0, radius)));
        configs
    };
    ["cis", "cis-star"].map(of).concat()
}
