//! What kernels leave to each other.

use burn::backend::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;

use super::call::Call;
use super::marks::{MARKS, WORD};
use crate::gpu::empty_like;

/// A call's scratch.
pub(super) struct Scratch {
    /// `[P, G, stride]`
    pub(super) logits: CubeTensor,
    /// `[P, stride]`
    pub(super) ordered: CubeTensor,
    /// `[P, 3, words]`
    pub(super) marks: CubeTensor,
    /// `[P, parts]`
    pub(super) norms: CubeTensor,
    /// `[P, G]`
    pub(super) log_sum_exp: CubeTensor,
}

impl Scratch {
    /// For ranges scored in so many `parts`. Scores and marks are in shared memory where that has
    /// room for a range's (`staged`), the former where one kernel makes and reads them (`whole`).
    pub(super) fn new(call: &Call, parts: usize, staged: bool, whole: bool) -> Self {
        let (pairs, group, stride) = (call.pairs, call.group, call.longest());
        let logits = if call.direct() { 1 } else { pairs * group * stride };
        let marks = if staged { 1 } else { pairs * MARKS * stride.div_ceil(WORD) };
        let ordered = if staged && whole { 1 } else { pairs * stride };
        Self {
            logits: call.scratch(logits, DType::F32),
            ordered: call.scratch(ordered, DType::U32),
            marks: call.scratch(marks, DType::U32),
            norms: call.scratch(pairs * parts, DType::F32),
            log_sum_exp: empty_like(&call.query, Shape::from([pairs, group]), DType::F32),
        }
    }
}
