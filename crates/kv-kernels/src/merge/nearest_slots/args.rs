//! The arguments and results of `nearest_slots` as backends take and return them.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType};

use super::NearestSlotsOptions;

/// The two lists of slots.
#[derive(ExtensionType)]
pub(crate) struct NearestSlotsArgs<B: Backend> {
    /// `[S, D]`
    pub(crate) keys: FloatTensor<B>,
    /// Slots that each get a partner, `[P, N]`.
    pub(crate) of: IntTensor<B>,
    /// Slots of each row of `of`, `[P]`.
    pub(crate) of_counts: IntTensor<B>,
    /// Possible partners, `[P, M]`.
    pub(crate) among: IntTensor<B>,
    /// Slots of each row of `among`, `[P]`.
    pub(crate) among_counts: IntTensor<B>,
    /// The options, with a kernel that can run the call; on a CPU any kernel.
    pub(crate) options: NearestSlotsOptions,
}
