//! How the kernels after the attention compare slots: which slots are no candidates, whether the
//! records of importances or this step's importances are compared, and which of equal slots goes.

use cubecl::prelude::*;

use crate::attention::decode::importance_records::ImportanceRecords;
use crate::components::argmin::block_argmin;
use crate::components::sentinels::{INFINITE_IMPORTANCE, NO_INDEX, NO_MINIMUM};
use crate::components::softmax::is_number;

/// Which slots are kept whatever their importance, and whether the oldest of equal slots goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Rules {
    /// Whether sinks and recents are kept.
    pub(super) guarded: bool,
    pub(super) spares_newest: bool,
    /// Whether importances within a factor are equal. The oldest of equal slots then goes, and
    /// otherwise the lowest.
    pub(super) ties: bool,
}

/// What a comparison reads beside importances.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Comparison {
    /// Positions of the slots' tokens, `[S]`, read where [`Rules::guarded`] or [`Rules::ties`].
    positions: Box<[i32]>,
    /// Positions of the newest tokens, `[B]`, read where [`Rules::guarded`].
    now: Box<[i32]>,
    /// First tokens that are kept.
    sinks: i32,
    /// Last tokens that are kept.
    recents: i32,
    /// `1 / ln f`, where importances within a factor `f` are equal.
    levels: f32,
    /// The records of importances, where they are compared.
    pub(super) records: ComptimeOption<ImportanceRecords>,
}

/// A head or a sequence whose slots are compared.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Compared {
    /// The first slot in the pool.
    start: usize,
    /// The newest token's slot, counted from the first.
    newest: i32,
    /// The newest token's position.
    now: i32,
    /// [`ImportanceRecords::growth_of`] this step.
    growth: f32,
}

/// The least important of some slots.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Least {
    /// Its importance or record, or the level of either where [`Rules::ties`].
    pub(super) value: f32,
    /// Its token's position, where [`Rules::ties`].
    pub(super) position: i32,
    /// The slot, counted from the first slot of its head; [`NO_INDEX`] for none.
    pub(super) slot: i32,
}

#[cube]
impl Least {
    /// The least of no slots.
    pub(super) fn none() -> Least {
        Least {
            value: f32::new(INFINITE_IMPORTANCE),
            position: i32::new(NO_INDEX as i64),
            slot: i32::new(NO_INDEX as i64),
        }
    }

    /// Becomes the other where that is less.
    pub(super) fn lower_to(&mut self, other: Least, #[comptime] rules: Rules) {
        let mut less = other.value < self.value || self.slot == NO_INDEX;
        if comptime!(rules.ties) {
            less = less || (other.value == self.value && other.position < self.position);
        }
        less = less && other.slot != NO_INDEX;
        self.value = select(less, other.value, self.value);
        self.position = select(less, other.position, self.position);
        self.slot = select(less, other.slot, self.slot);
    }
}

#[cube]
impl Comparison {
    /// The head or sequence whose slots begin at `start`.
    pub(super) fn of(
        &self,
        sequence: usize,
        start: usize,
        newest: i32,
        #[comptime] rules: Rules,
    ) -> Compared {
        let mut now = 0i32;
        if comptime!(rules.guarded) {
            now = self.now[sequence];
        }
        let mut growth = 0.0f32;
        #[comptime]
        if let ComptimeOption::Some(records) = &self.records {
            growth = records.growth_of(sequence);
        }
        Compared { start, newest, now, growth }
    }

    /// Lowers `best` to a slot of this importance, whose record it raises.
    pub(super) fn compare(
        &mut self,
        best: &mut Least,
        importance: f32,
        slot_in_head: usize,
        among: &Compared,
        #[comptime] rules: Rules,
    ) {
        let slot = among.start + slot_in_head;
        let new = i32::cast_from(slot_in_head) == among.newest;
        let mut value = importance;
        #[comptime]
        if let ComptimeOption::Some(records) = &mut self.records {
            let before = records.before(slot, new);
            value = records.raise(slot, before, new, importance, among.growth);
        }
        let mut goes = value != f32::new(INFINITE_IMPORTANCE) && is_number(value);
        if comptime!(rules.spares_newest) {
            goes = goes && !new;
        }
        let mut position = i32::new(NO_INDEX as i64);
        if comptime!(rules.guarded || rules.ties) {
            position = self.positions[slot];
        }
        if comptime!(rules.guarded) {
            goes = goes && position >= self.sinks && position <= among.now - self.recents;
        }
        if comptime!(rules.ties) {
            value = ((value - among.growth) * self.levels).floor();
        }
        let nowhere = i32::new(NO_INDEX as i64);
        let own = Least { value, position, slot: select(goes, slot_in_head as i32, nowhere) };
        best.lower_to(own, rules);
    }
}

/// The least among the units of a cube. All units get it.
#[cube]
pub(super) fn least_of_cube(
    own: Least,
    #[comptime] rules: Rules,
    #[comptime] planes: usize,
) -> Least {
    let (value, lowest) = block_argmin(own.value, own.slot, planes);
    let mut least = Least { value, position: own.position, slot: lowest };
    if comptime!(rules.ties) {
        // Positions up to 2²⁴ are exact in f32.
        let equal = own.value == value && own.slot != NO_INDEX;
        let position = select(equal, f32::cast_from(own.position), f32::new(NO_MINIMUM));
        let (oldest, slot) = block_argmin(position, own.slot, planes);
        least.position = i32::cast_from(oldest);
        least.slot = select(lowest == NO_INDEX, lowest, slot);
    }
    least
}
