//! PrHS's tables and figures.

pub(crate) mod operator;
pub(super) mod overlap;
pub(super) mod quality;
#[cfg(test)]
mod tests;
pub(super) mod throughput;

use serde_json::{Value, json};

use crate::contenders::Contender;

fn contenders(configs: &[Value]) -> anyhow::Result<Vec<Contender>> {
    configs.iter().map(Contender::of).collect()
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
