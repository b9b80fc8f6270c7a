//! Arguments of both kernels of `nearest_slots`.

use cubecl::prelude::*;

/// The slots that get partners, and the possible partners.
#[derive(CubeType, CubeLaunch)]
pub(super) struct SlotLists {
    /// `[R, width]`
    pub(super) of: Box<[i32]>,
    /// Slots of each row of `of`, `[R]`.
    pub(super) of_counts: Box<[i32]>,
    /// `[R, others]`
    pub(super) among: Box<[i32]>,
    /// Slots of each row of `among`, `[R]`.
    pub(super) among_counts: Box<[i32]>,
    /// `R`
    pub(super) rows: usize,
    pub(super) width: usize,
    pub(super) others: usize,
}

/// The partners that are found.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Nearest {
    /// Places of the partners in `among`, `[R, width]`, [`NO_SLOT`] for none.
    ///
    /// [`NO_SLOT`]: crate::components::sentinels::NO_SLOT
    pub(super) places: Box<[i32]>,
    /// `[R, width]`
    pub(super) cosines: Box<[f32]>,
}
