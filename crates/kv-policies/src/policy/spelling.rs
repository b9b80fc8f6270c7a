//! How configurations spell the choices of kernels. A field of a kernel's type names the list of
//! its variants, as in `#[serde(with = "spelling::Key")]`.

use kv_kernels::{Dilation, Earlier, KeyRule, PageHeads, ScoreReduction, SimilarityReduction};
use serde::{Deserialize, Serialize};

/// KeepKV's rules for merged keys.
#[derive(Serialize, Deserialize)]
#[serde(remote = "KeyRule", rename_all = "kebab-case")]
pub(crate) enum Key {
    Paper,
    Additive,
    Votes,
    Mean,
}

/// The heads that choose pages.
#[derive(Serialize, Deserialize)]
#[serde(remote = "PageHeads", rename_all = "kebab-case")]
pub(crate) enum Choosers {
    Query,
    Max,
    Mean,
}

/// The steps that a step of CIS is compared with.
#[derive(Serialize, Deserialize)]
#[serde(remote = "Earlier", rename_all = "kebab-case")]
pub(crate) enum Compared {
    Any,
    Retrieved,
}

/// The steps of CIS that read neighbours.
#[derive(Serialize, Deserialize)]
#[serde(remote = "Dilation", rename_all = "kebab-case")]
pub(crate) enum Neighbours {
    #[serde(rename = "sharing")]
    Shared,
    All,
}

/// How CIS makes one score of a group's.
#[derive(Serialize, Deserialize)]
#[serde(remote = "ScoreReduction", rename_all = "kebab-case")]
pub(crate) enum GroupScore {
    Sum,
    Max,
}

/// How CIS makes one similarity of a group's.
#[derive(Serialize, Deserialize)]
#[serde(remote = "SimilarityReduction", rename_all = "kebab-case")]
pub(crate) enum GroupSimilarity {
    Mean,
    Min,
}
