//! The backend trait of sums over peers, for CUDA devices.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, backend_extension};
use burn_cubecl::CubeBackend;

#[backend_extension(Cube)]
pub(crate) trait PeerOps: Backend {
    /// Adds `x` of all ranks. `addresses` has the addresses of their inboxes. Counts up `turns` in
    /// place.
    fn sum_over_peers(
        x: FloatTensor<Self>,
        addresses: IntTensor<Self>,
        turns: IntTensor<Self>,
        rank: usize,
        ranks: usize,
    ) -> FloatTensor<Self>;
}

impl PeerOps for CubeBackend {
    fn sum_over_peers(
        x: FloatTensor<Self>,
        addresses: IntTensor<Self>,
        turns: IntTensor<Self>,
        rank: usize,
        ranks: usize,
    ) -> FloatTensor<Self> {
        super::launch::run(x, addresses, turns, rank, ranks)
    }
}
