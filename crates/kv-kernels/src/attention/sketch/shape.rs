//! The shape of a call. The choice of the kernel and the number of cubes depend on it.

/// The numbers of a call by which a kernel is chosen.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(not(feature = "gpu"), allow(dead_code, reason = "a CPU has no choice"))]
pub(crate) struct SketchShape {
    pub(crate) head_dim: usize,
    /// Bytes of an element.
    pub(crate) size: usize,
    /// Key-value heads of all sequences.
    pub(crate) total_kv_heads: usize,
    /// Query heads of a key-value head.
    pub(crate) group: usize,
    /// The most entries of a range's sketch.
    pub(crate) entries: usize,
    /// Buckets of the sketch: a token is the median of one entry of each.
    pub(crate) buckets: usize,
    /// The most slots and tokens of a range.
    pub(crate) longest: usize,
}
