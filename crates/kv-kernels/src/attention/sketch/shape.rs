//! A call's shape. It decides which kernel runs, and how many cubes.

/// What the choice of a kernel asks of a call.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(not(feature = "gpu"), allow(dead_code, reason = "a CPU has no choice"))]
pub(crate) struct SketchShape {
    pub(crate) head_dim: usize,
    /// Bytes of an element.
    pub(crate) size: usize,
    /// Key-value heads of all sequences.
    pub(crate) total_kv_heads: usize,
    /// Query heads of each.
    pub(crate) group: usize,
    /// Entries of a range's sketch, at most.
    pub(crate) entries: usize,
    /// Entries of which a token is the median.
    pub(crate) buckets: usize,
    /// Slots and tokens of a range, at most.
    pub(crate) longest: usize,
}
