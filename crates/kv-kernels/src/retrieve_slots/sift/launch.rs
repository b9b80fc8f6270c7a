//! Launches on CubeCL devices.

use burn::backend::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::conclude::conclude_kernel;
use super::count::count_kernel;
use super::decide::decide_kernel;
use super::mark::mark_kernel;
use super::score::score_kernel;
use super::{BINS, CANDIDATES, EDGES, FINER, PART_WORDS};
use crate::gpu::{elem_type, grid, processors};
use crate::retrieve_slots::kernel::Blueprint;
use crate::retrieve_slots::launch::Call;
use crate::retrieve_slots::marks::{MARKS, WORD};
use crate::retrieve_slots::radix::PLANES;
use crate::retrieve_slots::scratch::Scratch;

/// Slots of a range beyond which many cubes sift its scores, so that one does not have to look at all of them: where
/// the scores of one query are ordered as they are made, and where those of a group are joined first.
const LONGEST: usize = 8_192;
const LONGEST_OF_GROUPS: usize = 2_048;
/// Words of marks that many are a multiple of.
const COARSEST: usize = 256;
/// Ranges beyond which none is sifted, as each cube lists those that retrieve, and the fewest that there is room for.
const MOST_RANGES: usize = 4_096;
const FEWEST_RANGES: usize = 256;
/// Slots of a part that is scored, at least, and parts of a range, at most.
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
    /// `[P, 2, CANDIDATES, 2]`
    candidates: CubeTensor,
    /// `[P, EDGES]`
    edges: CubeTensor,
}

impl Sieve {
    fn new(call: &Call, parts: usize) -> Self {
        let pairs = call.pairs;
        Self {
            tasks: call.scratch(pairs, DType::U32),
            sums: call.scratch(pairs * parts * call.group * 2, DType::F32),
            bins: call.scratch(pairs * BINS, DType::U32),
            tallies: call.scratch(2 * pairs, DType::U32),
            candidates: call.scratch(pairs * 4 * CANDIDATES, DType::U32),
            edges: call.scratch(pairs * EDGES, DType::U32),
        }
    }
}

impl Call {
    /// Words of marks of the longest range, rounded up: each number is a kernel of its own.
    fn words(&self) -> usize {
        let words = self.longest().div_ceil(WORD);
        words.next_power_of_two().min(words.next_multiple_of(COARSEST))
    }

    /// Ranges that a cube lists, rounded up likewise.
    fn listed(&self) -> usize {
        self.pairs.next_power_of_two().max(FEWEST_RANGES)
    }

    /// Whether scores are sifted: those of long ranges, where shared memory has room for their marks and for bins.
    pub(in crate::retrieve_slots) fn sifts(&self) -> bool {
        let counting = BINS + 2 * PART_WORDS + self.listed() + self.summing(true);
        let room = self.room();
        let longest = if self.direct() { LONGEST } else { LONGEST_OF_GROUPS };
        self.longest() > longest
            && self.pairs <= MOST_RANGES
            && counting.max(self.concluding()) <= room
    }

    /// Whether shared memory has room for a set's tokens, too.
    fn gathers(&self) -> bool {
        self.concluding() + self.config.width <= self.room()
    }

    /// Numbers that shared memory has room for.
    fn room(&self) -> usize {
        let hardware = &self.query.client.properties().hardware;
        hardware.max_shared_memory_size / size_of::<u32>()
    }

    /// Numbers of shared memory that sums take, of a kernel that joins scores or of the last one.
    fn summing(&self, joins: bool) -> usize {
        let all = joins || self.config.measures || self.config.options.certified;
        let some = if all { self.group } else { 1 };
        2 * PLANES * some + 2 * PLANES
    }

    /// Numbers of shared memory that the end takes.
    fn concluding(&self) -> usize {
        let marks = (2 + MARKS) * self.words();
        marks + 2 * (2 * CANDIDATES + FINER) + self.listed() + self.beside() + self.summing(false)
    }

    /// Decides, scores, sifts and concludes, by cubes of `units`, the last ones of so many as are `widest`; returns
    /// log-sums `[P, G]`.
    pub(in crate::retrieve_slots) fn sift(&self, units: usize, widest: usize) -> CubeTensor {
        let parts = self.longest().div_ceil(SMALLEST_PART).min(MOST_PARTS);
        let sieve = Sieve::new(self, parts);
        let scratch = Scratch::new(self, parts, false, false);
        let blueprint = Blueprint { sifted: true, ..self.blueprint(units, true, 0, self.ahead()) };
        let (options, stride, pairs) = (self.config.options, self.longest(), self.pairs);
        let (block, hidden) = (options.block, options.hidden.bits());
        let (kv_heads, dtype) = (pairs / self.batch, elem_type(self.query.dtype));
        let client = self.query.client.clone();
        let processors = processors(&client);
        let shared = grid(processors * CUBES_EACH);
        let wide = CubeDim::new_1d(units as u32);
        let listed = self.listed();
        let arg = |tensor: &CubeTensor| tensor.clone().into_buffer_arg();
        // SAFETY: shapes were checked; the kernels stay within slots, sets and scratch, given ranges that end
        // within the pool and are no longer than the longest.
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
                self.gathers(),
                self.listed(),
                // Marks are in shared memory.
                self.blueprint(widest, false, self.words() * WORD, 1),
                dtype,
            );
        }
        scratch.log_sum_exp
    }
}
