//! What steps remember of slots' importances, for evictions by the largest importance so far,
//! decayed: `S_t = max(γ S_{t−1}, I_t)`.
//!
//! The record of a slot is `max_t (ln I_t − t ln γ)`, so that no step decays it: `ln S_now` is the
//! record plus `now ln γ`, and all slots of a sequence have that term in common. A step writes a
//! record only where its importance breaks it.

use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use crate::components::sentinels::{INFINITE_IMPORTANCE, NO_RECORD};
use crate::components::softmax::is_number;

/// The records of a pool's slots.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct ImportanceRecords {
    /// `[S]`
    records: Box<[f32]>,
    /// Positions of the newest tokens, `[B]`: the number `t` of each sequence's step.
    now: Box<[i32]>,
    /// `−ln γ`
    growth: f32,
    /// `Hkv`
    kv_heads: usize,
}

#[cube]
impl ImportanceRecords {
    /// `−t ln γ` at this step of a sequence.
    pub(crate) fn growth_of(&self, sequence: usize) -> f32 {
        f32::cast_from(self.now[sequence]) * self.growth
    }

    /// [`Self::growth_of`] the sequence of head `kv_head`, counted over all sequences' heads.
    pub(crate) fn growth_of_head(&self, kv_head: usize) -> f32 {
        self.growth_of(kv_head / self.kv_heads)
    }

    /// The record of a slot before this step. A token that was just written has none.
    pub(crate) fn before(&self, slot: usize, new: bool) -> f32 {
        select(new, f32::new(NO_RECORD), self.records[slot])
    }

    /// Raises a slot's record, which was `before`, to an importance `ln I_t` where that breaks it,
    /// and returns the record. NaN and the importance of a slot of weight 0 leave the record, and
    /// are returned.
    pub(crate) fn raise(
        &mut self,
        slot: usize,
        before: f32,
        new: bool,
        importance: f32,
        growth: f32,
    ) -> f32 {
        let counts = is_number(importance) && importance < f32::new(INFINITE_IMPORTANCE);
        let broken = counts && importance + growth > before;
        let record = select(broken, importance + growth, before);
        if broken || new {
            self.records[slot] = record;
        }
        select(counts, record, importance)
    }
}

/// The records on the host.
pub(crate) struct Remembered {
    /// `[S]`, contiguous, as the next tensor is.
    pub(crate) records: CubeTensor,
    /// `[B]`
    pub(crate) now: CubeTensor,
    /// `−ln γ`
    pub(crate) growth: f32,
    /// `Hkv`
    pub(crate) kv_heads: usize,
}

impl Remembered {
    /// The records as a kernel's argument.
    pub(crate) fn launched(&self) -> ImportanceRecordsLaunch {
        let arg = |tensor: &CubeTensor| tensor.clone().into_buffer_arg();
        let (records, now) = (arg(&self.records), arg(&self.now));
        ImportanceRecordsLaunch::new(records, now, self.growth, self.kv_heads)
    }
}
