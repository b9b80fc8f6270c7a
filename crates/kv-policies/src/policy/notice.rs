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

/// The number of tokens in an entry of a sketch. Where an entry has more, estimates vary more than
/// the keys and values do: the median of three sums has 0.448 of an entry's variance.
const CROWDED: f64 = 1.0 / 0.448;

/// What is wrong with a policy whose sketch cannot tell the tokens of a prompt of `prompt` tokens
/// apart; `None` for all others.
pub fn crowded_sketch(policy: &dyn Policy, prompt: usize) -> Option<String> {
    let load = policy.sketch_load(prompt).filter(|load| *load > CROWDED)?;
    Some(format!(
        "about {load:.0} tokens share an entry of the sketch, whose estimates are noise then; it \
         does not keep answers, and is here to be studied"
    ))
}

/// Logs a policy's warnings about a model of `layers` layers ([`Policy::warnings`]), such as that
/// it does nothing there, and about a prompt of `prompt` tokens ([`crowded_sketch`]). Each warning
/// appears once in this process. Their target is `kv_policies::remarks`, so that programs which
/// show them elsewhere can leave them out of the log.
pub fn warn_of_remarks(policy: &dyn Policy, layers: usize, prompt: usize) {
    let name = policy.name();
    let remarks = policy.warnings(layers).into_iter().filter(|remark| is_first(name, remark));
    // Its numbers differ from prompt to prompt.
    let crowded = crowded_sketch(policy, prompt).filter(|_| is_first(name, "crowded sketch"));
    for remark in remarks.chain(crowded) {
        tracing::warn!(target: "kv_policies::remarks", "policy `{name}`: {remark}");
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::crowded_sketch;
    use crate::build;

    #[test]
    fn sketches_that_many_tokens_share_are_remarked() {
        let remark = |config: Value| crowded_sketch(&*build(&config).unwrap(), 2_000);
        let sketch =
            |budget: Value| json!({"policy": "kvreviver", "vague": "sketch", "budget": budget});
        let remark_of_quarter = remark(sketch(json!(0.25))).unwrap();
        assert!(remark_of_quarter.starts_with("about 93 tokens share"), "{remark_of_quarter}");
        // The exact part holds all tokens of the prompt.
        assert_eq!(remark(sketch(json!(4_000))), None);
        for other in ["kvreviver", "h2o"] {
            assert_eq!(remark(json!({"policy": other, "budget": 0.25})), None);
        }
    }
}
