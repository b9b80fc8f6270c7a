//! A call's shape. It decides which kernel runs, and how many cubes.

/// What the choice of the kernels asks of a call.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(not(feature = "gpu"), allow(dead_code, reason = "a CPU has no choice"))]
pub(crate) struct CisShape {
    pub(crate) head_dim: usize,
    /// Ranges.
    pub(crate) total_kv_heads: usize,
    /// Query heads of a range.
    pub(crate) group: usize,
    /// Slots of a range, at most.
    pub(crate) longest: usize,
    /// Sets that a range remembers, and tokens of a set, at most.
    pub(crate) sets: usize,
    pub(crate) width: usize,
    /// Whether steps share sets.
    pub(crate) shares: bool,
    /// Whether all ranges are scored.
    pub(crate) measures: bool,
    /// Slots that are attended to, at most, where the call attends.
    pub(crate) attends: Option<usize>,
}
