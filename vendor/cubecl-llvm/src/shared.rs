//! What the targets of the LLVM path have in common.

/// The device features that the LLVM path can lower.
pub mod lowered_features {
    use cubecl_core::ir::DeviceProperties;

    /// A GPU family that the LLVM path would lower to.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum GpuTarget {
        /// NVIDIA GPUs.
        Nvptx,
    }

    /// Would withdraw the features that the LLVM path cannot lower; it lowers nothing here, and its
    /// compiler says so in a clearer way than missing features would.
    pub fn restrict_features(_properties: &mut DeviceProperties, _target: GpuTarget) {}
}
