//! Launches `evicting_attention` on CubeCL devices: the attention, then the kernels that evict
//! where the attention's launch has not.

use burn::backend::{DType, Shape, TensorMetadata};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::EvictionScope;
use super::args::{Evicted, EvictingArgs};
use super::comparison::{ComparisonLaunch, Rules};
use super::kernel::{
    self, Blueprint, CandidatesLaunch, HeadsLaunch, SlotImportancesLaunch, SplitHeadsLaunch,
    TogetherBlueprint,
};
use crate::attention::decode::args::DecodeArgs;
use crate::attention::decode::eviction::Evicts;
use crate::attention::decode::importance_records::Remembered;
use crate::backend::client::{elem_type, empty_like, grid, processors, widest_cube};
use crate::backend::optional::{OptionalFloat, OptionalInt};

/// Units of a cube that decides for a head, where there are many heads.
const UNITS: usize = 256;
/// The most cubes that share a head.
const MOST_SLICES: usize = 64;
/// Units of a cube that compares candidates: one for each candidate.
const CHOOSERS: usize = MOST_SLICES;

/// The least important slot from each cube that shares a head or a sequence, for the kernel that
/// compares them.
struct Candidates {
    values: CubeTensor,
    positions: CubeTensor,
    slots: CubeTensor,
    slices: usize,
}

impl Candidates {
    /// Memory for `choices` decisions, each shared by `slices` cubes.
    fn new(query: &CubeTensor, choices: usize, slices: usize) -> Self {
        let cubes = choices * slices;
        Self {
            values: empty_like(query, Shape::from([cubes]), DType::F32),
            positions: empty_like(query, Shape::from([cubes]), DType::I32),
            slots: empty_like(query, Shape::from([cubes]), DType::I32),
            slices,
        }
    }

    fn launched(&self) -> CandidatesLaunch {
        let arg = |tensor: &CubeTensor| tensor.clone().into_buffer_arg();
        let (values, positions) = (arg(&self.values), arg(&self.positions));
        CandidatesLaunch::new(values, positions, arg(&self.slots), self.slices)
    }
}

/// Attends and evicts.
pub(super) fn run(eviction: EvictingArgs<CubeBackend>) -> Evicted<CubeBackend> {
    let config = eviction.config;
    let query = eviction.query.clone();
    let [_, _, head_dim] = query.shape().dims();
    let [batch, kv_heads] = eviction.offsets.shape().dims();
    let client = query.client.clone();
    let longest = config.attention.longest;
    let together = config.scope == EvictionScope::Layer;
    let in_launch = config.strategy.evicts_in_launch();
    let log_norms = into_contiguous(eviction.log_norms);
    let [limits, write_slots, arrivals] =
        [eviction.limits, eviction.write_slots, eviction.arrivals].map(into_contiguous);
    let remembered = |records: CubeTensor, now: CubeTensor| Remembered {
        records: into_contiguous(records),
        now: into_contiguous(now),
        growth: config.growth,
        kv_heads,
    };
    let evicts = Evicts {
        log_norms: log_norms.clone(),
        limits: limits.clone(),
        write_slots: write_slots.clone(),
        arrivals: arrivals.clone(),
        spares_newest: config.spares_newest,
        in_launch,
        together: if together { kv_heads } else { 0 },
        records: eviction
            .records
            .into_option()
            .zip(eviction.steps.into_option())
            .map(|(records, now)| remembered(records, now)),
    };
    let attention = DecodeArgs::<CubeBackend> {
        query: eviction.query,
        keys: eviction.keys,
        values: eviction.values,
        log_weights: eviction.log_weights,
        numerators: OptionalFloat::Absent,
        offsets: eviction.offsets.clone(),
        lengths: eviction.lengths.clone(),
        view: OptionalInt::Absent,
        config: config.attention,
    };
    let attended = attention.run_evicting(&evicts);

    // Heads that evict one common slot sum their importances.
    let importance = config.importance || together;
    let slots = log_norms.shape().num_elements();
    let shape = Shape::from([if importance && !in_launch { slots } else { 1 }]);
    let importances = empty_like(&query, shape, DType::F32);
    let records = evicts.records.as_ref();
    let raised = OptionalFloat::of(records.map(|own| own.records.clone()));
    if in_launch {
        let (output, records) = (attended.output, raised);
        return Evicted { output, write_slots, arrivals, records, importance: importances };
    }
    let total_kv_heads = batch * kv_heads;
    // Where heads do not fill the device, each gets as many units as one cube can have. Several
    // cubes share a longer head, and another kernel compares their candidates.
    let hardware = &client.properties().hardware;
    let processors = processors(&client);
    let (widest, _) = widest_cube(&client);
    let planes = |units: usize| units.div_ceil((hardware.plane_size_min as usize).max(1));
    let units = if total_kv_heads > processors { UNITS.min(widest) } else { widest };
    let slices = longest.div_ceil(units * kernel::AHEAD).clamp(1, MOST_SLICES);
    let lanes = 4;
    let rules = Rules {
        guarded: config.guarded,
        spares_newest: config.spares_newest,
        ties: config.levels.is_some(),
    };
    let blueprint = Blueprint {
        group: attended.group,
        columns: attended.group * head_dim / lanes,
        units,
        planes: planes(units),
        split: attended.splits > 1,
        whole: slices == 1 && !together,
        importance,
        rules,
    };
    let [offsets, lengths] = [eviction.offsets, eviction.lengths].map(into_contiguous);
    let [positions, now] =
        [eviction.positions, eviction.now].map(|tensor| tensor.or_stand_in(&offsets));
    let arg = |tensor: &CubeTensor| tensor.clone().into_buffer_arg();
    let heads = || {
        let (offsets, lengths) = (arg(&offsets), arg(&lengths));
        let (limits, write_slots) = (arg(&limits), arg(&write_slots));
        HeadsLaunch::new(offsets, lengths, limits, write_slots, total_kv_heads, kv_heads)
    };
    // Heads that evict one common slot share the records of the first head's slots.
    let comparison = |records: Option<&Remembered>| {
        ComparisonLaunch::new(
            arg(&positions),
            arg(&now),
            config.sinks,
            config.recents,
            config.levels.unwrap_or_default(),
            records.map(Remembered::launched).into(),
        )
    };
    let candidates = Candidates::new(&query, total_kv_heads, slices);
    // SAFETY: shapes were checked; the kernels stay within the ranges and the parts of the heads.
    unsafe {
        kernel::decide_kernel::launch_unchecked(
            &client,
            grid(total_kv_heads * slices),
            CubeDim::new_1d(units as u32),
            lanes,
            SplitHeadsLaunch::new(
                attended.partial.into_buffer_arg(),
                attended.stats.into_buffer_arg(),
                arg(&attended.output),
                attended.splits,
            ),
            SlotImportancesLaunch::new(
                attended.scores.into_buffer_arg(),
                log_norms.into_buffer_arg(),
                arg(&importances),
            ),
            heads(),
            comparison(records.filter(|_| !together)),
            candidates.launched(),
            blueprint,
            elem_type(query.dtype),
        );
        // For heads that evict one common slot, each cube reads a share of the slots.
        let (choices, count, slices, candidates) = match together {
            true => {
                let slices = longest.div_ceil(widest).clamp(1, MOST_SLICES);
                let candidates = Candidates::new(&query, batch, slices);
                kernel::decide_together_kernel::launch_unchecked(
                    &client,
                    grid(batch * slices),
                    CubeDim::new_1d(widest as u32),
                    arg(&importances),
                    heads(),
                    comparison(records),
                    candidates.launched(),
                    batch,
                    TogetherBlueprint {
                        heads: kv_heads,
                        planes: planes(widest),
                        whole: slices == 1,
                        rules,
                    },
                );
                (batch, kv_heads, slices, candidates)
            }
            false => (total_kv_heads, 1, slices, candidates),
        };
        if slices > 1 {
            kernel::choose_kernel::launch_unchecked(
                &client,
                grid(choices),
                CubeDim::new_1d(CHOOSERS as u32),
                candidates.launched(),
                heads(),
                choices,
                count,
                rules,
                planes(CHOOSERS),
            );
        }
    }
    let (output, records) = (attended.output, raised);
    Evicted { output, write_slots, arrivals, records, importance: importances }
}
