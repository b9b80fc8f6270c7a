//! What a policy changes in a prompt's own computation, layer by layer.

use kv_kernels::Share;
use std::ops::Range;

use serde::{Deserialize, Serialize};

/// The tokens of a prompt that a layer's queries see: the first ones, and all from a share of the
/// tokens so far on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VisibleWindow {
    /// Query `i` sees the tokens from [`Share::first_seen`] of `i` on.
    pub from: Share,
    /// First tokens that every query sees.
    pub sinks: usize,
}

/// Tokens of a prompt that a layer passes on as they are: it computes none of their queries, no
/// attention and no MLP.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FrozenTokens {
    /// The indices of the frozen tokens. The last token is never frozen.
    pub tokens: Range<usize>,
    /// Where the frozen tokens' keys and values come from; other tokens attend to them.
    pub reuse: Reuse,
}

/// Where the keys and values of frozen tokens come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reuse {
    /// The layer projects them from the hidden states that it reuses.
    #[default]
    Hidden,
    /// The layer takes the keys and values of the layer below.
    KeysValues,
}
