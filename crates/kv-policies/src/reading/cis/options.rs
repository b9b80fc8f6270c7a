//! CIS's options.

use kv_core::Budget;
use kv_kernels::{
    CisSelectOptions, CisStrategy, Dilation, Earlier, ScoreReduction, SetRule, Share,
    SimilarityReduction, SteerOptions,
};
use serde::{Deserialize, Serialize};

use crate::Result;
use crate::policy::check::Check;
use crate::policy::config::invalid;
use crate::policy::notice::warn_once;
use crate::policy::spelling;
use crate::reading::channels::Channels;
use crate::reading::set_parts::SetParts;

/// The vectors that two steps are compared by (table VII).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Similarity {
    /// Queries before RoPE, `q = x W_Q` (eq. 1 and 12).
    #[default]
    RawQuery,
    /// Queries after RoPE, as attention takes them.
    Query,
    /// Keys after RoPE.
    Key,
    /// Hidden states behind the layer's norm, `x` of eq. 1. Needs a model, or steps that bring
    /// them.
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

/// Options of CIS; the paper's by default.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CisOptions {
    /// `C`: tokens attended to per head, sinks and locals included, neighbours not.
    pub budget: Budget,
    /// `C_sink`; by default the root of half the budget: 8 of 128 and 16 of 512, as in the paper.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sinks: Option<usize>,
    /// `C_local`; by default four times the sinks: 32 of 128 and 64 of 512, as in the paper.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub recents: Option<usize>,
    /// `s`: tokens of a block, within which sets are shared; at most 1,024.
    pub block: usize,
    /// `τ`: cosine above which a set is shared; from 1 on never, from -1 down always.
    pub threshold: f32,
    /// Which earlier steps of the block are compared: any of them, as a step that shared hands its
    /// set on (section IV-A), or those that retrieved, the anchors of definition 3.2.
    #[serde(with = "spelling::Compared")]
    pub compared: Earlier,
    /// `w`: a retrieval takes the tokens of the highest attention summed over the last `w` queries,
    /// its own among them; 1 to 64, times the query heads of a set at most 64. Ours, but for 1. Not
    /// with a target, nor with the `max` of a group.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub vote: usize,
    /// Whether steps go on reading a token that leaves the locals, until the next retrieval. The
    /// token was no candidate of the last retrieval. At most `block − 1` tokens more are read.
    /// Ours.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub tail: bool,
    /// Channels of a key by which retrievals score it: a number of them, or up to 1 a share of the
    /// head dim, rounded up to a multiple of 4. A sixteenth is what table II counts. By default
    /// retrievals score whole keys. Not with a target.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub labels: Option<f64>,
    /// Calibrated channels for [`Self::labels`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub channels: Option<Channels>,
    /// The prompt's last tokens that choose channels, where none are calibrated; 64 by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window: Option<usize>,
    /// `m / k`: share of a retrieved set that brings its neighbours along, the best first.
    pub dilated: f32,
    /// `r`: neighbours on each side.
    pub radius: usize,
    /// Which steps read the neighbours of the best: steps that share a set, as neighbours make up
    /// for how far queries drift (eq. 13), or steps that retrieve a set, too.
    #[serde(with = "spelling::Neighbours")]
    pub neighbours: Dilation,
    /// What steps are compared by.
    pub similarity: Similarity,
    /// How similarities of a group become one.
    #[serde(with = "spelling::GroupSimilarity")]
    pub group_similarity: SimilarityReduction,
    /// Which heads have sets.
    pub sets: SetsOf,
    /// How scores of a group become one.
    #[serde(with = "spelling::GroupScore")]
    pub group_score: ScoreReduction,
    /// Accepted and ignored: certificates are computed outside of steps, for any options.
    #[serde(default, skip_serializing)]
    pub certified: bool,
    /// The share of the attention to tokens in sight that heads are to drop. `k` starts at the
    /// budget's number, and is raised or lowered until measured steps drop this share. Ours; steps
    /// are not recorded then. Not for CIS*, where a set's size fixes `k`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target: Option<f32>,
    /// The tokens between measured steps, which read all keys, where there is a target.
    #[serde(default = "usual_every", skip_serializing_if = "is_usual")]
    pub every: usize,
}

/// Ours.
fn usual_every() -> usize {
    5
}

fn one() -> usize {
    1
}

fn is_one(vote: &usize) -> bool {
    *vote == 1
}

fn is_usual(every: &usize) -> bool {
    *every == usual_every()
}

/// The most queries that choose a set together: as many as [`kv_kernels::cis_select`] scores by.
pub(super) const MOST_VOTERS: usize = 64;
/// How far `k` may be raised.
const MOST: usize = 8;
/// The most steps of a block: each may have a set of its own.
const LONGEST_BLOCK: usize = 1_024;
/// The share of a set's neighbours that are not in the set already, in the paper's CIS*: 16 of 48
/// (`k` of 72 for 88) and 44 of 258 (388 for 432).
const NEW_NEIGHBOURS: f32 = 0.25;
/// The relative change of `k` where a step drops twice the target.
const GAIN: f32 = 0.25;
/// Kernels read rows in vectors of so many numbers.
const LABELS_EACH: usize = 4;
/// As under Double Sparsity.
const LABEL_WINDOW: usize = 64;

impl CisOptions {
    /// The paper's `τ`.
    pub const THRESHOLD: f32 = 0.8;

    /// The paper's options.
    pub fn new(budget: Budget) -> Self {
        Self {
            budget,
            sinks: None,
            recents: None,
            block: 16,
            threshold: Self::THRESHOLD,
            compared: Earlier::Any,
            vote: 1,
            tail: false,
            labels: None,
            channels: None,
            window: None,
            dilated: 1.0 / 3.0,
            radius: 1,
            neighbours: Dilation::Shared,
            similarity: Similarity::default(),
            group_similarity: SimilarityReduction::Mean,
            sets: SetsOf::default(),
            group_score: ScoreReduction::Sum,
            certified: false,
            target: None,
            every: usual_every(),
        }
    }

    /// The options with their channels read from their file.
    ///
    /// # Errors
    /// [`crate::PolicyError::InvalidConfig`], [`crate::PolicyError::ProtectedOverBudget`].
    pub(crate) fn validated(self, policy: &'static str) -> Result<Self> {
        let Self { block, threshold, dilated, radius, .. } = self;
        self.budget.validate()?;
        let check = Check(policy);
        let blocks = 1..=LONGEST_BLOCK;
        check.that("block", block, blocks.contains(&block), &format!("1 to {LONGEST_BLOCK}"))?;
        if self.certified {
            warn_once(policy, "certified", || "`certified` has no effect any more".into());
        }
        check.that("recents", 0, self.recents != Some(0), "at least the newest token")?;
        check.that("threshold", threshold, threshold.is_finite(), "a cosine")?;
        check.that("dilated", dilated, (0.0..=1.0).contains(&dilated), "0 to 1")?;
        check.that("radius", radius, radius <= 64, "at most 64")?;
        let votes = (1..=MOST_VOTERS).contains(&self.vote);
        check.that("vote", self.vote, votes, &format!("1 to {MOST_VOTERS} queries"))?;
        let sums = self.group_score == ScoreReduction::Sum || !self.votes();
        check.that("vote", self.vote, sums, "1 where `group_score` is `max`")?;
        let alone = self.target.is_none() || !self.votes();
        check.that("vote", self.vote, alone, "1 where there is a `target`")?;
        if let Some(target) = self.target {
            let holds = target > 0.0 && target < 1.0;
            check.that("target", target, holds, "a share between 0 and 1")?;
        }
        check.positive("every", self.every)?;
        self.check_labels(policy)?;
        if let Budget::Tokens(budget) = self.budget {
            self.parts(policy, budget)?;
        }
        let channels = self.channels.map(|channels| channels.read(policy)).transpose()?;
        Ok(Self { channels, ..self })
    }

    fn check_labels(&self, policy: &'static str) -> Result<()> {
        let check = Check(policy);
        let Some(labels) = self.labels else {
            let given = [("channels", self.channels.is_some()), ("window", self.window.is_some())];
            return match given.into_iter().find(|(_, given)| *given) {
                Some((name, _)) => {
                    let reason = format!("`{name}` is there, expected none without `labels`");
                    Err(invalid(policy, reason))
                }
                None => Ok(()),
            };
        };
        let counts = labels > 0.0 && labels.is_finite() && (labels <= 1.0 || labels.fract() == 0.0);
        check.that(
            "labels",
            labels,
            counts,
            "a share above 0, up to 1, or a number of channels",
        )?;
        let alone = self.target.is_none();
        // Measured steps would take the attention of whole keys.
        check.that("labels", labels, alone, "none where there is a `target`")?;
        check.positive("window", self.label_window())
    }

    /// The channels by which retrievals score a key of `head_dim`, if not by all.
    pub(crate) fn label_count(&self, head_dim: usize) -> Option<usize> {
        let labels = self.labels?;
        let count = if labels <= 1.0 { labels * head_dim as f64 } else { labels };
        // The cast saturates; more channels than there are is an error where they are chosen.
        Some((count.ceil() as usize).min(1 << 16).next_multiple_of(LABELS_EACH))
    }

    /// The prompt's last tokens that choose channels.
    pub(crate) fn label_window(&self) -> usize {
        self.window.unwrap_or(LABEL_WINDOW)
    }

    /// Whether several queries choose a set.
    pub(crate) fn votes(&self) -> bool {
        self.vote > 1
    }

    /// Sets of a sequence.
    pub(crate) fn sets_of(&self, kv_heads: usize, query_heads: usize) -> usize {
        match self.sets {
            SetsOf::KvHeads => kv_heads,
            SetsOf::QueryHeads => query_heads,
        }
    }

    /// Sinks, recents, and `k` of a budget.
    pub(crate) fn parts(&self, policy: &'static str, budget: usize) -> Result<SetParts> {
        SetParts::of(policy, self.budget, budget, [self.sinks, self.recents])
    }

    /// The rule of a head with these parts. For CIS* (`star`), `k` starts near the paper's number.
    pub(crate) fn rule(&self, parts: SetParts, star: bool) -> SetRule {
        let (dilated, threshold) = (self.dilated, self.threshold);
        let SetParts { sinks, recents: locals, top } = parts;
        let wanted = star.then_some(top);
        let new = 2.0 * self.radius as f32 * dilated * NEW_NEIGHBOURS;
        let top = if star { ((top as f32 / (1.0 + new)) as usize).max(1) } else { top };
        SetRule { sinks, locals, top, dilated, threshold, wanted }
    }

    /// The most tokens that a retrieval by `rule` finds, of a head's `capacity`.
    pub(crate) fn most(&self, rule: SetRule, capacity: usize) -> usize {
        let top = rule.wanted.unwrap_or(rule.top);
        let most = if self.target.is_some() { top.saturating_mul(MOST) } else { top };
        most.min(capacity.max(1))
    }

    /// The most tokens of a set by `rule`.
    pub(crate) fn width(&self, rule: SetRule, capacity: usize) -> usize {
        let most = SetRule { top: self.most(rule, capacity), ..rule };
        most.width(self.radius).min(capacity.max(1))
    }

    /// How sizes are steered to the target, up to `most` tokens.
    pub(crate) fn steering(&self, most: usize) -> Option<SteerOptions> {
        self.target.map(|target| SteerOptions { target, gain: GAIN, most })
    }

    /// A step's options, where tokens below a share are out of sight.
    pub(crate) fn retrieval(&self, hidden: Share) -> CisSelectOptions {
        CisSelectOptions {
            scale: None,
            radius: self.radius,
            dilation: self.neighbours,
            block: self.block,
            earlier: self.compared,
            tail: self.tail,
            reduction: self.group_score,
            similarity: self.group_similarity,
            hidden,
            longest: None,
            measures: false,
            strategy: CisStrategy::Auto,
        }
    }
}
