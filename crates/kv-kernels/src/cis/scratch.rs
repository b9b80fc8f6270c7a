//! Global memory through which the kernels of a call pass on scores and selections.

use burn::backend::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::bitmask::{BITMASKS, WORD};
use super::call::Call;
use super::kernel_args::{ChoosingLaunch, ScoresLaunch, SelectionLaunch};
use crate::backend::client::empty_like;

/// The scratch buffers of a call.
pub(super) struct Scratch {
    /// `[P, G, stride]`
    pub(super) logits: CubeTensor,
    /// `[P, stride]`
    pub(super) ordered: CubeTensor,
    /// `[P, 3, words]`
    pub(super) bitmasks: CubeTensor,
    /// `[P, G]`
    pub(super) log_sum_exp: CubeTensor,
}

impl Scratch {
    /// Scratch buffers for the ranges of a call. Where shared memory has room for a range
    /// (`staged`), it holds bitmasks, and it holds sort keys if one kernel both makes and reads
    /// them (`whole`).
    pub(super) fn new(call: &Call, staged: bool, whole: bool) -> Self {
        let (total_kv_heads, group, stride) = (call.total_kv_heads, call.group, call.longest());
        let logits = if call.direct() { 1 } else { total_kv_heads * group * stride };
        let bitmasks = if staged { 1 } else { total_kv_heads * BITMASKS * stride.div_ceil(WORD) };
        let ordered = if staged && whole { 1 } else { total_kv_heads * stride };
        Self {
            logits: call.scratch(logits, DType::F32),
            ordered: call.scratch(ordered, DType::U32),
            bitmasks: call.scratch(bitmasks, DType::U32),
            log_sum_exp: empty_like(&call.query, Shape::from([total_kv_heads, group]), DType::F32),
        }
    }

    /// Scores as a kernel's argument, for ranges with room for `stride` slots.
    pub(super) fn scores(&self, stride: usize) -> ScoresLaunch {
        let (logits, ordered) = (self.logits.clone(), self.ordered.clone());
        ScoresLaunch::new(logits.into_buffer_arg(), ordered.into_buffer_arg(), stride)
    }

    /// Bitmasks and log-sum-exps as a kernel's argument.
    pub(super) fn selection(&self, radius: usize) -> SelectionLaunch {
        let (bitmasks, log_sum_exp) = (self.bitmasks.clone(), self.log_sum_exp.clone());
        SelectionLaunch::new(bitmasks.into_buffer_arg(), log_sum_exp.into_buffer_arg(), radius)
    }

    /// All arguments of a kernel in which one cube chooses for a range.
    pub(super) fn choosing<F: Float, N: Size>(&self, call: &Call) -> ChoosingLaunch<F, N> {
        ChoosingLaunch::new(
            call.scored_keys(),
            call.step_ranges(),
            call.compared_vectors(),
            self.scores(call.longest()),
            self.selection(call.config.options.radius),
        )
    }
}
