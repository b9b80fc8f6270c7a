//! First and last tokens that are always kept.

use std::ops::Range;

use burn::tensor::Tensor;
use kv_core::{Budget, counted};

use crate::policy::notice::warn_once;
use crate::{PolicyError, Result};

/// First tokens that are kept where a policy's own choice would lose them: attention falls back on
/// them (StreamingLLM, section 3.1).
const FIRST: usize = 4;

/// The number of first tokens that a budget of `slots` slots protects by default.
pub(crate) fn first_tokens(slots: usize) -> usize {
    FIRST.min(slots / 4)
}

/// Sinks and recents within the `slots` that a `budget` resolves to.
///
/// A budget in tokens must hold what it protects. A share of a short prompt may resolve to less.
/// Then recents are cut to the slots that sinks leave, and sinks to a quarter of the slots or to
/// the slots that recents leave.
///
/// # Errors
/// [`PolicyError::ProtectedOverBudget`] for a budget in tokens.
pub(crate) fn fit_ends(
    policy: &'static str,
    budget: Budget,
    slots: usize,
    [sinks, recents]: [usize; 2],
) -> Result<[usize; 2]> {
    if sinks.saturating_add(recents) <= slots {
        return Ok([sinks, recents]);
    }
    if let Budget::Tokens(_) = budget {
        return Err(PolicyError::ProtectedOverBudget { policy, sinks, recents, budget: slots });
    }
    let first = sinks.min((slots / 4).max(slots.saturating_sub(recents)));
    let last = recents.min(slots - first);
    warn_once(policy, "ends", || {
        let [slots, sinks, recents] =
            [(slots, "slot"), (sinks, "sink"), (recents, "recent")].map(|(n, of)| counted(n, of));
        format!(
            "a budget of {slots} is below its {sinks} and {recents}: {first} and {last} are kept"
        )
    });
    Ok([first, last])
}

/// Warns that a policy looks at `window` last queries instead of `own`, as its budget of `slots` is
/// small.
pub(crate) fn warn_of_window(policy: &'static str, slots: usize, own: usize, window: usize) {
    warn_once(policy, "window", || {
        let first = match first_tokens(slots) {
            0 => String::new(),
            first => format!(", and keeps the first {}", counted(first, "token")),
        };
        let (slots, tokens) = (counted(slots, "slot"), counted(window, "token"));
        format!(
            "a budget of {slots} is less than twice its window of {own}: it observes the queries \
             of the last {tokens}{first} (`fit_window`)"
        )
    });
}

/// Scores `[B, Hkv, T]` with +∞ for the first and the last tokens.
pub(crate) fn protected(scores: Tensor<3>, sinks: usize, recents: usize) -> Tensor<3> {
    let [batch, heads, tokens] = scores.dims();
    let endless = |scores: Tensor<3>, range: Range<usize>| {
        if range.is_empty() {
            return scores;
        }
        let shape = [batch, heads, range.len()];
        let infinite = Tensor::full(shape, f32::INFINITY, (&scores.device(), scores.dtype()));
        scores.slice_assign([0..batch, 0..heads, range], infinite)
    };
    let scores = endless(scores, 0..sinks.min(tokens));
    endless(scores, tokens - recents..tokens)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_of_short_prompts_keep_both_ends() {
        let share = "0.25".parse().unwrap();
        for (slots, ends, expected) in [
            (100, [4, 64], [4, 64]),
            (15, [4, 64], [3, 12]),
            (15, [20, 4], [11, 4]),
            (3, [4, 8], [0, 3]),
            (0, [4, 8], [0, 0]),
        ] {
            assert_eq!(fit_ends("test", share, slots, ends).unwrap(), expected);
        }
        let error = fit_ends("test", Budget::Tokens(15), 15, [4, 64]).unwrap_err();
        assert!(matches!(error, PolicyError::ProtectedOverBudget { budget: 15, .. }), "{error}");
        let error = fit_ends("test", Budget::Tokens(1), 1, [1, 2]).unwrap_err().to_string();
        assert!(error.contains("1 sink and 2 recents exceed the budget of 1 slot;"), "{error}");
    }
}
