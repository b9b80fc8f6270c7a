//! KeepKV's tables and figures.

pub(super) mod fig2;
mod predictors;
pub(super) mod quality;
mod sag;
pub(super) mod table1;
#[cfg(test)]
mod tests;

use serde_json::Value;

use crate::contenders::Contender;

/// Share kept.
const BUDGET: f64 = 0.2;

/// The contenders of some configurations.
///
/// # Errors
/// For configurations that the registry refuses.
fn contenders(configs: &[Value]) -> anyhow::Result<Vec<Contender>> {
    configs.iter().map(Contender::of).collect()
}
