//! CIS's options.

use kv_core::{
    Budget, RetrieveOptions, ScoreReduction, SetRule, Share, SimilarityReduction, SteerOptions,
};
use serde::{Deserialize, Serialize};

use crate::{PolicyError, Result};

/// What two steps are compared by (table VII).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Similarity {
    /// Queries after RoPE, as attention takes them (equation 12).
    #[default]
    Query,
    /// Queries before RoPE; ours.
    RawQuery,
    /// Keys after RoPE.
    Key,
    /// Hidden states that a layer projects, before its norm. Needs a model, or steps that bring them.
    Hidden,
}

/// Which heads have a set of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SetsOf {
    /// Key-value heads: a group reads its slots once.
    #[default]
    KvHeads,
    /// Query heads, as where keys are repeated for them.
    QueryHeads,
}

/// How a group's scores or similarities become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GroupScore {
    /// The sum of attention weights.
    #[default]
    Sum,
    /// The largest of them.
    Max,
}

/// How a group's similarities become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GroupSimilarity {
    /// Their mean.
    #[default]
    Mean,
    /// The least of them.
    Min,
}

/// Options of CIS; the paper's by default.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CisOptions {
    /// `C`: tokens attended to per head, sinks and locals included, neighbours not.
    pub budget: Budget,
    /// `C_sink`; by default the root of half the budget: 8 of 128 and 16 of 512, as in the paper.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sinks: Option<usize>,
    /// `C_local`; by default four times the sinks: 32 of 128 and 64 of 512, as in the paper.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recents: Option<usize>,
    /// `s`: tokens of a block, within which sets are shared.
    #[serde(default = "block")]
    pub block: usize,
    /// `τ`: cosine above which a set is shared; from 1 on never, from -1 down always.
    #[serde(default = "threshold")]
    pub threshold: f32,
    /// `m / k`: share of a retrieved set that brings its neighbours along, the best first.
    #[serde(default = "dilated")]
    pub dilated: f32,
    /// `r`: neighbours on each side.
    #[serde(default = "radius")]
    pub radius: usize,
    /// What steps are compared by.
    #[serde(default)]
    pub similarity: Similarity,
    /// How similarities of a group become one.
    #[serde(default)]
    pub group_similarity: GroupSimilarity,
    /// Which heads have sets.
    #[serde(default)]
    pub sets: SetsOf,
    /// How scores of a group become one.
    #[serde(default)]
    pub group_score: GroupScore,
    /// Whether steps note what certificates take, see [`crate::certificates`].
    #[serde(default)]
    pub certified: bool,
    /// The share of attention that heads are to drop: `k`, which begins with the budget's, is raised and lowered
    /// until measured steps do. Ours; steps are not recorded then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<f32>,
    /// Every how many tokens a step is measured, which reads all keys, where there is a target.
    #[serde(default = "every", skip_serializing_if = "is_usual")]
    pub every: usize,
}

fn every() -> usize {
    5
}

fn is_usual(every_so: &usize) -> bool {
    *every_so == every()
}

/// How far `k` may be raised.
const MOST: usize = 8;
/// By how much it is changed where twice the target is dropped.
const GAIN: f32 = 0.25;

fn block() -> usize {
    16
}

fn threshold() -> f32 {
    0.8
}

fn dilated() -> f32 {
    1.0 / 3.0
}

fn radius() -> usize {
    1
}

/// A budget's parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CisParts {
    pub(crate) sinks: usize,
    pub(crate) recents: usize,
    /// `k`
    pub(crate) top: usize,
}

impl CisOptions {
    /// The paper's options.
    pub fn new(budget: Budget) -> Self {
        Self {
            budget,
            sinks: None,
            recents: None,
            block: block(),
            threshold: threshold(),
            dilated: dilated(),
            radius: radius(),
            similarity: Similarity::default(),
            group_similarity: GroupSimilarity::default(),
            sets: SetsOf::default(),
            group_score: GroupScore::default(),
            certified: false,
            target: None,
            every: every(),
        }
    }

    pub(crate) fn validate(&self, policy: &'static str) -> Result<()> {
        let invalid =
            |reason: String| Err(PolicyError::InvalidConfig { policy: policy.into(), reason });
        self.budget.validate()?;
        if self.block == 0 {
            return invalid("`block` is 0, expected at least 1".into());
        }
        if self.recents == Some(0) {
            return invalid("`recents` is 0, expected at least the newest token".into());
        }
        if self.threshold.is_nan() {
            return invalid("`threshold` is NaN, expected a cosine".into());
        }
        if !(0.0..=1.0).contains(&self.dilated) {
            return invalid(format!("`dilated` is {}, expected 0 to 1", self.dilated));
        }
        if self.radius > 64 {
            return invalid(format!("`radius` is {}, expected at most 64", self.radius));
        }
        if let Some(target) = self.target.filter(|target| !(*target > 0.0 && *target < 1.0)) {
            return invalid(format!("`target` is {target}, expected a share between 0 and 1"));
        }
        if self.every == 0 {
            return invalid("`every` is 0, expected at least 1".into());
        }
        if let Budget::Tokens(budget) = self.budget {
            self.parts(policy, budget)?;
        }
        Ok(())
    }

    /// Sinks, recents, and `k` of a budget.
    pub(crate) fn parts(&self, policy: &'static str, budget: usize) -> Result<CisParts> {
        // A root of half, so that both of the paper's budgets come out.
        let usual = (budget / 2).isqrt();
        let sinks = self.sinks.unwrap_or(usual);
        let left = budget.saturating_sub(sinks + 1);
        let recents = self.recents.unwrap_or((4 * usual).min(left).max(1));
        if self.sinks.is_some() || self.recents.is_some() {
            PolicyError::check_protected(policy, sinks, recents, budget)?;
        }
        // At least one token in between, however small the budget.
        let top = budget.saturating_sub(sinks + recents).max(1);
        Ok(CisParts { sinks, recents, top })
    }

    /// What a range of such parts retrieves; `wanted` as [`SetRule`] has it.
    pub(crate) fn rule(&self, parts: CisParts, star: bool) -> SetRule {
        let (dilated, threshold) = (self.dilated, self.threshold);
        let CisParts { sinks, recents: locals, top } = parts;
        SetRule { sinks, locals, top, dilated, threshold, wanted: star.then_some(top) }
    }

    /// The most tokens of a set of such a rule.
    pub(crate) fn width(&self, rule: SetRule) -> usize {
        let most = if self.target.is_some() { MOST * rule.top } else { rule.top };
        SetRule { top: most, ..rule }.width(self.radius)
    }

    /// Where sizes are steered to, in sets of so many tokens.
    pub(crate) fn steering(&self, width: usize) -> Option<SteerOptions> {
        // As many as leave room for their neighbours.
        let each = 1.0 + 2.0 * self.radius as f32 * self.dilated;
        let most = ((width as f32 / each) as usize).max(1);
        self.target.map(|target| SteerOptions { target, gain: GAIN, most })
    }

    /// A step's options, where tokens below a share are out of sight.
    pub(crate) fn retrieval(&self, hidden: Share) -> RetrieveOptions {
        RetrieveOptions {
            scale: None,
            radius: self.radius,
            block: self.block,
            reduction: match self.group_score {
                GroupScore::Sum => ScoreReduction::Sum,
                GroupScore::Max => ScoreReduction::Max,
            },
            similarity: match self.group_similarity {
                GroupSimilarity::Mean => SimilarityReduction::Mean,
                GroupSimilarity::Min => SimilarityReduction::Min,
            },
            hidden,
            certified: self.certified,
            longest: None,
        }
    }
}
