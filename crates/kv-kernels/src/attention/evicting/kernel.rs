//! Kernels after the attention, which evict where the attention's launch could not. They combine
//! the parts of heads, compute importances, and choose each head's slot of least importance.

use cubecl::prelude::*;

use super::comparison::{Comparison, Least, Rules, least_of_cube};
use crate::attention::decode::argmin_importance::next_write_slot;
use crate::components::sentinels::{INFINITE_IMPORTANCE, LOWEST_LOGIT, WEIGHTLESS_LOGIT};
use crate::components::softmax::{divisor, larger};

/// Units that combine the statistics of one query head's parts; a power of two.
const JOINERS: usize = 32;
/// Slots, and parts of the output, that a unit reads before anything else, so that all reads of a
/// cube are under way at once.
pub(super) const AHEAD: usize = 4;

/// Comptime configuration of the decision for a single head.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Blueprint {
    /// Query heads of a key-value head.
    pub(super) group: usize,
    /// Vectors of the output of a group's query heads.
    pub(super) columns: usize,
    /// Units of a cube, at least 256.
    pub(super) units: usize,
    /// The most planes of a cube.
    pub(super) planes: usize,
    /// Whether heads have several parts.
    pub(super) split: bool,
    /// Whether a cube has its whole head, and so decides. Otherwise it leaves a candidate.
    pub(super) whole: bool,
    /// Whether importances are written.
    pub(super) importance: bool,
    pub(super) rules: Rules,
}

/// The key-value heads of a call.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Heads {
    /// First slots, `[B, Hkv]`.
    offsets: Box<[i32]>,
    /// Live slots, `[B, Hkv]`.
    lengths: Box<[i32]>,
    /// Slots that heads may hold, `[B, Hkv]`.
    limits: Box<[i32]>,
    /// Slots of the newest tokens, `[B, Hkv]`. They are replaced by the slots that the next tokens
    /// are written to.
    write_slots: Box<[i32]>,
    /// `B * Hkv`
    total_kv_heads: usize,
    /// `Hkv`
    kv_heads: usize,
}

/// The partial sums of heads, and the output into which they are combined.
#[derive(CubeType, CubeLaunch)]
pub(super) struct SplitHeads<F: Float, N: Size> {
    /// Weighted sums of values of the parts, `[B, Hkv, splits, columns]`, in vectors of `N`.
    partial: Box<[Vector<f32, N>]>,
    /// Largest logit and sum of weights of the parts, `[B, Hkv, splits, G, 2]`.
    stats: Box<[f32]>,
    /// The output, `[B, Hkv, columns]`, in vectors of `N`.
    output: Box<[Vector<F, N>]>,
    /// Parts of a head.
    splits: usize,
}

/// The factors of slots' importances, and the importances.
#[derive(CubeType, CubeLaunch)]
pub(super) struct SlotImportances {
    /// `[S, G]`
    logits: Box<[f32]>,
    /// Logarithms of the value norms, `[S]`.
    log_norms: Box<[f32]>,
    /// Logarithms of importances, `[S]`, written where [`Blueprint::importance`].
    importances: Box<[f32]>,
}

/// The least important slot that each cube has found. `choose_kernel` compares them.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Candidates {
    /// [`Least::value`], `[choices, slices]`.
    values: Box<[f32]>,
    /// [`Least::position`], `[choices, slices]`.
    positions: Box<[i32]>,
    /// [`Least::slot`], `[choices, slices]`.
    slots: Box<[i32]>,
    /// Cubes that share the slots of a head, or of a sequence whose heads evict one common slot.
    slices: usize,
}

#[cube]
impl Candidates {
    fn write(&mut self, cube: usize, least: Least) {
        self.values[cube] = least.value;
        self.positions[cube] = least.position;
        self.slots[cube] = least.slot;
    }

    fn read(&self, cube: usize) -> Least {
        Least { value: self.values[cube], position: self.positions[cube], slot: self.slots[cube] }
    }
}

/// Comptime configuration of the decision for all heads of a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct TogetherBlueprint {
    pub(super) heads: usize,
    /// The most planes of a cube.
    pub(super) planes: usize,
    /// Whether a cube has all slots of a sequence, and so decides. Otherwise it leaves a candidate.
    pub(super) whole: bool,
    pub(super) rules: Rules,
}

/// Combines parts and decides, with `candidates.slices` cubes a key-value head. Each cube takes a
/// share of the slots, and of the output's columns.
#[cube(launch_unchecked)]
pub(super) fn decide_kernel<F: Float, N: Size>(
    split_heads: &mut SplitHeads<F, N>,
    slots: &mut SlotImportances,
    heads: &mut Heads,
    comparison: &mut Comparison,
    candidates: &mut Candidates,
    #[comptime] blueprint: Blueprint,
    #[define(F)] _dtype: ElemType,
) {
    let group = blueprint.group.comptime();
    let columns = blueprint.columns.comptime();
    let units = blueprint.units.comptime();
    let rules = blueprint.rules.comptime();
    let each = comptime!(columns / group);
    let cube = CUBE_POS;
    let (slices, splits) = (candidates.slices, split_heads.splits);
    if cube >= heads.total_kv_heads * slices {
        terminate!();
    }
    let (kv_head, slice) = (cube / slices, cube % slices);
    let unit = UNIT_POS as usize;

    let start = heads.offsets[kv_head] as usize;
    let length = heads.lengths[kv_head] as usize;
    let full = heads.lengths[kv_head] >= heads.limits[kv_head];
    let newest = heads.write_slots[kv_head];
    let share = length.div_ceil(slices);
    let first = min(slice * share, length);
    let mut end = min(first + share, length);
    // A head below its limit evicts nothing.
    let remembers = comptime!(comparison.records.is_some());
    if comptime!(!blueprint.importance && !remembers) && !full {
        end = first;
    }
    let mut early = Array::<f32>::new(comptime!(AHEAD * group));
    let mut early_norms = Array::<f32>::new(AHEAD);
    #[unroll]
    for a in 0..AHEAD {
        let slot_in_head = first + a * units + unit;
        if slot_in_head < end {
            #[unroll]
            for g in 0..group {
                early[a * group + g] = slots.logits[(start + slot_in_head) * group + g];
            }
            early_norms[a] = slots.log_norms[start + slot_in_head];
        }
    }

    // This slice's columns of the output. The cube's units are divided among them.
    let own_columns = columns.runtime().div_ceil(slices);
    let rows = min(max(CUBE_DIM as usize / own_columns, 1usize), splits);
    let row = unit / own_columns;
    let early_column = slice * own_columns + unit % own_columns;
    let mut early_parts = Array::<Vector<f32, N>>::new(AHEAD);
    #[unroll]
    for a in 0..AHEAD {
        let split = row + a * rows;
        early_parts[a] = Vector::new(0.0f32);
        if row < rows && early_column < columns && split < splits {
            early_parts[a] =
                split_heads.partial[(kv_head * splits + split) * columns + early_column];
        }
    }

    // The maximum and the sum of weights of each query head: several units read a head's parts, and
    // a tree reduces their results.
    let joiners = comptime!(if blueprint.split { JOINERS } else { 1 });
    let mut maxima = Shared::<[f32]>::new_slice(comptime!(group * joiners));
    let mut sums = Shared::<[f32]>::new_slice(comptime!(group * joiners));
    if unit < comptime!(group * joiners) {
        let (g, joiner) = (unit / joiners, unit % joiners);
        let mut top = f32::new(LOWEST_LOGIT);
        let mut sum = 0.0f32;
        let mut split = joiner;
        while split < splits {
            let at = ((kv_head * splits + split) * group + g) * 2;
            let max = larger(top, split_heads.stats[at]);
            sum = sum * (top - max).exp()
                + split_heads.stats[at + 1] * (split_heads.stats[at] - max).exp();
            top = max;
            split += joiners;
        }
        maxima[unit] = top;
        sums[unit] = sum;
    }
    sync_cube();
    #[unroll]
    for level in 1..comptime!(joiners.ilog2() + 1) {
        let stride = comptime!(joiners >> level);
        if unit < comptime!(group * joiners) && unit % joiners < stride {
            let max = larger(maxima[unit], maxima[unit + stride]);
            sums[unit] = sums[unit] * (maxima[unit] - max).exp()
                + sums[unit + stride] * (maxima[unit + stride] - max).exp();
            maxima[unit] = max;
        }
        sync_cube();
    }

    let mut parts = Shared::<[Vector<f32, N>]>::new_slice(units);
    #[unroll]
    for turn in 0..comptime!(columns.div_ceil(units)) {
        // More columns than units are taken in turns, one unit a column.
        let again = comptime!(turn * units);
        let column = early_column + again;
        let mut total = Vector::<f32, N>::new(0.0f32);
        let live = row < rows && column < columns && unit % own_columns + again < own_columns;
        if live {
            let g = column / each;
            let top = maxima[g * joiners];
            let mut split = row;
            if comptime!(turn == 0) {
                #[unroll]
                for a in 0..AHEAD {
                    if split < splits {
                        let part = kv_head * splits + split;
                        let factor = (split_heads.stats[(part * group + g) * 2] - top).exp();
                        total += early_parts[a] * Vector::new(factor);
                    }
                    split += rows;
                }
            }
            while split < splits {
                let part = kv_head * splits + split;
                let factor = (split_heads.stats[(part * group + g) * 2] - top).exp();
                total += split_heads.partial[part * columns + column] * Vector::new(factor);
                split += rows;
            }
        }
        if comptime!(blueprint.split) {
            parts[unit] = total;
            sync_cube();
            if live && row == 0 {
                for other in 1..rows {
                    total += parts[other * own_columns + unit];
                }
            }
            sync_cube();
        }
        if live && row == 0 {
            let result = total / Vector::new(divisor(sums[column / each * joiners]));
            split_heads.output[kv_head * columns + column] = Vector::cast_from(result);
        }
    }

    let mut normalisers = Array::<f32>::new(group);
    #[unroll]
    for g in 0..group {
        normalisers[g] = maxima[g * joiners] + sums[g * joiners].ln();
    }
    let among = comparison.of(kv_head / heads.kv_heads, start, newest, rules);
    let mut best = Least::none();
    let mut own = Array::<f32>::new(group);
    #[unroll]
    for a in 0..AHEAD {
        let slot_in_head = first + a * units + unit;
        if slot_in_head < end {
            #[unroll]
            for g in 0..group {
                own[g] = early[a * group + g];
            }
            let value = importance_of(&own, &normalisers, early_norms[a], group);
            if comptime!(blueprint.importance) {
                slots.importances[start + slot_in_head] = value;
            }
            comparison.compare(&mut best, value, slot_in_head, &among, rules);
        }
    }
    let mut slot_in_head = first + comptime!(AHEAD * units) + unit;
    while slot_in_head < end {
        #[unroll]
        for g in 0..group {
            own[g] = slots.logits[(start + slot_in_head) * group + g];
        }
        let value = importance_of(&own, &normalisers, slots.log_norms[start + slot_in_head], group);
        if comptime!(blueprint.importance) {
            slots.importances[start + slot_in_head] = value;
        }
        comparison.compare(&mut best, value, slot_in_head, &among, rules);
        slot_in_head += units;
    }
    let least = least_of_cube(best, rules, blueprint.planes);
    if unit == 0 {
        if comptime!(blueprint.whole) {
            heads.write_slots[kv_head] =
                next_write_slot(least.slot, newest, full, heads.lengths[kv_head]);
        } else {
            candidates.write(cube, least);
        }
    }
}

/// Chooses among the candidates, with one cube for each of `choices` decisions. A decision is for
/// `count` heads, which evict one common slot.
#[cube(launch_unchecked)]
pub(super) fn choose_kernel(
    candidates: &Candidates,
    heads: &mut Heads,
    choices: usize,
    #[comptime] count: usize,
    #[comptime] rules: Rules,
    #[comptime] planes: usize,
) {
    let choice = CUBE_POS;
    if choice >= choices {
        terminate!();
    }
    let slices = candidates.slices;
    let newest = heads.write_slots[choice * count];
    let mut best = Least::none();
    // Slices ascend, so the lowest of equal slots stays.
    let mut slice = UNIT_POS as usize;
    while slice < slices {
        best.lower_to(candidates.read(choice * slices + slice), rules);
        slice += CUBE_DIM as usize;
    }
    let least = least_of_cube(best, rules, planes);
    write_next_slots(heads, choice * count, least.slot, newest, count);
}

/// Writes the slots of the next tokens of `count` heads. All units must have read `newest`, and
/// have `argmin`.
#[cube]
fn write_next_slots(
    heads: &mut Heads,
    first: usize,
    argmin: i32,
    newest: i32,
    #[comptime] count: usize,
) {
    let mut head = UNIT_POS as usize;
    while head < count {
        let own = heads.lengths[first + head];
        heads.write_slots[first + head] =
            next_write_slot(argmin, newest, own >= heads.limits[first + head], own);
        head += CUBE_DIM as usize;
    }
}

/// Decides for all heads of a sequence, with `candidates.slices` cubes a sequence. Each cube takes
/// a share of the slots; heads are equally long. `importance` `[S]` is what [`decide_kernel`] has
/// written.
#[cube(launch_unchecked)]
pub(super) fn decide_together_kernel(
    importance: &[f32],
    heads: &mut Heads,
    comparison: &mut Comparison,
    candidates: &mut Candidates,
    batch: usize,
    #[comptime] blueprint: TogetherBlueprint,
) {
    let count = blueprint.heads.comptime();
    let rules = blueprint.rules.comptime();
    let cube = CUBE_POS;
    let slices = candidates.slices;
    if cube >= batch * slices {
        terminate!();
    }
    let (sequence, slice) = (cube / slices, cube % slices);
    let first = sequence * count;
    let mut length = heads.lengths[first];
    #[unroll]
    for head in 1..count {
        length = min(length, heads.lengths[first + head]);
    }
    let length = max(length, 0i32) as usize;
    let newest = heads.write_slots[first];
    let start = heads.offsets[first] as usize;
    let among = comparison.of(sequence, start, newest, rules);
    let mut best = Least::none();
    let share = length.div_ceil(slices);
    let end = min((slice + 1) * share, length);
    let mut slot_in_head = slice * share + UNIT_POS as usize;
    while slot_in_head < end {
        let mut terms = Array::<f32>::new(count);
        let mut top = f32::new(LOWEST_LOGIT);
        #[unroll]
        for head in 0..count {
            // A slot without weight adds nothing to the sum.
            let own = importance[heads.offsets[first + head] as usize + slot_in_head];
            terms[head] = select(own == f32::new(INFINITE_IMPORTANCE), f32::new(LOWEST_LOGIT), own);
            top = larger(top, terms[head]);
        }
        let mut all = f32::new(INFINITE_IMPORTANCE);
        if top > f32::new(LOWEST_LOGIT) {
            let mut sum = 0.0f32;
            #[unroll]
            for head in 0..count {
                sum += (terms[head] - top).exp();
            }
            all = top + sum.ln();
        }
        comparison.compare(&mut best, all, slot_in_head, &among, rules);
        slot_in_head += CUBE_DIM as usize;
    }
    let least = least_of_cube(best, rules, blueprint.planes);
    if comptime!(blueprint.whole) {
        write_next_slots(heads, first, least.slot, newest, count);
    } else if UNIT_POS == 0 {
        candidates.write(cube, least);
    }
}

/// A slot's log-importance, `ln Σ_g α_g ‖v‖₁`, from its logits.
#[cube]
pub(crate) fn importance_of(
    logits: &Array<f32>,
    normalisers: &Array<f32>,
    log_norm: f32,
    #[comptime] group: usize,
) -> f32 {
    let mut top = f32::new(LOWEST_LOGIT);
    #[unroll]
    for g in 0..group {
        top = larger(top, logits[g] - normalisers[g]);
    }
    let mut value = top + log_norm;
    if comptime!(group > 1) {
        let mut sum = 0.0f32;
        #[unroll]
        for g in 0..group {
            sum += (logits[g] - normalisers[g] - top).exp();
        }
        value += sum.ln();
    }
    select(logits[0] < f32::new(WEIGHTLESS_LOGIT), f32::new(INFINITE_IMPORTANCE), value)
}
