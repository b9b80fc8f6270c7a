//! KeepKV's tables and figures.

pub(super) mod fig2;
mod predictors;
pub(super) mod quality;
mod sag;
pub(super) mod table1;
#[cfg(test)]
mod tests;

use kv_policies::PolicyError;
use serde_json::Value;

use crate::contenders::Contender;
use crate::run::Bench;

/// Share kept.
const BUDGET: f64 = 0.2;

/// The contenders of some configurations. Those that this build's registry does not know are left out,
/// and a note says so.
///
/// # Errors
/// For configurations that the registry refuses for another reason.
fn known(bench: &mut Bench<'_>, configs: &[Value]) -> anyhow::Result<Vec<Contender>> {
    let mut contenders = Vec::new();
    for config in configs {
        let error = match Contender::of(config) {
            Ok(contender) => {
                contenders.push(contender);
                continue;
            }
            Err(error) => error,
        };
        match unknown(&error) {
            Some(what) => bench.note(format!("left out: {what} is unknown here")),
            None => return Err(error),
        }
    }
    Ok(contenders)
}

/// The policy or the parameter that the registry does not know, if that is what is wrong.
fn unknown(error: &anyhow::Error) -> Option<String> {
    match error.downcast_ref()? {
        PolicyError::UnknownPolicy { name, .. } => Some(format!("policy `{name}`")),
        PolicyError::InvalidConfig { policy, reason } => {
            let marks = ["unknown field `", "unknown parameter `"];
            let rest = marks.iter().find_map(|mark| reason.strip_prefix(mark))?;
            let (parameter, _) = rest.split_once('`')?;
            Some(format!("`{parameter}` of policy `{policy}`"))
        }
        _ => None,
    }
}
