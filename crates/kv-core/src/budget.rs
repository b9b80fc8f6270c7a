use std::fmt;
use std::str::FromStr;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::{Error, Result};

/// How much of a cache to keep: slots per key-value head and layer, sinks and recents included.
///
/// In configurations a whole number is a token count and a number with a point is a ratio: `512`,
/// `0.25`, `1` for one token, `1.0` for all of them. (`512.0` is a token count too.)
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Budget {
    /// A number of tokens.
    Tokens(usize),
    /// A share of the prompt's tokens, in `(0, 1]`.
    Ratio(f64),
}

impl Budget {
    /// The budget in tokens for a prompt of `tokens` tokens: the only place where a ratio becomes a
    /// count. Ratios round down (`floor(tokens * ratio)`, as kvpress does), but keep at least one
    /// token; a budget beyond the prompt means keep all of it.
    pub fn resolve(&self, tokens: usize) -> usize {
        match *self {
            Self::Tokens(count) => count.min(tokens),
            Self::Ratio(ratio) => ((tokens as f64 * ratio) as usize).clamp(1, tokens.max(1)),
        }
    }

    /// The budget in tokens of the steps behind a prompt of `tokens` tokens: a share of the prompt,
    /// or a number of tokens that does not depend on it, as caches fill up behind short prompts.
    pub fn behind(&self, tokens: usize) -> usize {
        match *self {
            Self::Tokens(count) => count,
            Self::Ratio(_) => self.resolve(tokens),
        }
    }

    /// Checks that something is left to keep.
    ///
    /// # Errors
    /// [`Error::InvalidBudget`] for 0 tokens, for 2³¹ and more, and for ratios outside `(0, 1]`.
    pub fn validate(&self) -> Result<()> {
        let reason = match *self {
            Self::Tokens(0) => "at least one token must be kept",
            // Slot indices are 32-bit.
            Self::Tokens(count) if i32::try_from(count).is_err() => {
                "at most 2147483647 tokens can be kept"
            }
            Self::Ratio(ratio) if !(ratio > 0.0 && ratio <= 1.0) => {
                "a share must be above 0 and at most 1, a number of tokens at least 1"
            }
            _ => return Ok(()),
        };
        // As it was given.
        let budget = match *self {
            Self::Tokens(count) => count.to_string(),
            Self::Ratio(ratio) => ratio.to_string(),
        };
        Err(Error::InvalidBudget { budget, reason: reason.to_string() })
    }
}

impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tokens(count) => write!(f, "{count}"),
            Self::Ratio(ratio) => write!(f, "{:.1} %", ratio * 100.0),
        }
    }
}

impl Serialize for Budget {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        match *self {
            Self::Tokens(count) => serializer.serialize_u64(count as u64),
            Self::Ratio(ratio) => serializer.serialize_f64(ratio),
        }
    }
}

impl<'de> Deserialize<'de> for Budget {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Number {
            Whole(usize),
            Real(f64),
        }
        let expected = || D::Error::custom("a budget is a number such as 512 or 0.25");
        let budget = match Number::deserialize(deserializer).map_err(|_| expected())? {
            Number::Whole(count) => Self::Tokens(count),
            Number::Real(number) => return Self::try_from(number).map_err(D::Error::custom),
        };
        budget.validate().map_err(D::Error::custom)?;
        Ok(budget)
    }
}

impl TryFrom<f64> for Budget {
    type Error = Error;

    fn try_from(number: f64) -> Result<Self> {
        let budget = if number > 1.0 && number.fract() == 0.0 {
            Self::Tokens(number as usize)
        } else if number == 0.0 {
            Self::Tokens(0)
        } else {
            Self::Ratio(number)
        };
        budget.validate().map_err(|error| match error {
            // Larger than a `usize`, it would be named as the largest one.
            Error::InvalidBudget { reason, .. } if number >= usize::MAX as f64 => {
                Error::InvalidBudget { budget: format!("{number:e}"), reason }
            }
            error => error,
        })?;
        Ok(budget)
    }
}

impl From<Budget> for f64 {
    fn from(budget: Budget) -> Self {
        match budget {
            Budget::Tokens(count) => count as f64,
            Budget::Ratio(ratio) => ratio,
        }
    }
}

impl FromStr for Budget {
    type Err = Error;

    /// `1` is one token; `1.0`, like every number with a point, is a ratio.
    fn from_str(text: &str) -> Result<Self> {
        let budget = match (text.parse::<usize>(), text.parse::<f64>()) {
            (Ok(count), _) => Self::Tokens(count),
            (_, Ok(ratio)) => Self::Ratio(ratio),
            _ => {
                return Err(Error::InvalidBudget {
                    budget: text.to_string(),
                    reason: "expected a token count such as 512 or a ratio such as 0.25".into(),
                });
            }
        };
        // A message names what was written, not the number that it was read as.
        budget.validate().map_err(|error| match error {
            Error::InvalidBudget { reason, .. } => {
                Error::InvalidBudget { budget: text.to_string(), reason }
            }
            error => error,
        })?;
        Ok(budget)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_round_down_but_keep_one() {
        assert_eq!(Budget::Ratio(0.25).resolve(1001), 250);
        assert_eq!(Budget::Ratio(0.1).resolve(3), 1);
        assert_eq!(Budget::Ratio(1.0).resolve(7), 7);
    }

    #[test]
    fn a_budget_beyond_the_prompt_keeps_all() {
        assert_eq!(Budget::Tokens(512).resolve(100), 100);
    }

    #[test]
    fn text_and_numbers() {
        assert_eq!("512".parse::<Budget>().unwrap(), Budget::Tokens(512));
        assert_eq!("1".parse::<Budget>().unwrap(), Budget::Tokens(1));
        assert_eq!("0.25".parse::<Budget>().unwrap(), Budget::Ratio(0.25));
        for wrong in ["0", "0.0", "-3", "1.5", "nan", "many"] {
            assert!(wrong.parse::<Budget>().is_err(), "{wrong}");
        }
        assert_eq!(serde_json::from_str::<Budget>("0.5").unwrap(), Budget::Ratio(0.5));
        for wrong in ["0", "-1", "1.5", "\"many\""] {
            assert!(serde_json::from_str::<Budget>(wrong).is_err(), "{wrong}");
        }
        for budget in [Budget::Tokens(1), Budget::Ratio(1.0), Budget::Tokens(512)] {
            let text = serde_json::to_string(&budget).unwrap();
            assert_eq!(serde_json::from_str::<Budget>(&text).unwrap(), budget, "{text}");
        }
    }

    #[test]
    fn messages_name_what_was_written() {
        for wrong in ["-1", "0", "1.5", "-0.5"] {
            let error = wrong.parse::<Budget>().unwrap_err().to_string();
            assert!(error.contains(&format!("budget {wrong}:")), "{error}");
        }
        let error = serde_json::from_str::<Budget>("1e30").unwrap_err().to_string();
        assert!(error.contains("budget 1e30: at most"), "{error}");
    }
}
