//! Arguments of the kernels of count-sketches.

use cubecl::prelude::*;

/// The sketches of all ranges.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Sketch {
    /// Entries' keys, `[N, D]`, in vectors of 4.
    pub(crate) keys: Box<[Vector<f32, Const<4>>]>,
    /// Entries' values, `[N, D]`, in vectors of 4.
    pub(crate) values: Box<[Vector<f32, Const<4>>]>,
    /// A row of [`HEAD_FIELDS`](super::HEAD_FIELDS) numbers for each range, `[P, 6]`.
    pub(crate) heads: Box<[i32]>,
    /// Hash functions, `[P, buckets, 4]`, or a table of hashes, `[buckets, T]`.
    pub(crate) hashes: Box<[i32]>,
}

/// Tokens, and their keys and values.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct TokenRows<F: Float> {
    /// Indices of tokens, `[P, count]`, negative for none.
    pub(super) tokens: Box<[i32]>,
    /// `[P, count, D]`, in vectors of 4.
    pub(super) keys: Box<[Vector<F, Const<4>>]>,
    /// `[P, count, D]`, in vectors of 4.
    pub(super) values: Box<[Vector<F, Const<4>>]>,
    /// `P`
    pub(super) ranges: usize,
    /// Tokens of a range.
    pub(super) count: usize,
}
