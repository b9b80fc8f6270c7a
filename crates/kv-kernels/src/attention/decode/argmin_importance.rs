//! Finds the slot of least importance in the kernel for matrix instructions (`tensor_core.rs`). The
//! importance of a slot is its contribution to the output of a group's query heads, `Σ_g α_g ‖v‖₁`,
//! with `α_g` the attention probability. A cube reads the logits that it has kept in shared memory,
//! after it has reduced the sums of its planes.
//!
//! No reads from global memory are under way at that time, so the number of instructions sets the
//! time. Importances are therefore logarithms to base 2, which the device's exponential takes, and
//! they are compared as integers.

use cubecl::prelude::*;

use super::eviction::Eviction;
use super::split_kv_reduce::{CubeSums, PLANE, PartialShape};
use crate::components::cluster::{arrive_at_cluster, send_word, wait_for_cluster};
use crate::components::ptx::{exp2, least_of_plane, log2};
use crate::components::sentinels::{
    INFINITE_IMPORTANCE, LOWEST_LOGIT, NO_INDEX, NO_SORT_KEY, WEIGHTLESS_LOGIT,
};
use crate::components::softmax::larger;
use crate::components::sort_key::sort_key_of_number;

/// `log2 e`
pub(super) const LOG2_E: f32 = std::f32::consts::LOG2_E;
/// `ln 2`
const LN_2: f32 = std::f32::consts::LN_2;

/// Slots whose value norms a cube prefetches: a cube with a whole range, and a cube of a cluster.
const AHEAD: [usize; 2] = [4096, 2048];
/// Slots whose importance a unit computes before it checks whether the cube has more.
pub(super) const TOGETHER: usize = 4;

/// Slots whose value norms each unit prefetches.
pub(super) fn ahead(joined: bool, sums: PartialShape) -> usize {
    AHEAD[joined as usize] / (sums.planes * PLANE)
}

/// The slots of a range among which a cube looks for the least importance.
#[derive(CubeType, Clone, Copy)]
pub(super) struct CandidateSlots {
    /// The range, counted over all sequences' key-value heads.
    pub(super) kv_head: usize,
    /// The range's first slot in the pool; the cube's first slot, counted from the range's first
    /// slot; and the number of slots that the cube has, 0 where nothing is evicted or recorded.
    pub(super) start: usize,
    pub(super) first: usize,
    pub(super) count: usize,
    /// The index in shared memory of the first query head's logits, and the distance between the
    /// logits of two query heads.
    pub(super) logits_at: usize,
    pub(super) stride: usize,
    /// The slot of the newest token, counted from the range's first slot.
    pub(super) newest: i32,
}

/// Prefetches the logarithms of the value norms of each unit's first slots, where the kernel
/// evicts. The reads overlap with the reduction over planes.
#[cube]
pub(super) fn prefetch_log_norms(
    eviction: &ComptimeOption<Eviction>,
    candidates_of_cube: &CandidateSlots,
    #[comptime] joined: bool,
    #[comptime] sums: PartialShape,
) -> Array<f32> {
    let ahead = comptime!(if eviction.is_some() { ahead(joined, sums) } else { 0 });
    let mut norms = Array::<f32>::new(comptime!(ahead.max(1)));
    #[comptime]
    if let ComptimeOption::Some(eviction) = eviction {
        let first = candidates_of_cube.start + candidates_of_cube.first;
        #[unroll]
        for c in 0..ahead {
            let slot = c * comptime!(sums.planes * PLANE) + UNIT_POS as usize;
            norms[c] = 0.0f32;
            if slot < candidates_of_cube.count {
                norms[c] = eviction.log_norms[first + slot];
            }
        }
    }
    norms
}

/// Returns the least importance among the cube's slots, as a sort key, and the lowest slot that has
/// it, counted from the range's first slot. Only the first plane gets them. `norms` holds the
/// prefetched logarithms of this unit's value norms. Where steps remember, records are compared in
/// place of importances, and raised.
#[cube]
pub(super) fn argmin_importance(
    cube: &CubeSums,
    norms: &Array<f32>,
    eviction: &mut Eviction,
    candidates_of_cube: &CandidateSlots,
    #[comptime] spares_newest: bool,
    #[comptime] joined: bool,
    #[comptime] sums: PartialShape,
) -> (u32, i32) {
    let group = sums.group.comptime();
    let units = comptime!(sums.planes * PLANE);
    let ahead = comptime!(ahead(joined, sums));
    let mut normalisers = Array::<f32>::new(group);
    #[unroll]
    for g in 0..group {
        normalisers[g] = cube.maxima[g] * LOG2_E + log2(cube.weights[g]);
    }
    let remembers = comptime!(eviction.records.is_some());
    // The newest token's record is raised, too, though it may be no candidate.
    let compared = comptime!(Compared::InHead { spares_newest: spares_newest && !remembers });
    let mut growth = 0.0f32;
    #[comptime]
    if let ComptimeOption::Some(records) = &eviction.records {
        growth = records.growth_of_head(candidates_of_cube.kv_head);
    }
    let mut best = f32::new(INFINITE_IMPORTANCE);
    let mut best_slot = usize::new(0);
    #[unroll]
    for round in 0..comptime!(ahead.div_ceil(TOGETHER)) {
        if comptime!(round * TOGETHER * units) < candidates_of_cube.count {
            // No branches: no slot of a round waits for another slot.
            #[unroll]
            for c in comptime!(round * TOGETHER)..comptime!(((round + 1) * TOGETHER).min(ahead)) {
                let slot = c * units + UNIT_POS as usize;
                let mut value = importance(
                    &cube.totals,
                    &normalisers,
                    norms[c],
                    slot,
                    candidates_of_cube,
                    compared,
                    group,
                );
                if remembers {
                    let own = remember(value, eviction, slot, growth, candidates_of_cube);
                    value = spared(own, slot, candidates_of_cube, spares_newest);
                }
                // Slots ascend, so `<` keeps the lowest of equal slots.
                best_slot = select(value < best, slot, best_slot);
                best = min(best, value);
            }
        }
    }
    let mut slot = comptime!(ahead * units) + UNIT_POS as usize;
    while slot < candidates_of_cube.count {
        let norm = eviction.log_norms[candidates_of_cube.start + candidates_of_cube.first + slot];
        let mut value =
            importance(&cube.totals, &normalisers, norm, slot, candidates_of_cube, compared, group);
        if remembers {
            let own = remember(value, eviction, slot, growth, candidates_of_cube);
            value = spared(own, slot, candidates_of_cube, spares_newest);
        }
        best_slot = select(value < best, slot, best_slot);
        best = min(best, value);
        slot += units;
    }

    block_argmin(best, candidates_of_cube.first + best_slot, sums)
}

/// Raises the record of the cube's slot number `slot` to its importance, a logarithm to base 2.
/// Returns the record, or the importance of a slot that is no candidate.
#[cube]
fn remember(
    importance: f32,
    eviction: &mut Eviction,
    slot: usize,
    growth: f32,
    candidates_of_cube: &CandidateSlots,
) -> f32 {
    let mut value = importance;
    #[comptime]
    if let ComptimeOption::Some(records) = &mut eviction.records {
        let new = (candidates_of_cube.first + slot) as i32 == candidates_of_cube.newest;
        if slot < candidates_of_cube.count {
            let slot = candidates_of_cube.start + candidates_of_cube.first + slot;
            let before = records.before(slot, new);
            value = records.raise(slot, before, new, natural(importance), growth);
        }
    }
    value
}

/// The natural logarithm of an importance, from its logarithm to base 2. An infinite importance
/// stays infinite.
#[cube]
pub(super) fn natural(importance: f32) -> f32 {
    let infinite = importance == f32::new(INFINITE_IMPORTANCE);
    select(infinite, importance, importance * f32::new(LN_2))
}

/// The importance, or an infinite one where the slot is the newest token's and that is spared.
#[cube]
fn spared(
    importance: f32,
    slot: usize,
    candidates_of_cube: &CandidateSlots,
    #[comptime] spares_newest: bool,
) -> f32 {
    let mut value = importance;
    if spares_newest {
        let newest = (candidates_of_cube.first + slot) as i32 == candidates_of_cube.newest;
        value = select(newest, f32::new(INFINITE_IMPORTANCE), importance);
    }
    value
}

/// Returns the least importance among a cube's units, as a sort key, and the lowest slot that has
/// it. Only the first plane gets them.
#[cube]
pub(super) fn block_argmin(
    best: f32,
    slot_in_head: usize,
    #[comptime] sums: PartialShape,
) -> (u32, i32) {
    let mut keys = Shared::<[u32]>::new_slice(sums.planes);
    let mut slots = Shared::<[u32]>::new_slice(sums.planes);
    let own = select(
        best < f32::new(INFINITE_IMPORTANCE),
        sort_key_of_number(best),
        u32::new(NO_SORT_KEY as i64),
    );
    let key = least_of_plane(own);
    let nowhere = u32::new(NO_INDEX as i64);
    let slot_in_head = slot_in_head as u32;
    let slot_in_head =
        least_of_plane(select(own == key && key != NO_SORT_KEY, slot_in_head, nowhere));
    let plane = UNIT_POS as usize / PLANE;
    if UNIT_POS as usize == plane * PLANE {
        keys[plane] = key;
        slots[plane] = slot_in_head;
    }
    sync_cube();
    let mut least = u32::new(NO_SORT_KEY as i64);
    let mut least_slot = nowhere;
    if (UNIT_POS as usize) < PLANE {
        let plane = min(UNIT_POS as usize, comptime!(sums.planes - 1));
        let own = keys[plane];
        least = least_of_plane(own);
        least_slot = least_of_plane(select(own == least, slots[plane], nowhere));
    }
    (least, least_slot as i32)
}

/// Whether importances are compared within a head or summed over heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Compared {
    /// Each head evicts its own least important slot. A slot that is no candidate counts as
    /// infinitely important.
    InHead {
        /// Whether the newest token is no candidate.
        spares_newest: bool,
    },
    /// Importances are summed over heads. A slot without weight in a head adds nothing to its sum.
    OverHeads,
}

impl Compared {
    /// The number that stands for the importance of a slot that is no candidate.
    fn absent(self) -> f32 {
        match self {
            Self::InHead { .. } => INFINITE_IMPORTANCE,
            Self::OverHeads => LOWEST_LOGIT,
        }
    }

    fn spares_newest(self) -> bool {
        matches!(self, Self::InHead { spares_newest: true })
    }
}

/// The importance of the cube's slot number `slot`, `log2 Σ_g α_g ‖v‖₁`, or `compared.absent()`
/// where the slot is no candidate. `normalisers` are the query heads' log-sum-exps, to base 2.
#[cube]
pub(super) fn importance(
    totals: &Shared<[f32]>,
    normalisers: &Array<f32>,
    log_norm: f32,
    slot: usize,
    candidates_of_cube: &CandidateSlots,
    #[comptime] compared: Compared,
    #[comptime] group: usize,
) -> f32 {
    let at = candidates_of_cube.logits_at + min(slot, candidates_of_cube.count - 1);
    // `NaN < x` is false: a NaN logit counts as weighted, and its importance is never the least.
    let weightless = totals[at] < f32::new(WEIGHTLESS_LOGIT);
    let mut goes = slot < candidates_of_cube.count && !weightless;
    if comptime!(compared.spares_newest()) {
        goes = goes && (candidates_of_cube.first + slot) as i32 != candidates_of_cube.newest;
    }
    let mut shares = Array::<f32>::new(group);
    let mut top = totals[at] * LOG2_E - normalisers[0];
    shares[0] = top;
    #[unroll]
    for g in 1..group {
        shares[g] = totals[at + g * candidates_of_cube.stride] * LOG2_E - normalisers[g];
        top = larger(top, shares[g]);
    }
    let mut value = top + log_norm * LOG2_E;
    if comptime!(group > 1) {
        let mut sum = 0.0f32;
        #[unroll]
        for g in 0..group {
            sum += exp2(shares[g] - top);
        }
        value += log2(sum);
    }
    select(goes, value, f32::new(comptime!(compared.absent())))
}

/// The slot that a head's next token is written to, counted from the range's first slot. A full
/// head overwrites `argmin`, or the newest token's slot where there is no candidate. Any other head
/// takes the slot after its live slots.
#[cube]
pub(crate) fn next_write_slot(argmin: i32, newest: i32, full: bool, length: i32) -> i32 {
    select(full, select(argmin == NO_INDEX, newest, argmin), length)
}

/// The candidates of a cluster's cubes, in the shared memory of its first cube: sort keys of
/// importances, and slots.
#[derive(CubeType)]
pub(crate) struct ClusterArgmin {
    keys: Shared<[u32]>,
    slots: Shared<[u32]>,
}

#[cube]
impl ClusterArgmin {
    /// Shared memory for the candidates of `cubes` cubes.
    pub(crate) fn room(#[comptime] cubes: usize) -> ClusterArgmin {
        ClusterArgmin {
            keys: Shared::<[u32]>::new_slice(cubes),
            slots: Shared::<[u32]>::new_slice(cubes),
        }
    }
}

/// Sends the part's least important slot, and the sort key of its importance, to the first cube of
/// the cluster.
#[cube]
pub(crate) fn send_argmin(candidates: &ClusterArgmin, key: u32, slot_in_head: i32, rank: usize) {
    if UNIT_POS == 0 {
        send_word(key, candidates.keys.as_ptr(), rank, 0);
        send_word(slot_in_head as u32, candidates.slots.as_ptr(), rank, 0);
    }
    arrive_at_cluster();
}

/// Returns the least important slot among the candidates of the cluster's cubes. Only the first
/// cube gets it.
#[cube]
pub(crate) fn cluster_argmin(
    candidates: &ClusterArgmin,
    rank: usize,
    #[comptime] cubes: usize,
) -> i32 {
    wait_for_cluster();
    let mut best = u32::new(NO_SORT_KEY as i64);
    let mut best_slot_in_head = i32::new(NO_INDEX as i64);
    // Parts ascend, so `<` keeps the lowest of equal slots.
    if rank == 0 {
        #[unroll]
        for cube in 0..cubes {
            let (key, slot_in_head) = (candidates.keys[cube], candidates.slots[cube] as i32);
            if key < best {
                best = key;
                best_slot_in_head = slot_in_head;
            }
        }
    }
    best_slot_in_head
}
