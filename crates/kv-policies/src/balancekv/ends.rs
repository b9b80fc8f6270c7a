use crate::{PolicyError, Result};

/// Tokens that the paper keeps exactly at either end of a prompt.
const PAPER: usize = 256;

/// Sinks and recents of a budget: as configured, else the paper's, cut to a quarter of the budget
/// each so that small budgets still sample.
///
/// # Errors
/// [`PolicyError::ProtectedOverBudget`].
pub(crate) fn exact_ends(
    policy: &'static str,
    configured: [Option<usize>; 2],
    budget: usize,
) -> Result<[usize; 2]> {
    let [sinks, recents] = configured.map(|count| count.unwrap_or(PAPER.min(budget / 4)));
    PolicyError::check_protected(policy, sinks, recents, budget)?;
    Ok([sinks, recents])
}
