//! Launches the five kernels of the selection by histogram.

use burn::backend::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::build_histogram::histogram_kernel;
use super::finish_steps::finish_kernel;
use super::kernel_args::{
    DueRangesLaunch, FinishBlueprint, PartScoresLaunch, PivotCandidatesLaunch, Room,
    ScoreCountsLaunch,
};
use super::match_sets::match_kernel;
use super::score::score_kernel;
use super::write_bitmask::bitmask_kernel;
use super::{BINS, PIVOTS};
use crate::backend::client::{elem_type, grid, processors};
use crate::cis::bitmask::WORD;
use crate::cis::blueprint::Blueprint;
use crate::cis::call::Call;
use crate::cis::scratch::Scratch;

/// The fewest slots of a part of the longest range that is scored, and the most parts of a range.
const SMALLEST_PART: usize = 512;
const MOST_PARTS: usize = 128;
/// Units of a cube that compares vectors.
const UNITS: usize = 256;
/// Cubes on a processor that share the work lists.
const CUBES_EACH: usize = 2;

/// Global memory through which the kernels pass on their results. `kernel_args.rs` documents the
/// contents.
struct HistogramScratch {
    /// `[P]`
    tasks: CubeTensor,
    /// `[P, parts, G, 2]`
    sums: CubeTensor,
    /// `[P, BINS]`
    bins: CubeTensor,
    /// `[P, 2]`
    tallies: CubeTensor,
    /// `[P, 2, candidates, 2]`
    candidates: CubeTensor,
    /// `[P, PIVOTS]`
    pivots: CubeTensor,
}

impl HistogramScratch {
    fn new(call: &Call, parts: usize, candidates: usize) -> Self {
        let total_kv_heads = call.total_kv_heads;
        Self {
            tasks: call.scratch(total_kv_heads, DType::U32),
            sums: call.scratch(total_kv_heads * parts * call.group * 2, DType::F32),
            bins: call.scratch(total_kv_heads * BINS, DType::U32),
            tallies: call.scratch(2 * total_kv_heads, DType::U32),
            candidates: call.scratch(total_kv_heads * 4 * candidates, DType::U32),
            pivots: call.scratch(total_kv_heads * PIVOTS, DType::U32),
        }
    }
}

impl Call {
    /// Launches the five kernels: the last with cubes of `widest` units, the others with cubes of
    /// `units` units. Returns log-sum-exps `[P, G]`.
    pub(in crate::cis) fn histogram_topk(&self, units: usize, widest: usize) -> CubeTensor {
        let parts = self.longest().div_ceil(SMALLEST_PART).min(MOST_PARTS);
        let room = Room { ranges: self.sizes.listed(), candidates: self.sizes.candidates() };
        let histogram = HistogramScratch::new(self, parts, room.candidates);
        let scratch = Scratch::new(self, false, false);
        let blueprint =
            Blueprint { feeds_histogram: true, ..self.blueprint(units, true, 0, self.ahead()) };
        let (options, stride, total_kv_heads) =
            (self.config.options, self.longest(), self.total_kv_heads);
        let dtype = elem_type(self.query.dtype);
        let client = self.query.client.clone();
        let processors = processors(&client);
        let shared = grid(processors * CUBES_EACH);
        let wide = CubeDim::new_1d(units as u32);
        let arg = |tensor: &CubeTensor| tensor.clone().into_buffer_arg();
        let due = || DueRangesLaunch::new(self.step_ranges(), arg(&histogram.tasks));
        let scored = || PartScoresLaunch::new(scratch.scores(stride), arg(&histogram.sums), parts);
        let counts = || ScoreCountsLaunch::new(arg(&histogram.bins), arg(&histogram.tallies));
        let pivot_candidates =
            || PivotCandidatesLaunch::new(arg(&histogram.candidates), arg(&histogram.pivots));
        // SAFETY: shapes were checked; the kernels stay within slots, sets and scratch, given
        // ranges that end within the pool and are no longer than the longest.
        unsafe {
            match_kernel::launch_unchecked(
                &client,
                grid(total_kv_heads),
                CubeDim::new_1d(UNITS.min(units) as u32),
                due(),
                self.compared_vectors(),
                Blueprint { units: UNITS.min(units), ..blueprint },
                dtype,
            );
            score_kernel::launch_unchecked(
                &client,
                shared.clone(),
                wide,
                self.lanes,
                self.scored_keys(),
                due(),
                scored(),
                counts(),
                room,
                blueprint,
                dtype,
            );
            histogram_kernel::launch_unchecked(
                &client,
                shared.clone(),
                wide,
                due(),
                scored(),
                counts(),
                room,
                blueprint,
            );
            bitmask_kernel::launch_unchecked(
                &client,
                shared,
                wide,
                due(),
                scored(),
                counts(),
                scratch.selection(options.radius),
                pivot_candidates(),
                room,
                blueprint,
            );
            finish_kernel::launch_unchecked(
                &client,
                grid(total_kv_heads.min(processors * CUBES_EACH)),
                CubeDim::new_1d(widest as u32),
                due(),
                self.compared_vectors(),
                scored(),
                scratch.selection(options.radius),
                pivot_candidates(),
                FinishBlueprint {
                    // The last kernel has bitmasks in shared memory.
                    step: self.blueprint(widest, false, self.sizes.words() * WORD, 1),
                    room,
                    words: self.sizes.words(),
                    gathers: self.sizes.gathers(),
                },
                dtype,
            );
        }
        scratch.log_sum_exp
    }
}
