//! The arguments and results of `nearest_slots` as backends take and return them.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, ExtensionType};

use super::NearestSlotsOptions;

/// The lists that are paired.
#[derive(ExtensionType)]
pub(crate) struct NearestSlotsArgs<B: Backend> {
    /// `[S, D]`
    pub(crate) keys: FloatTensor<B>,
    /// Slots that look for a pair, `[P, N]`.
    pub(crate) of: IntTensor<B>,
    /// How many of each row count, `[P]`.
    pub(crate) of_counts: IntTensor<B>,
    /// Slots that are looked among, `[P, M]`.
    pub(crate) among: IntTensor<B>,
    /// How many of each row count, `[P]`.
    pub(crate) among_counts: IntTensor<B>,
    /// With a kernel that serves, or any on a CPU.
    pub(crate) options: NearestSlotsOptions,
}
