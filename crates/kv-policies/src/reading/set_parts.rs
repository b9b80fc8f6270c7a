//! How a budget of tokens that a step reads is divided (PrHS, section V).

use kv_core::{Budget, counted};

use crate::Result;
use crate::policy::config::invalid;
use crate::policy::ends::fit_ends;

/// The parts of what a head reads in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SetParts {
    /// `C_sink`: first tokens.
    pub(crate) sinks: usize,
    /// `C_local`: last tokens.
    pub(crate) recents: usize,
    /// `k`: tokens chosen between them.
    pub(crate) top: usize,
}

impl SetParts {
    /// The parts of the `tokens` that a `budget` has come to, where `sinks` and `recents` may be
    /// given.
    ///
    /// By default `C_sink = sqrt(tokens / 2)` and `C_local = 4 C_sink`. That gives the paper's
    /// numbers at both budgets that it names: 8, 32 and `k = 88` of 128, and 16, 64 and `k = 432`
    /// of 512. At least one token is chosen, however small the budget.
    ///
    /// # Errors
    /// [`crate::PolicyError::ProtectedOverBudget`] where `sinks` or `recents` are given and a
    /// budget in tokens does not hold them.
    pub(crate) fn of(
        policy: &'static str,
        budget: Budget,
        tokens: usize,
        [sinks, recents]: [Option<usize>; 2],
    ) -> Result<Self> {
        let usual = (tokens / 2).isqrt();
        let left = |sinks: usize| tokens.saturating_sub(sinks.saturating_add(1));
        let usual_recents = |sinks: usize| (4 * usual).min(left(sinks)).max(1);
        let wanted = sinks.unwrap_or(usual);
        let ends = [wanted, recents.unwrap_or(usual_recents(wanted))];
        let [sinks, recents] = match (sinks, recents) {
            (None, None) => ends,
            _ if matches!(budget, Budget::Tokens(_))
                && ends[0].saturating_add(ends[1]) == tokens =>
            {
                let [sinks, recents] =
                    [(ends[0], "sink"), (ends[1], "recent")].map(|(count, of)| counted(count, of));
                let slots = counted(tokens, "slot");
                let reason = format!("{sinks} and {recents} leave none of {slots} to choose");
                return Err(invalid(policy, reason));
            }
            _ => fit_ends(policy, budget, tokens, ends)?,
        };
        let top = tokens.saturating_sub(sinks.saturating_add(recents)).max(1);
        Ok(Self { sinks, recents: recents.max(1), top })
    }
}

#[cfg(test)]
mod tests {
    use kv_core::Budget;

    use super::SetParts;

    fn parts(tokens: usize) -> SetParts {
        SetParts::of("test", Budget::Tokens(tokens), tokens, [None, None]).unwrap()
    }

    #[test]
    fn the_papers_budgets() {
        for (budget, sinks, recents, top) in [(128, 8, 32, 88), (512, 16, 64, 432)] {
            assert_eq!(parts(budget), SetParts { sinks, recents, top });
        }
    }

    #[test]
    fn small_budgets_have_parts_too() {
        for budget in 0..20 {
            let parts = parts(budget);
            assert!(parts.recents >= 1 && parts.top >= 1, "{budget}: {parts:?}");
            let total = parts.sinks + parts.recents + parts.top;
            assert!(total == budget || budget < 3, "{budget}: {parts:?}");
        }
    }
}
