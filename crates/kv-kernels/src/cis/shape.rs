//! The shape of a call. The choice of the kernels and the number of cubes depend on it.

/// The numbers of a call by which kernels are chosen.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(not(feature = "gpu"), allow(dead_code, reason = "a CPU has no choice"))]
pub(crate) struct CisShape {
    pub(crate) head_dim: usize,
    /// Head ranges, `P = B * Hkv`.
    pub(crate) total_kv_heads: usize,
    /// Query heads of a key-value head.
    pub(crate) group: usize,
    /// The most slots of a range.
    pub(crate) longest: usize,
    /// Sets that a range has room for, and the most tokens of a set.
    pub(crate) sets: usize,
    pub(crate) width: usize,
    /// Whether steps share sets.
    pub(crate) shares: bool,
    /// Whether all ranges are scored, for their log-sum-exps.
    pub(crate) measures: bool,
    /// The most slots that are attended to, where the call attends.
    pub(crate) attends: Option<usize>,
}
