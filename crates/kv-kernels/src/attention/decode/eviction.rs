//! Arguments of the kernel for matrix instructions where it also chooses the slots that the next
//! tokens overwrite.

use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::importance_records::{ImportanceRecords, Remembered};

/// The tensors that an eviction within the attention kernel reads and writes.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Eviction {
    /// Logarithms of the value norms, `[S]`.
    pub(super) log_norms: Box<[f32]>,
    /// Slots that each head may hold, `[B, Hkv]`.
    pub(super) limits: Box<[i32]>,
    /// Slots of the newest tokens, `[B, Hkv]`, counted from each range's first slot. The kernel
    /// replaces them by the slots that the next tokens are written to.
    pub(super) write_slots: Box<[i32]>,
    /// Importances of slots, `[B * Hkv, stride]`, where heads evict one common slot. Each head's
    /// row begins with a line of the L2 cache.
    pub(super) importances: Box<[f32]>,
    /// Counters of a sequence's arrivals, `[B, ARRIVALS]`, where heads evict one common slot. They
    /// are 0 before and after the kernel.
    pub(super) arrivals: Box<[u32]>,
    /// What steps remember of importances, where the blueprint's [`LogitsSink`] says so.
    ///
    /// [`LogitsSink`]: super::blueprint::LogitsSink
    pub(super) records: ComptimeOption<ImportanceRecords>,
}

/// The eviction that a call asks for, on the host.
pub(crate) struct Evicts {
    /// Logarithms of the value norms, `[S]`. This tensor and the next ones are contiguous.
    pub(crate) log_norms: CubeTensor,
    /// Slots that each head may hold, `[B, Hkv]`.
    pub(crate) limits: CubeTensor,
    /// Slots of the newest tokens, `[B, Hkv]`. Where the attention's launch evicts, it replaces
    /// them by the slots that the next tokens are written to.
    pub(crate) write_slots: CubeTensor,
    /// Counters of a sequence's arrivals, `[B, ARRIVALS]`, 0 before and after the kernel.
    pub(crate) arrivals: CubeTensor,
    /// Whether the newest token is no candidate.
    pub(crate) spares_newest: bool,
    /// Whether the attention's launch evicts. Otherwise a launch behind does.
    pub(crate) in_launch: bool,
    /// Heads of a sequence that evict one common slot, or 0 where each head evicts its own.
    pub(crate) together: usize,
    /// What steps remember of importances, where they do.
    pub(crate) records: Option<Remembered>,
}

impl Evicts {
    /// The eviction as the kernel's argument.
    pub(super) fn launched(&self, importances: CubeTensor) -> EvictionLaunch {
        let arg = |tensor: &CubeTensor| tensor.clone().into_buffer_arg();
        EvictionLaunch::new(
            arg(&self.log_norms),
            arg(&self.limits),
            arg(&self.write_slots),
            importances.into_buffer_arg(),
            arg(&self.arrivals),
            self.records.as_ref().map(Remembered::launched).into(),
        )
    }
}
