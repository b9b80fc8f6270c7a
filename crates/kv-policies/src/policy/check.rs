//! Checks of a policy's parameters. An error names the parameter, its value and the values
//! that it may have.

use std::fmt::Display;

use super::config::invalid;
use crate::Result;

/// Checks parameters of the policy of this name.
pub(crate) struct Check<'a>(pub(crate) &'a str);

impl Check<'_> {
    /// Refuses a value for which a condition does not hold. `expected` says the condition.
    pub(crate) fn that(
        &self,
        name: &str,
        value: impl Display,
        holds: bool,
        expected: &str,
    ) -> Result<()> {
        match holds {
            true => Ok(()),
            false => Err(invalid(self.0, format!("`{name}` is {value}, expected {expected}"))),
        }
    }

    /// Refuses a count of 0.
    pub(crate) fn positive(&self, name: &str, count: usize) -> Result<()> {
        self.that(name, count, count > 0, "at least 1")
    }

    /// Refuses a number outside 0 to 1.
    pub(crate) fn share(&self, name: &str, share: f64) -> Result<()> {
        self.that(name, share, (0.0..=1.0).contains(&share), "0 to 1")
    }
}
