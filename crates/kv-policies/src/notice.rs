//! What users are told once, however many layers and prompts it concerns.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

/// Warns of something about a policy, the first time that it is said in this process.
///
/// `what` names the kind of thing; `message` has the numbers of the first time.
pub(crate) fn warn_once(
    policy: &'static str,
    what: &'static str,
    message: impl FnOnce() -> String,
) {
    static SAID: Mutex<BTreeSet<(&str, &str)>> = Mutex::new(BTreeSet::new());
    let first = SAID.lock().unwrap_or_else(PoisonError::into_inner).insert((policy, what));
    if first {
        tracing::warn!("policy `{policy}`: {}", message());
    }
}

/// Warns that a policy looks at `window` last queries instead of `own`, as its budget of `slots` is small.
pub(crate) fn warn_of_window(policy: &'static str, slots: usize, own: usize, window: usize) {
    warn_once(policy, "window", || {
        format!(
            "a budget of {slots} slots is less than twice its window of {own}: it observes the last {window} \
             queries, and keeps first tokens beside them (`fit_window`)"
        )
    });
}
