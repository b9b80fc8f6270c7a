//! The first and last tokens that BalanceKV and uniform sampling keep exactly.

use kv_core::Budget;

use crate::Result;
use crate::policy::ends::fit_ends;

/// Tokens that the paper's single-layer experiments keep exactly at either end of a prompt
/// (section 4.1). Its long-context runs keep 32 and 32.
const PAPER: usize = 256;

/// Sinks and recents of the `slots` that a budget resolves to: the configured numbers, or else the
/// paper's, each cut to a quarter of the slots so that small budgets still sample.
///
/// # Errors
/// [`crate::PolicyError::ProtectedOverBudget`].
pub(crate) fn exact_ends(
    policy: &'static str,
    configured: [Option<usize>; 2],
    budget: Budget,
    slots: usize,
) -> Result<[usize; 2]> {
    let ends = configured.map(|count| count.unwrap_or(PAPER.min(slots / 4)));
    fit_ends(policy, budget, slots, ends)
}
