//! What the kernel for matrix instructions takes and writes where it also chooses the slots that
//! the next tokens overwrite.

use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

/// A sequence's caches that are held at their limits.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Eviction {
    /// Logarithms of the values' norms, `[S]`.
    pub(super) log_norms: Box<[f32]>,
    /// Slots that each head may hold, `[B, Hkv]`.
    pub(super) limits: Box<[i32]>,
    /// Slots of the newest tokens, `[B, Hkv]`, counted from each range's first, which the kernel
    /// replaces by the slots that the next tokens are written to.
    pub(super) write_slots: Box<[i32]>,
    /// Where heads give up a slot together: importances, `[B * Hkv, stride]`. Each head's row
    /// begins with a line of the L2 cache.
    pub(super) importances: Box<[f32]>,
    /// Where heads give up a slot together: a sequence's arrivals, `[B, ARRIVALS]`, 0 before and
    /// behind the kernel.
    pub(super) arrivals: Box<[u32]>,
}

/// What an eviction asks of the attention kernel.
pub(crate) struct Evicts {
    /// `[S]`, contiguous, as the tensors that follow.
    pub(crate) log_norms: CubeTensor,
    /// `[B, Hkv]`
    pub(crate) limits: CubeTensor,
    /// Slots of the newest tokens, `[B, Hkv]`; where the kernel decides, it replaces them by the
    /// slots that the next tokens are written to.
    pub(crate) write_slots: CubeTensor,
    /// A sequence's arrivals, `[B, ARRIVALS]`: 0 before and behind the kernel.
    pub(crate) arrivals: CubeTensor,
    /// Whether the newest token is no candidate.
    pub(crate) spares_newest: bool,
    /// Whether nothing else is kept, and importances are not wanted: the kernel may decide then.
    pub(crate) alone: bool,
    /// Heads of a sequence that give up the same slot, or 0 where each has its own.
    pub(crate) together: usize,
}

impl Evicts {
    /// As the kernel takes it.
    pub(super) fn launched(&self, importances: CubeTensor) -> EvictionLaunch {
        let arg = |tensor: &CubeTensor| tensor.clone().into_buffer_arg();
        EvictionLaunch::new(
            arg(&self.log_norms),
            arg(&self.limits),
            arg(&self.write_slots),
            importances.into_buffer_arg(),
            arg(&self.arrivals),
        )
    }
}
