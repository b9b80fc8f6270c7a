//! PrHS's tables and figures.

pub(crate) mod operator;
pub(super) mod overlap;
pub(super) mod quality;
#[cfg(test)]
mod tests;
pub(super) mod throughput;

use serde_json::{Value, json};

use crate::args::Common;
use crate::contenders::Contender;

/// The full cache, which is the first of them, and those of the others that `--policy` names.
fn contenders(common: &Common, configs: &[Value]) -> anyhow::Result<Vec<Contender>> {
    let all = configs.iter().map(Contender::of).collect::<anyhow::Result<Vec<_>>>()?;
    let full = all[0].clone();
    let mut chosen = common.chosen(all)?;
    if chosen[0].label != full.label {
        chosen.insert(0, full);
    }
    Ok(chosen)
}

/// CIS of a budget and block.
fn cis(name: &str, budget: &Value, block: usize) -> Value {
    json!({"policy": name, "budget": budget, "block": block})
}

/// HShare with one of the paper's two ratios.
fn hshare(budget: &Value, [layers, heads, queries]: [f64; 3]) -> Value {
    json!({"policy": "hshare", "budget": budget, "layers": layers, "heads": heads, "queries": queries})
}

/// HShare's ratios of layers, heads and queries.
const HSHARE: [[f64; 3]; 2] = [[0.75, 0.75, 0.5], [0.5, 0.5, 0.5]];
