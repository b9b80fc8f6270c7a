//! Chooses the slots of a step and attends to them in one launch, one cube a range. While one cube
//! chooses, other cubes attend, and no second launch reads the chosen slots. Where steps may share
//! sets, `score.rs` runs before it, so that many cubes score the few ranges that retrieve.

use burn::backend::{DType, TensorMetadata};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::CisStrategy;
use super::args::Retrieval;
use super::blueprint::Blueprint as ChoiceBlueprint;
use super::call::Call;
use super::kernel_args::Choosing;
use super::launch;
use super::scratch::Scratch;
use super::sizes::{FusedPlan, PLANE};
use super::step::step;
use super::table::row;
use crate::attention::decode::DecodeConfig;
use crate::attention::decode::args::DecodeArgs;
use crate::attention::decode::blueprint::{Blueprint, KvSplit, LogitsSink};
use crate::attention::decode::eviction::Eviction;
use crate::attention::decode::kernel_args::{
    DecodeOutputs, DecodeOutputsLaunch, Queries, QueriesLaunch, WeightedPool, WeightedPoolLaunch,
};
use crate::attention::decode::launch::head_outputs;
use crate::attention::decode::range_part::{RangePart, Sequence};
use crate::attention::decode::slot_indexer::SlotIndexer;
use crate::attention::decode::tensor_core::attend;
use crate::backend::client::{elem_type, empty_like, grid};
use crate::backend::optional::{OptionalFloat, OptionalInt};

/// The fewest slots of a part that a cube scores.
const SMALLEST_PART: usize = 256;
/// Cubes that score, for each processor, about.
const CUBES_EACH: usize = 16;
/// Units of a cube that scores.
const UNITS: usize = 128;

/// Chooses and attends. Returns the table and the vectors, changed in their own buffers, and the
/// output `[B, Hq, D]`.
pub(crate) fn run(
    retrieval: Retrieval<CubeBackend>,
    values: CubeTensor,
    config: DecodeConfig,
) -> (CubeTensor, CubeTensor, CubeTensor) {
    let call = Call::new(retrieval, Some(config.longest));
    let strategy = call.strategy();
    match call.sizes.fused().filter(|_| strategy == CisStrategy::Fused) {
        Some(plan) => {
            let output = call.attend(values, plan, config);
            (call.table, call.set_vectors, output)
        }
        None => call.one_by_one(strategy, values, config),
    }
}

impl Call {
    /// Chooses and attends by one cube a range. Where steps may share sets, the ranges that
    /// retrieve are scored by a launch before.
    fn attend(&self, values: CubeTensor, plan: FusedPlan, config: DecodeConfig) -> CubeTensor {
        let FusedPlan { words, planes, room, staged } = plan;
        let blueprint = Blueprint {
            group: self.group,
            head_dim: self.head_dim,
            words,
            parts: KvSplit::None,
            room,
            planes,
            staged: true,
            logits: LogitsSink::None,
            features: config.features,
        };
        let (query, total_kv_heads) = (&self.query, self.total_kv_heads);
        let options = self.config.options;
        let values = into_contiguous(values);
        let [slots, _] = self.keys.shape().dims();
        let ahead = self.ahead();
        let shares = options.block > 1;
        let scratch = Scratch::new(self, true, !shares);
        if shares {
            self.score(&scratch, self.parts(), self.blueprint(UNITS, true, 0, ahead));
        }
        let choice = self.blueprint(PLANE * blueprint.planes, !shares, staged, 2 * ahead);
        let output = empty_like(query, query.shape(), query.dtype);
        let none = self.scratch(1, DType::F32);
        // SAFETY: shapes were checked; the kernel stays within slots, sets and scratch, given
        // ranges that end within the pool and are no longer than the longest.
        unsafe {
            fused_kernel::launch_unchecked(
                &query.client.clone(),
                grid(total_kv_heads),
                CubeDim::new_1d(choice.units as u32),
                self.lanes,
                blueprint.words,
                scratch.choosing(self),
                QueriesLaunch::new(query.clone().into_buffer_arg(), self.config.scale),
                WeightedPoolLaunch::new(
                    self.keys.clone().into_buffer_arg(),
                    values.into_buffer_arg(),
                    none.clone().into_buffer_arg(),
                    none.clone().into_buffer_arg(),
                    slots,
                ),
                // Each cube has a whole range, and only the output is wanted.
                DecodeOutputsLaunch::new(
                    head_outputs([&output, &none], [&none, &none]),
                    none.clone().into_buffer_arg(),
                ),
                choice,
                blueprint,
                elem_type(query.dtype),
            );
        }
        output
    }

    /// Parts in which a range is scored, where steps may share sets. Parts are small, so that the
    /// few ranges that retrieve do not keep the others waiting.
    fn parts(&self) -> usize {
        let most = self.longest().div_ceil(SMALLEST_PART);
        (self.sizes.device.processors * CUBES_EACH / self.total_kv_heads.max(1)).clamp(1, most)
    }

    /// Chooses and attends in launches of their own.
    fn one_by_one(
        self,
        strategy: CisStrategy,
        values: CubeTensor,
        config: DecodeConfig,
    ) -> (CubeTensor, CubeTensor, CubeTensor) {
        let (query, keys) = (self.query.clone(), self.keys.clone());
        let (offsets, lengths) = (self.offsets.clone(), self.lengths.clone());
        let (table, set_vectors, _) = launch::select_slots(&self, strategy);
        let attention = DecodeArgs {
            query,
            keys,
            values,
            log_weights: OptionalFloat::Absent,
            numerators: OptionalFloat::Absent,
            offsets,
            lengths,
            view: OptionalInt::Present(table.clone()),
            config,
        };
        let output = attention.run().output;
        (table, set_vectors, output)
    }
}

/// One cube a range. `choosing` has queries and keys in vectors of elements; `queries` and `pool`
/// have queries, keys and values as pairs of elements in 32-bit words.
#[cube(launch_unchecked, fast_math = FastMath::ReducedPrecision.into())]
fn fused_kernel<E: Float, N: Size, W: Size>(
    choosing: &mut Choosing<E, N>,
    queries: &Queries<Vector<u32, Const<2>>>,
    pool: &WeightedPool<Vector<u32, Const<4>>, Vector<u32, W>>,
    outputs: &mut DecodeOutputs<E, f32>,
    #[comptime] choice: ChoiceBlueprint,
    #[comptime] blueprint: Blueprint,
    #[define(E)] _dtype: ElemType,
) {
    let kv_head = CUBE_POS;
    if kv_head >= choosing.ranges.total_kv_heads {
        terminate!();
    }
    let start = choosing.ranges.offsets[kv_head] as usize;
    let length = choosing.ranges.lengths[kv_head];
    let chosen = step::<E, N>(choosing, kv_head, choice);
    let own = kv_head * comptime!(row(choice.sets, choice.width));
    let mut eviction = ComptimeOption::<Eviction>::new_None();
    let indexer = SlotIndexer::of_set(&chosen, start, max(length, 0i32) as usize, own);
    let part = RangePart {
        kv_head,
        length,
        split: 0usize,
        splits: 1usize,
        indexer,
        sequence: Sequence::alone(kv_head),
    };
    attend::<E, W>(queries, pool, &choosing.ranges.table, &part, outputs, &mut eviction, blueprint);
}
