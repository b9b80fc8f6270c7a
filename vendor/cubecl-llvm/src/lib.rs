//! Stand-in for `cubecl-llvm`: what `cubecl-cuda` 0.11.3 names of it, and no LLVM.
//!
//! `cubecl-cuda` always depends on `cubecl-llvm`, whose build script downloads LLVM, even when it
//! compiles its kernels through NVRTC (`cubecl/cuda-cpp`), as burn-kv does. With this crate in its
//! place that dependency costs nothing; a kernel that is sent here nevertheless gets an error that
//! says what to enable. The README in this folder says how to do without the stand-in.

mod compiler;
pub mod nvptx;
pub mod shared;

pub use compiler::{LlvmTarget, PlironArtifact, PlironCompiler, PlironOptions};
pub use nvptx::NvptxModule;
