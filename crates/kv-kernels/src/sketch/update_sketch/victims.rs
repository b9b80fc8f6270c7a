//! The slots that a turn of a bulk eviction evicts.

use cubecl::prelude::*;

/// The most victims that are chosen before the first of them moves. A cube has at least as many
/// units.
pub(crate) const VICTIMS: usize = 32;

/// The victims of a turn, up to [`VICTIMS`], in shared memory, in the order of their eviction.
#[derive(CubeType)]
pub(super) struct Victims {
    /// The victims' places in the range at their eviction.
    pub(super) places: Shared<[i32]>,
    /// Positions of the victims' tokens.
    pub(super) tokens: Shared<[i32]>,
    /// The victims' scores.
    pub(super) scores: Shared<[f32]>,
    /// Places of the victims' rows before anything moves.
    pub(super) sources: Shared<[i32]>,
    /// Places that other rows move into, `NO_INDEX` for none.
    pub(super) targets: Shared<[i32]>,
    /// Places of these rows before anything moves.
    pub(super) replacements: Shared<[i32]>,
    /// The slots that the range has left, and the number of victims.
    pub(super) state: Shared<[i32]>,
}

#[cube]
impl Victims {
    /// Shared memory for a turn's victims.
    pub(super) fn room() -> Victims {
        Victims {
            places: Shared::<[i32]>::new_slice(VICTIMS),
            tokens: Shared::<[i32]>::new_slice(VICTIMS),
            scores: Shared::<[f32]>::new_slice(VICTIMS),
            sources: Shared::<[i32]>::new_slice(VICTIMS),
            targets: Shared::<[i32]>::new_slice(VICTIMS),
            replacements: Shared::<[i32]>::new_slice(VICTIMS),
            state: Shared::<[i32]>::new_slice(2usize),
        }
    }
}
