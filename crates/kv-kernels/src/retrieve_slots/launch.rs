//! Launches on CubeCL devices.

use burn::backend::{DType, Shape, TensorMetadata};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::kernel::{Blueprint, retrieve_kernel};
use super::radix::PLANES;
use super::score::score_kernel;
use super::scratch::Scratch;
use super::steer::steer_kernel;
use super::tiles::{HEADS as TILE_HEADS, TEAM as TEAM_OF_TILES, VECTOR as TILE_VECTOR};
use super::{RetrieveConfig, SteerOptions};
use crate::extension::Retrieval;
use crate::gpu::{elem_type, empty_like, grid, is_cuda, multiplies, processors, vector_lanes};

/// Slots that a cube scores, at most: one range that retrieves must not keep all others waiting.
const PART: usize = 4_096;
/// Slots below which a part is not worth a cube.
const SMALLEST_PART: usize = 128;
/// Cubes on a processor, about.
const CUBES_EACH: usize = 4;
/// Units of a cube that scores, and of one that chooses among many.
const UNITS: usize = 256;
const MOST_UNITS: usize = 1_024;

/// Changes the table in its own buffer.
pub(crate) fn steer(table: CubeTensor, dropped: CubeTensor, options: SteerOptions) -> CubeTensor {
    const UNITS: u32 = 64;
    let (table, dropped) = (into_contiguous(table), into_contiguous(dropped));
    let [pairs, row] = table.shape().dims();
    let [_, group] = dropped.shape().dims();
    // SAFETY: shapes were checked.
    unsafe {
        steer_kernel::launch_unchecked(
            &table.client.clone(),
            grid(pairs.div_ceil(UNITS as usize)),
            CubeDim::new_1d(UNITS),
            table.clone().into_buffer_arg(),
            dropped.into_buffer_arg(),
            pairs,
            row,
            group,
            options.target,
            options.gain,
            options.most as f32,
        );
    }
    table
}

/// A call's tensors, all contiguous, and their sizes.
pub(super) struct Call {
    pub(super) query: CubeTensor,
    pub(super) vectors: CubeTensor,
    pub(super) keys: CubeTensor,
    pub(super) set_vectors: CubeTensor,
    pub(super) offsets: CubeTensor,
    pub(super) lengths: CubeTensor,
    pub(super) newest: CubeTensor,
    pub(super) table: CubeTensor,
    pub(super) config: RetrieveConfig,
    pub(super) batch: usize,
    pub(super) head_dim: usize,
    /// Ranges.
    pub(super) pairs: usize,
    /// Query heads of a range.
    pub(super) group: usize,
    /// Elements of a vector of a row.
    pub(super) lanes: usize,
}

impl Call {
    pub(super) fn new(retrieval: Retrieval<CubeBackend>) -> Self {
        let [query, vectors, keys, set_vectors] =
            [retrieval.query, retrieval.vectors, retrieval.keys, retrieval.set_vectors]
                .map(into_contiguous);
        let [offsets, lengths, newest, table] =
            [retrieval.offsets, retrieval.lengths, retrieval.newest, retrieval.table]
                .map(into_contiguous);
        let [batch, query_heads, head_dim] = query.shape().dims();
        let pairs = offsets.shape().num_elements();
        let lanes = vector_lanes(&keys, head_dim, head_dim);
        let (group, config) = (batch * query_heads / pairs, retrieval.config);
        Self {
            query,
            vectors,
            keys,
            set_vectors,
            offsets,
            lengths,
            newest,
            table,
            config,
            batch,
            head_dim,
            pairs,
            group,
            lanes,
        }
    }

    /// The most slots of a range.
    pub(super) fn longest(&self) -> usize {
        self.config.longest.max(1)
    }

    /// Code of a cube of `units`, whose teams read so many rows `ahead`, with room for `staged` slots' scores in
    /// shared memory.
    pub(super) fn blueprint(
        &self,
        units: usize,
        scores: bool,
        staged: usize,
        ahead: usize,
    ) -> Blueprint {
        let options = self.config.options;
        let client = &self.query.client;
        let [_, parts, length] = self.vectors.shape().dims();
        Blueprint {
            group: self.group,
            columns: self.head_dim / self.lanes,
            team: self.team(),
            tiles: self.tiles(),
            units,
            plane: client.properties().hardware.plane_size_min.max(1) as usize,
            parts,
            length,
            sets: self.config.sets,
            width: self.config.width,
            reduction: options.reduction,
            similarity: options.similarity,
            shares: options.block > 1,
            certified: options.certified,
            measures: self.config.measures,
            scores,
            // CUDA's barrier orders all memory for its cube.
            fenced: !is_cuda(client),
            staged,
            ahead,
            sifted: false,
        }
    }

    /// Whether matrix instructions score rows.
    fn tiles(&self) -> bool {
        let vectors = self.lanes * self.query.dtype.size() == TILE_VECTOR;
        multiplies(&self.query)
            && vectors
            && self.group <= TILE_HEADS
            && self.head_dim.is_multiple_of(TEAM_OF_TILES * self.lanes)
    }

    /// Units that share a row.
    fn team(&self) -> usize {
        if self.tiles() {
            return TEAM_OF_TILES;
        }
        let hardware = &self.query.client.properties().hardware;
        let most = (hardware.plane_size_min as usize).min(32);
        let columns = self.head_dim / self.lanes;
        let mut team = 8.min(most).min(columns.next_power_of_two());
        // Few units a row exchange less; enough of them keep queries in registers.
        while team < most && self.group * self.head_dim / team > 64 {
            team *= 2;
        }
        team
    }

    /// Rows that a team reads before it waits for the first, or tiles that a plane does: as many as registers allow.
    pub(super) fn ahead(&self) -> usize {
        match (self.tiles(), self.group) {
            (true, _) => (256 / self.head_dim).clamp(1, 4),
            (false, ..=2) => 8,
            (false, _) => 4,
        }
    }

    /// Whether scores are ordered as they are made.
    pub(super) fn direct(&self) -> bool {
        self.blueprint(1, true, 0, 1).direct()
    }

    /// Numbers that kernels leave to others, of which some are never read.
    pub(super) fn scratch(&self, numbers: usize, dtype: DType) -> CubeTensor {
        empty_like(&self.query, Shape::from([numbers.max(4)]), dtype)
    }
}

/// Changes table and vectors in their own buffers; returns them with log-sums `[P, G]`.
pub(crate) fn run(retrieval: Retrieval<CubeBackend>) -> (CubeTensor, CubeTensor, CubeTensor) {
    choose(&Call::new(retrieval))
}

/// The same.
pub(super) fn choose(call: &Call) -> (CubeTensor, CubeTensor, CubeTensor) {
    let (pairs, stride) = (call.pairs, call.longest());
    let client = call.query.client.clone();
    let hardware = &client.properties().hardware;
    let processors = processors(&client);
    let fill = (processors * CUBES_EACH / pairs.max(1)).clamp(1, stride.div_ceil(SMALLEST_PART));
    // Where ranges fill the device, parts are joined for nothing.
    let fill = if 2 * pairs >= processors { 1 } else { fill };
    let splits = fill.max(stride.div_ceil(PART));
    // Small planes must not be more than there is room for.
    let most = PLANES * (hardware.plane_size_min as usize).max(1);
    let widest = (hardware.max_units_per_cube as usize).min(MOST_UNITS).min(most);
    let chooser = if stride > 2 * PART { widest } else { UNITS.min(widest) };
    let staged = call.staged();
    let ahead = call.ahead();
    let whole = splits == 1;
    let units = UNITS.min(widest);
    if call.sifts() {
        let log_sum_exp = call.sift(units, widest);
        return (call.table.clone(), call.set_vectors.clone(), log_sum_exp);
    }
    let scratch = Scratch::new(call, splits, staged > 0, whole);
    if whole {
        call.choose(&scratch, 1, call.blueprint(units, true, staged, ahead));
    } else {
        call.score(&scratch, splits, call.blueprint(units, true, 0, ahead));
        call.choose(&scratch, splits, call.blueprint(chooser, false, staged, ahead));
    }
    (call.table.clone(), call.set_vectors.clone(), scratch.log_sum_exp)
}

impl Call {
    /// Scores ranges in so many parts, where they retrieve.
    pub(super) fn score(&self, scratch: &Scratch, splits: usize, blueprint: Blueprint) {
        let options = self.config.options;
        // SAFETY: shapes were checked; the kernel stays within slots, sets and scratch, given ranges that end
        // within the pool and are no longer than the longest.
        unsafe {
            score_kernel::launch_unchecked(
                &self.query.client.clone(),
                grid(self.pairs * splits),
                CubeDim::new_1d(blueprint.units as u32),
                self.lanes,
                self.query.clone().into_buffer_arg(),
                self.keys.clone().into_buffer_arg(),
                self.vectors.clone().into_buffer_arg(),
                self.set_vectors.clone().into_buffer_arg(),
                self.offsets.clone().into_buffer_arg(),
                self.lengths.clone().into_buffer_arg(),
                self.newest.clone().into_buffer_arg(),
                self.table.clone().into_buffer_arg(),
                scratch.logits.clone().into_buffer_arg(),
                scratch.ordered.clone().into_buffer_arg(),
                scratch.norms.clone().into_buffer_arg(),
                self.pairs,
                self.pairs / self.batch,
                splits,
                self.longest(),
                options.block,
                options.hidden.bits(),
                self.config.scale,
                blueprint,
                elem_type(self.query.dtype),
            );
        }
    }

    /// Chooses by a cube a range, of which so many parts have been scored, or one will be.
    fn choose(&self, scratch: &Scratch, scored_parts: usize, blueprint: Blueprint) {
        let options = self.config.options;
        // SAFETY: as for the scores.
        unsafe {
            retrieve_kernel::launch_unchecked(
                &self.query.client.clone(),
                grid(self.pairs),
                CubeDim::new_1d(blueprint.units as u32),
                self.lanes,
                self.query.clone().into_buffer_arg(),
                self.keys.clone().into_buffer_arg(),
                self.vectors.clone().into_buffer_arg(),
                self.set_vectors.clone().into_buffer_arg(),
                self.offsets.clone().into_buffer_arg(),
                self.lengths.clone().into_buffer_arg(),
                self.newest.clone().into_buffer_arg(),
                self.table.clone().into_buffer_arg(),
                scratch.logits.clone().into_buffer_arg(),
                scratch.ordered.clone().into_buffer_arg(),
                scratch.marks.clone().into_buffer_arg(),
                scratch.norms.clone().into_buffer_arg(),
                scratch.log_sum_exp.clone().into_buffer_arg(),
                self.pairs,
                self.pairs / self.batch,
                scored_parts,
                self.longest(),
                options.radius,
                options.block,
                options.hidden.bits(),
                self.config.scale,
                blueprint,
                elem_type(self.query.dtype),
            );
        }
    }
}
