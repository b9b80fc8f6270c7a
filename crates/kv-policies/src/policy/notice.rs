//! Warnings that users get once, however many layers and prompts they concern.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use crate::Policy;

/// Whether a policy's warning `what` comes for the first time in this process.
fn is_first(policy: &'static str, what: &str) -> bool {
    static SAID: Mutex<BTreeSet<(&str, String)>> = Mutex::new(BTreeSet::new());
    SAID.lock().unwrap_or_else(PoisonError::into_inner).insert((policy, what.into()))
}

/// Logs a policy's warning `what`, once in this process.
///
/// `what` names the kind of warning; `message` has the numbers of the first one.
pub(crate) fn warn_once(
    policy: &'static str,
    what: &'static str,
    message: impl FnOnce() -> String,
) {
    if is_first(policy, what) {
        tracing::warn!("policy `{policy}`: {}", message());
    }
}

/// Logs a policy's warnings about a model of `layers` layers ([`Policy::warnings`]), such as that
/// it does nothing there. Each warning appears once in this process. Their target is
/// `kv_policies::remarks`, so that programs which show them elsewhere can leave them out of the
/// log.
pub fn warn_of_remarks(policy: &dyn Policy, layers: usize) {
    let name = policy.name();
    for remark in policy.warnings(layers).iter().filter(|remark| is_first(name, remark)) {
        tracing::warn!(target: "kv_policies::remarks", "policy `{name}`: {remark}");
    }
}
