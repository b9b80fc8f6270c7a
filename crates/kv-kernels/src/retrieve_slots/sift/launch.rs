//! Launches on CubeCL devices.

use burn::backend::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::conclude::conclude_kernel;
use super::count::count_kernel;
use super::decide::decide_kernel;
use super::mark::mark_kernel;
use super::score::score_kernel;
use super::{BINS, EDGES};
use crate::gpu::{elem_type, grid, processors};
use crate::retrieve_slots::call::Call;
use crate::retrieve_slots::kernel::Blueprint;
use crate::retrieve_slots::marks::WORD;
use crate::retrieve_slots::scratch::Scratch;

/// Slots of a part of the longest range that is scored, at least, and parts of a range, at most.
const SMALLEST_PART: usize = 512;
const MOST_PARTS: usize = 128;
/// Units of a cube that decides.
const UNITS: usize = 256;
/// Cubes on a processor that share what is to be done.
const CUBES_EACH: usize = 2;

/// What the kernels leave to each other.
struct Sieve {
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
    /// `[P, EDGES]`
    edges: CubeTensor,
}

impl Sieve {
    fn new(call: &Call, parts: usize, candidates: usize) -> Self {
        let pairs = call.pairs;
        Self {
            tasks: call.scratch(pairs, DType::U32),
            sums: call.scratch(pairs * parts * call.group * 2, DType::F32),
            bins: call.scratch(pairs * BINS, DType::U32),
            tallies: call.scratch(2 * pairs, DType::U32),
            candidates: call.scratch(pairs * 4 * candidates, DType::U32),
            edges: call.scratch(pairs * EDGES, DType::U32),
        }
    }
}

impl Call {
    /// Decides, scores, sifts and concludes, by cubes of `units`, the last ones of so many as are
    /// `widest`; returns log-sums `[P, G]`.
    pub(in crate::retrieve_slots) fn sift(&self, units: usize, widest: usize) -> CubeTensor {
        let parts = self.longest().div_ceil(SMALLEST_PART).min(MOST_PARTS);
        let (listed, candidates) = (self.listed(), self.candidates());
        let sieve = Sieve::new(self, parts, candidates);
        let scratch = Scratch::new(self, parts, false, false);
        let blueprint = Blueprint { sifted: true, ..self.blueprint(units, true, 0, self.ahead()) };
        let (options, stride, pairs) = (self.config.options, self.longest(), self.pairs);
        let (block, hidden) = (options.block, options.hidden.bits());
        let (kv_heads, dtype) = (pairs / self.batch, elem_type(self.query.dtype));
        let client = self.query.client.clone();
        let processors = processors(&client);
        let shared = grid(processors * CUBES_EACH);
        let wide = CubeDim::new_1d(units as u32);
        let arg = |tensor: &CubeTensor| tensor.clone().into_buffer_arg();
        // SAFETY: shapes were checked; the kernels stay within slots, sets and scratch, given
        // ranges that end within the pool and are no longer than the longest.
        unsafe {
            decide_kernel::launch_unchecked(
                &client,
                grid(pairs),
                CubeDim::new_1d(UNITS.min(units) as u32),
                arg(&self.vectors),
                arg(&self.set_vectors),
                arg(&self.lengths),
                arg(&self.newest),
                arg(&self.table),
                arg(&sieve.tasks),
                pairs,
                kv_heads,
                block,
                hidden,
                Blueprint { units: UNITS.min(units), ..blueprint },
                dtype,
            );
            score_kernel::launch_unchecked(
                &client,
                shared.clone(),
                wide,
                self.lanes,
                arg(&self.query),
                arg(&self.keys),
                arg(&self.offsets),
                arg(&self.lengths),
                arg(&self.newest),
                arg(&self.table),
                arg(&sieve.tasks),
                arg(&scratch.logits),
                arg(&scratch.ordered),
                arg(&scratch.norms),
                arg(&sieve.sums),
                arg(&sieve.bins),
                arg(&sieve.tallies),
                pairs,
                kv_heads,
                parts,
                stride,
                block,
                hidden,
                self.config.scale,
                listed,
                blueprint,
                dtype,
            );
            count_kernel::launch_unchecked(
                &client,
                shared.clone(),
                wide,
                arg(&self.lengths),
                arg(&self.newest),
                arg(&self.table),
                arg(&sieve.tasks),
                arg(&scratch.logits),
                arg(&scratch.ordered),
                arg(&sieve.sums),
                arg(&sieve.bins),
                pairs,
                kv_heads,
                parts,
                stride,
                block,
                hidden,
                listed,
                blueprint,
            );
            mark_kernel::launch_unchecked(
                &client,
                shared,
                wide,
                arg(&self.lengths),
                arg(&self.newest),
                arg(&self.table),
                arg(&sieve.tasks),
                arg(&scratch.ordered),
                arg(&sieve.sums),
                arg(&sieve.bins),
                arg(&scratch.marks),
                arg(&sieve.tallies),
                arg(&sieve.candidates),
                arg(&sieve.edges),
                pairs,
                kv_heads,
                parts,
                stride,
                block,
                hidden,
                candidates,
                listed,
                blueprint,
            );
            conclude_kernel::launch_unchecked(
                &client,
                grid(pairs.min(processors * CUBES_EACH)),
                CubeDim::new_1d(widest as u32),
                arg(&self.vectors),
                arg(&self.set_vectors),
                arg(&self.lengths),
                arg(&self.newest),
                arg(&self.table),
                arg(&sieve.tasks),
                arg(&scratch.logits),
                arg(&scratch.ordered),
                arg(&sieve.sums),
                arg(&scratch.marks),
                arg(&sieve.candidates),
                arg(&sieve.edges),
                arg(&scratch.norms),
                arg(&scratch.log_sum_exp),
                pairs,
                kv_heads,
                parts,
                stride,
                options.radius,
                block,
                hidden,
                self.words(),
                candidates,
                self.gathers(),
                listed,
                // Marks are in shared memory.
                self.blueprint(widest, false, self.words() * WORD, 1),
                dtype,
            );
        }
        scratch.log_sum_exp
    }
}
