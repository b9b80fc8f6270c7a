//! The slots that a turn of an eviction gives up.

use cubecl::prelude::*;

/// Victims that are chosen before the first of them moves: at most as many as a cube has units.
pub(crate) const VICTIMS: usize = 32;

/// The victims of a turn, up to [`VICTIMS`], in shared memory, in the order in which they go.
#[derive(CubeType)]
pub(super) struct Victims {
    /// Their places in the range when they went.
    pub(super) places: Shared<[i32]>,
    /// Positions of their tokens.
    pub(super) tokens: Shared<[i32]>,
    /// Their scores.
    pub(super) scores: Shared<[f32]>,
    /// Places at which their rows stand before anything moves.
    pub(super) sources: Shared<[i32]>,
    /// Places that rows of others are put into, `NO_INDEX` for none.
    pub(super) targets: Shared<[i32]>,
    /// Places at which the rows that are put there stand before.
    pub(super) replacements: Shared<[i32]>,
    /// Slots that the range has left, and how many victims there are.
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
