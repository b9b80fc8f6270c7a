//! Launches on CubeCL devices.

use burn::backend::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::conclude::conclude_kernel;
use super::count::count_kernel;
use super::mark::mark_kernel;
use super::{BINS, CANDIDATES, EDGES};
use crate::gpu::{elem_type, grid};
use crate::retrieve_slots::kernel::Blueprint;
use crate::retrieve_slots::launch::Call;
use crate::retrieve_slots::marks::WORD;
use crate::retrieve_slots::radix::PLANES;
use crate::retrieve_slots::scratch::Scratch;

/// Slots of a range beyond which many cubes sift its scores, so that one does not have to look at all of them: where
/// the scores of one query are ordered as they are made, and where those of a group are joined first.
const LONGEST: usize = 8_192;
const LONGEST_OF_GROUPS: usize = 2_048;
/// Words of marks that many are a multiple of.
const COARSEST: usize = 4_096;

/// What the kernels leave to each other that sift.
pub(in crate::retrieve_slots) struct Sieve {
    /// `[P, splits, G, 2]`
    pub(in crate::retrieve_slots) sums: CubeTensor,
    /// `[P, BINS]`
    pub(in crate::retrieve_slots) bins: CubeTensor,
    /// `[P, 2]`
    pub(in crate::retrieve_slots) tallies: CubeTensor,
    /// `[P, 2, CANDIDATES, 2]`
    candidates: CubeTensor,
    /// `[P, EDGES]`
    edges: CubeTensor,
}

impl Sieve {
    fn new(call: &Call, splits: usize) -> Self {
        let pairs = call.pairs;
        Self {
            sums: call.scratch(pairs * splits * call.group * 2, DType::F32),
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

    /// Whether scores made by cubes of `units` are sifted: those of long ranges, where shared memory has
    /// room for their marks and for bins.
    pub(in crate::retrieve_slots) fn sifts(&self, units: usize) -> bool {
        let hardware = &self.query.client.properties().hardware;
        let words = hardware.max_shared_memory_size / size_of::<u32>();
        let team = self.blueprint(units, true, 0, 1).team;
        let scoring = 2 * units * self.group.div_ceil(team) + PLANES + 2 * self.config.sets;
        let sums = 2 * PLANES * self.group;
        let concluding = 2 * self.words() + 2 * CANDIDATES + self.beside() + sums;
        let longest = if self.direct() { LONGEST } else { LONGEST_OF_GROUPS };
        self.longest() > longest && scoring.max(concluding).max(BINS + sums) <= words
    }

    /// Scores, sifts and concludes.
    pub(in crate::retrieve_slots) fn sift(
        &self,
        scratch: &Scratch,
        splits: usize,
        units: usize,
        widest: usize,
    ) {
        let sieve = Sieve::new(self, splits);
        let blueprint = Blueprint { sifted: true, ..self.blueprint(units, true, 0, self.ahead()) };
        self.score(scratch, Some(&sieve), splits, blueprint);
        let options = self.config.options;
        let client = self.query.client.clone();
        let kv_heads = self.pairs / self.batch;
        let (lengths, newest) = (&self.lengths, &self.newest);
        // SAFETY: as for the scores.
        unsafe {
            count_kernel::launch_unchecked(
                &client,
                grid(self.pairs * splits),
                CubeDim::new_1d(units as u32),
                lengths.clone().into_buffer_arg(),
                newest.clone().into_buffer_arg(),
                self.table.clone().into_buffer_arg(),
                scratch.logits.clone().into_buffer_arg(),
                scratch.ordered.clone().into_buffer_arg(),
                sieve.sums.clone().into_buffer_arg(),
                sieve.bins.clone().into_buffer_arg(),
                self.pairs,
                kv_heads,
                splits,
                self.longest(),
                options.block,
                options.hidden.bits(),
                blueprint,
            );
            mark_kernel::launch_unchecked(
                &client,
                grid(self.pairs * splits),
                CubeDim::new_1d(units as u32),
                lengths.clone().into_buffer_arg(),
                newest.clone().into_buffer_arg(),
                self.table.clone().into_buffer_arg(),
                scratch.ordered.clone().into_buffer_arg(),
                sieve.sums.clone().into_buffer_arg(),
                sieve.bins.clone().into_buffer_arg(),
                scratch.marks.clone().into_buffer_arg(),
                sieve.tallies.clone().into_buffer_arg(),
                sieve.candidates.clone().into_buffer_arg(),
                sieve.edges.clone().into_buffer_arg(),
                self.pairs,
                kv_heads,
                splits,
                self.longest(),
                options.block,
                options.hidden.bits(),
                blueprint,
            );
            conclude_kernel::launch_unchecked(
                &client,
                grid(self.pairs),
                CubeDim::new_1d(widest as u32),
                self.vectors.clone().into_buffer_arg(),
                self.set_vectors.clone().into_buffer_arg(),
                lengths.clone().into_buffer_arg(),
                newest.clone().into_buffer_arg(),
                self.table.clone().into_buffer_arg(),
                scratch.logits.clone().into_buffer_arg(),
                scratch.ordered.clone().into_buffer_arg(),
                sieve.sums.into_buffer_arg(),
                scratch.marks.clone().into_buffer_arg(),
                sieve.candidates.into_buffer_arg(),
                sieve.edges.into_buffer_arg(),
                scratch.norms.clone().into_buffer_arg(),
                scratch.log_sum_exp.clone().into_buffer_arg(),
                self.pairs,
                kv_heads,
                splits,
                self.longest(),
                options.radius,
                options.block,
                options.hidden.bits(),
                self.words(),
                self.blueprint(widest, false, 0, 1),
                elem_type(self.query.dtype),
            );
        }
    }
}
