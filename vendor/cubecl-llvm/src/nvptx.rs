//! The NVIDIA target of the LLVM path.

use std::ffi::c_char;

use cubecl_core::ir::attributes::BufferIOAttr;

/// A kernel as PTX, with what its launch needs.
#[derive(Clone, Debug)]
pub struct NvptxModule {
    /// The PTX, ended by a zero byte.
    pub ptx: Vec<c_char>,
    /// The name of the kernel in the PTX.
    pub entrypoint: String,
    /// The LLVM IR that the PTX was made from, for logs.
    pub ir: String,
    /// Bytes of dynamic shared memory that a launch reserves.
    pub shared_memory_size: usize,
    /// What the kernel does with each buffer, by buffer position.
    pub io: Vec<BufferIOAttr>,
}

/// Versions of the PTX language.
pub mod ptx_version {
    use std::fmt;

    /// The newest PTX version that a driver loads.
    ///
    /// Each release of CUDA brings its own, so the driver's CUDA version stands for it: unequal
    /// versions stay unequal, which is all that `cubecl-cuda` asks of it (it keys a cache by it).
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct PtxVersion {
        cuda: i32,
    }

    impl PtxVersion {
        /// The version that goes with a driver, as `cuDriverGetVersion` numbers it (12.8 is
        /// `12080`); `None` for what is no such number.
        pub fn for_driver(driver: i32) -> Option<Self> {
            (driver > 0).then_some(Self { cuda: driver })
        }
    }

    impl fmt::Display for PtxVersion {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "cuda{}.{}", self.cuda / 1000, self.cuda % 1000 / 10)
        }
    }
}
