//! What both kernels take and write.

use cubecl::prelude::*;

/// The slots that others are sought for, and those others.
#[derive(CubeType, CubeLaunch)]
pub(super) struct SlotLists {
    /// `[R, width]`
    pub(super) of: Box<[i32]>,
    /// How many of them count, `[R]`.
    pub(super) of_counts: Box<[i32]>,
    /// `[R, others]`
    pub(super) among: Box<[i32]>,
    /// How many of them count, `[R]`.
    pub(super) among_counts: Box<[i32]>,
    /// `R`
    pub(super) rows: usize,
    pub(super) width: usize,
    pub(super) others: usize,
}

/// What is found.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Nearest {
    /// Places in the others' list, `[R, width]`, [`NO_SLOT`] for none.
    ///
    /// [`NO_SLOT`]: crate::components::sentinels::NO_SLOT
    pub(super) places: Box<[i32]>,
    /// `[R, width]`
    pub(super) cosines: Box<[f32]>,
}
