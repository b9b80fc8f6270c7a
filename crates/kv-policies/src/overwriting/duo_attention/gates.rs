//! Trained gates of key-value heads.

use serde::{Deserialize, Serialize};

use crate::Result;
use crate::policy::config::invalid;

/// One gate for every layer and key-value head, from 0 (streams) to 1 (retrieves).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Gates {
    /// A file as the authors publish them: a line a layer, its heads' gates separated by tabs. Read
    /// when the policy is built.
    File(String),
    /// `[layers][Hkv]`
    Lists(Vec<Vec<f64>>),
}

impl Gates {
    /// The gates, read from their file, each from 0 to 1.
    ///
    /// # Errors
    /// [`crate::PolicyError::InvalidConfig`] for files that cannot be read and numbers that are no
    /// gates.
    pub(super) fn read(self, policy: &'static str) -> Result<Self> {
        let invalid = |reason| invalid(policy, reason);
        let mut lists = match self {
            Self::Lists(lists) => lists,
            Self::File(path) => {
                let told = |reason: String| invalid(format!("`alpha`: {path}: {reason}"));
                let text = std::fs::read_to_string(&path).map_err(|e| told(e.to_string()))?;
                let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
                let rows = lines.map(|(number, line)| {
                    let gates = line.split_whitespace().map(|gate| {
                        let line = number + 1;
                        gate.parse::<f64>()
                            .map_err(|_| told(format!("line {line}: `{gate}` is no number")))
                    });
                    gates.collect()
                });
                rows.collect::<Result<Vec<Vec<f64>>>>()?
            }
        };
        let heads = lists.first().map_or(0, Vec::len);
        if heads == 0 || lists.iter().any(|list| list.len() != heads) {
            let reason = "`alpha` is no matrix of layers and heads";
            return Err(invalid(reason.into()));
        }
        if let Some(gate) = lists.iter().flatten().find(|gate| !gate.is_finite()) {
            return Err(invalid(format!("`alpha` holds {gate}, expected 0 to 1")));
        }
        lists.iter_mut().flatten().for_each(|gate| *gate = gate.clamp(0.0, 1.0));
        Ok(Self::Lists(lists))
    }

    /// The gates; none before they are read.
    pub(super) fn lists(&self) -> &[Vec<f64>] {
        match self {
            Self::Lists(lists) => lists,
            Self::File(_) => &[],
        }
    }

    /// Which heads have the `count` lowest gates of all; among equals the lower layer, then the
    /// lower head.
    pub(super) fn lowest(&self, count: usize) -> Vec<Vec<bool>> {
        let lists = self.lists();
        let heads = lists.iter().enumerate();
        let mut order: Vec<(f64, usize, usize)> = heads
            .flat_map(|(layer, list)| {
                list.iter().enumerate().map(move |(head, &gate)| (gate, layer, head))
            })
            .collect();
        order.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut lowest: Vec<Vec<bool>> = lists.iter().map(|list| vec![false; list.len()]).collect();
        order.iter().take(count).for_each(|&(_, layer, head)| lowest[layer][head] = true);
        lowest
    }
}
