//! Launches `cis_select` on CubeCL devices: the selection in which one cube chooses for a range.
//! `histogram_topk/launch.rs` and `fused.rs` have the other launches.

use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::CisStrategy;
use super::args::Retrieval;
use super::blueprint::Blueprint;
use super::call::Call;
use super::score::score_kernel;
use super::scratch::Scratch;
use super::sizes::PART;
use super::step::retrieve_kernel;
use crate::backend::client::{elem_type, grid};

/// Units of a cube that scores. In long ranges, wider cubes choose.
const UNITS: usize = 256;

/// Runs `cis_select`. Changes the table and the vectors in their own buffers; returns them, and
/// log-sum-exps `[P, G]`.
pub(crate) fn run(retrieval: Retrieval<CubeBackend>) -> (CubeTensor, CubeTensor, CubeTensor) {
    let call = Call::new(retrieval, None);
    select_slots(&call, call.strategy())
}

/// Chooses slots by kernels other than the fused one. Changes the table and the vectors in their
/// own buffers; returns them, and log-sum-exps `[P, G]`.
pub(super) fn select_slots(
    call: &Call,
    strategy: CisStrategy,
) -> (CubeTensor, CubeTensor, CubeTensor) {
    let sizes = &call.sizes;
    let widest = sizes.widest();
    let chooser = if sizes.longest() > 2 * PART { widest } else { UNITS.min(widest) };
    let ahead = call.ahead();
    let units = UNITS.min(widest);
    if strategy == CisStrategy::Histogram {
        let log_sum_exp = call.histogram_topk(units, widest);
        return (call.table.clone(), call.set_vectors.clone(), log_sum_exp);
    }
    let whole = strategy == CisStrategy::Radix;
    let staged = sizes.staged(if whole { units } else { chooser });
    let scratch = Scratch::new(call, staged > 0, whole);
    if whole {
        call.select_slots(&scratch, call.blueprint(units, true, staged, ahead));
    } else {
        call.score(&scratch, sizes.splits().max(2), call.blueprint(units, true, 0, ahead));
        call.select_slots(&scratch, call.blueprint(chooser, false, staged, ahead));
    }
    (call.table.clone(), call.set_vectors.clone(), scratch.log_sum_exp)
}

impl Call {
    /// Scores the ranges that retrieve, each in `splits` parts.
    pub(super) fn score(&self, scratch: &Scratch, splits: usize, blueprint: Blueprint) {
        // SAFETY: shapes were checked; the kernel stays within slots, sets and scratch, given
        // ranges that end within the pool and are no longer than the longest.
        unsafe {
            score_kernel::launch_unchecked(
                &self.query.client.clone(),
                grid(self.total_kv_heads * splits),
                CubeDim::new_1d(blueprint.units as u32),
                self.lanes,
                self.scored_keys(),
                self.step_ranges(),
                self.compared_vectors(),
                scratch.scores(self.longest()),
                splits,
                blueprint,
                elem_type(self.query.dtype),
            );
        }
    }

    /// Chooses by one cube a range. The scores are there already, or the cube makes them.
    fn select_slots(&self, scratch: &Scratch, blueprint: Blueprint) {
        // SAFETY: as in `score`.
        unsafe {
            retrieve_kernel::launch_unchecked(
                &self.query.client.clone(),
                grid(self.total_kv_heads),
                CubeDim::new_1d(blueprint.units as u32),
                self.lanes,
                scratch.choosing(self),
                blueprint,
                elem_type(self.query.dtype),
            );
        }
    }
}
