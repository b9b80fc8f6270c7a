//! What part of an output is graded.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use strum::{IntoStaticStr, VariantArray, VariantNames};

use crate::{UnknownName, text};

/// What part of an output is graded. The public harnesses cut the output before they grade it, and
/// each task says how.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    Hash,
    Serialize,
    Deserialize,
    IntoStaticStr,
    VariantArray,
    VariantNames,
)]
#[strum(serialize_all = "kebab-case")]
#[serde(try_from = "String", into = "String")]
pub enum Cut {
    /// The whole output.
    #[default]
    Whole,
    /// The output without white space at its ends.
    Trimmed,
    /// The first line after leading newlines. LongBench does this for TREC, TriviaQA, SAMSum and
    /// LSHT.
    FirstLine,
    /// The first line of the trimmed output, as lm-evaluation-harness does for CoQA.
    TrimmedFirstLine,
}

impl Cut {
    /// The part of `output` that is graded.
    pub fn apply(self, output: &str) -> &str {
        let first = |text: &'_ str| text.find('\n').unwrap_or(text.len());
        match self {
            Self::Whole => output,
            Self::Trimmed => text::strip(output),
            Self::FirstLine => {
                let rest = output.trim_start_matches('\n');
                &rest[..first(rest)]
            }
            Self::TrimmedFirstLine => {
                let rest = text::strip(output);
                &rest[..first(rest)]
            }
        }
    }

    /// Its name in task files.
    pub fn name(self) -> &'static str {
        self.into()
    }
}

impl fmt::Display for Cut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Cut {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        let found = <Self as VariantArray>::VARIANTS.iter().copied().find(|cut| cut.name() == name);
        found.ok_or_else(|| UnknownName::new("cut", name, <Self as VariantNames>::VARIANTS))
    }
}

impl TryFrom<String> for Cut {
    type Error = UnknownName;

    fn try_from(name: String) -> Result<Self, UnknownName> {
        name.parse()
    }
}

impl From<Cut> for String {
    fn from(cut: Cut) -> Self {
        cut.name().to_owned()
    }
}
