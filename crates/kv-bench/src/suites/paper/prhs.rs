//! PrHS's tables and figures.

pub(crate) mod operator;
pub(super) mod overlap;
pub(super) mod quality;
#[cfg(test)]
mod tests;
pub(super) mod throughput;

use serde_json::{Value, json};

use crate::contenders::Contender;
use crate::options::Common;

/// The contenders that `--policy` names, behind the full cache, which is the first of them.
fn contenders(common: &Common, configs: &[Value]) -> anyhow::Result<Vec<Contender>> {
    let full = Contender::of(&configs[0])?;
    // Only what is asked for must be possible; names that the table lacks are refused beside all
    // that it has.
    let list = common.policy.as_deref();
    let names: Option<Vec<&str>> = list
        .map(|list| list.split(',').filter_map(|name| name.split_whitespace().next()).collect());
    let has = |name: &&str| configs.iter().any(|config| config["policy"] == *name);
    let names = names.filter(|names| !names.is_empty() && names.iter().all(has));
    let asked = |config: &&Value| {
        names.as_ref().is_none_or(|names| names.iter().any(|name| config["policy"] == *name))
    };
    let built = configs.iter().filter(asked).map(Contender::of);
    let built = built.collect::<anyhow::Result<Vec<_>>>()?;
    let mut chosen = common.chosen(built)?;
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
    json!({
        "policy": "hshare", "budget": budget, "layers": layers, "heads": heads, "queries": queries
    })
}

/// HShare's ratios of layers, heads and queries.
const HSHARE: [[f64; 3]; 2] = [[0.75, 0.75, 0.5], [0.5, 0.5, 0.5]];
