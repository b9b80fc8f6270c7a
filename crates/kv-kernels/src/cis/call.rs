//! A call of an op on index sets on CubeCL devices: its tensors, and the configuration of its
//! kernels.

use burn::backend::{DType, Shape, TensorMetadata};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::args::Retrieval;
use super::bitmask::CHUNK;
use super::blueprint::Blueprint;
use super::kernel_args::{ComparedVectorsLaunch, ScoredKeysLaunch, StepRangesLaunch};
use super::score_mma::{TEAM as TEAM_OF_TILES, VECTOR as TILE_VECTOR};
use super::sizes::Sizes;
use super::{CisConfig, CisStrategy, Earlier};
use crate::backend::client::{empty_like, is_cuda, unrolled, vector_lanes};
use crate::backend::strategy::{DeviceTraits, Strategy};

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
    pub(super) config: CisConfig,
    pub(super) batch: usize,
    pub(super) head_dim: usize,
    /// Head ranges, `P = B * Hkv`.
    pub(super) total_kv_heads: usize,
    /// Query heads of a key-value head.
    pub(super) group: usize,
    /// Elements of a vector: rows are read in vectors.
    pub(super) lanes: usize,
    pub(super) sizes: Sizes,
}

impl Call {
    /// A call that attends to at most `attends` slots of a range, or that only chooses.
    pub(super) fn new(retrieval: Retrieval<CubeBackend>, attends: Option<usize>) -> Self {
        let [query, vectors, keys, set_vectors] =
            [retrieval.query, retrieval.vectors, retrieval.keys, retrieval.set_vectors]
                .map(into_contiguous);
        let [offsets, lengths, newest, table] =
            [retrieval.offsets, retrieval.lengths, retrieval.newest, retrieval.table]
                .map(into_contiguous);
        let [batch, query_heads, head_dim] = query.shape().dims();
        let total_kv_heads = offsets.shape().num_elements();
        let lanes = vector_lanes(&keys, head_dim, head_dim);
        let (group, config) = (batch * query_heads / total_kv_heads, retrieval.config);
        let device = DeviceTraits::of(&query.client, query.dtype);
        let shape = config.shape([head_dim, total_kv_heads, group], attends);
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
            total_kv_heads,
            group,
            lanes,
            sizes: Sizes { device, shape },
        }
    }

    /// The kernels that choose the slots.
    pub(super) fn strategy(&self) -> CisStrategy {
        let Sizes { device, shape } = &self.sizes;
        self.config.options.strategy.or_chosen(device, shape)
    }

    /// The most slots of a range.
    pub(super) fn longest(&self) -> usize {
        self.sizes.longest()
    }

    /// The configuration of a cube of `units` units, whose teams read `ahead` rows at a time.
    /// Shared memory has room for the sort keys of `staged` slots.
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
            plane: self.sizes.device.plane,
            parts,
            length,
            sets: self.config.sets,
            width: self.config.width,
            reduction: options.reduction,
            similarity: options.similarity,
            shares: options.block > 1,
            chains: options.earlier == Earlier::Any,
            reads_choice: options.reads_choice(),
            tail: options.tail,
            measures: self.config.measures,
            scores,
            // CUDA's barrier also orders global memory for its cube.
            fenced: !is_cuda(client),
            staged,
            ahead,
            chunk: unrolled(client, CHUNK),
            feeds_histogram: false,
        }
    }

    /// Whether matrix instructions score rows.
    fn tiles(&self) -> bool {
        let vectors = self.lanes * self.query.dtype.size() == TILE_VECTOR;
        self.sizes.device.multiplies
            && vectors
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
        // A small team exchanges less. A large team keeps queries in registers.
        while team < most && self.group * self.head_dim / team > 64 {
            team *= 2;
        }
        team
    }

    /// Rows that a team reads before it waits for the first, or tiles that a plane reads: as many
    /// as registers allow.
    pub(super) fn ahead(&self) -> usize {
        match (self.tiles(), self.group) {
            (true, _) => (256 / self.head_dim).clamp(1, 4),
            (false, ..=2) => unrolled(&self.query.client, 8),
            (false, _) => unrolled(&self.query.client, 4),
        }
    }

    /// Whether sort keys are made directly of logits.
    pub(super) fn direct(&self) -> bool {
        self.sizes.direct()
    }

    /// Global memory for `numbers` numbers that kernels pass to later ones. Some of them are never
    /// read.
    pub(super) fn scratch(&self, numbers: usize, dtype: DType) -> CubeTensor {
        empty_like(&self.query, Shape::from([numbers.max(4)]), dtype)
    }

    /// Keys and queries as a kernel's argument.
    pub(super) fn scored_keys<F: Float, N: Size>(&self) -> ScoredKeysLaunch<F, N> {
        let (query, keys) = (self.query.clone(), self.keys.clone());
        ScoredKeysLaunch::new(query.into_buffer_arg(), keys.into_buffer_arg(), self.config.scale)
    }

    /// Head ranges and their index sets as a kernel's argument.
    pub(super) fn step_ranges(&self) -> StepRangesLaunch {
        let options = self.config.options;
        StepRangesLaunch::new(
            self.offsets.clone().into_buffer_arg(),
            self.lengths.clone().into_buffer_arg(),
            self.newest.clone().into_buffer_arg(),
            self.table.clone().into_buffer_arg(),
            self.total_kv_heads,
            self.total_kv_heads / self.batch,
            options.block,
            options.hidden.bits(),
        )
    }

    /// The vectors by which steps are compared, as a kernel's argument.
    pub(super) fn compared_vectors<F: Float>(&self) -> ComparedVectorsLaunch<F> {
        let (step, cached) = (self.vectors.clone(), self.set_vectors.clone());
        ComparedVectorsLaunch::new(step.into_buffer_arg(), cached.into_buffer_arg())
    }
}
