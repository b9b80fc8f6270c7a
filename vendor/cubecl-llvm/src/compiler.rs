use std::fmt;

use cubecl_core::ir::nvidia::SmArch;
use cubecl_core::prelude::KernelDefinition;
use cubecl_core::{CompilationError, Compiler};
use cubecl_environment::backtrace::BackTrace;

use crate::nvptx::{NvptxModule, ptx_version::PtxVersion};

/// What the LLVM path would compile for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LlvmTarget {
    /// NVIDIA GPUs, through PTX.
    Nvptx,
}

/// The compiler of the LLVM path, which here compiles nothing.
#[derive(Clone, Debug)]
pub struct PlironCompiler {
    /// What it would compile for.
    pub target: LlvmTarget,
}

/// Options of a compilation; accepted and unused.
#[derive(Clone, Debug, Default)]
pub struct PlironOptions {
    /// The GPU architecture of targets other than NVIDIA's, of which there are none here.
    pub arch: Option<()>,
    /// The NVIDIA architecture.
    pub sm_arch: Option<SmArch>,
    /// The newest PTX version that the driver loads.
    pub ptx_version: Option<PtxVersion>,
    /// Whether launch parameters are passed as grid constants.
    pub grid_constants: bool,
}

/// A compiled kernel. None is ever made here.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum PlironArtifact {
    /// PTX and what its launch needs.
    NvptxCode(NvptxModule),
}

impl fmt::Display for PlironArtifact {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NvptxCode(module) => f.write_str(&module.ir),
        }
    }
}

impl Compiler for PlironCompiler {
    type Representation = PlironArtifact;
    type CompilationOptions = PlironOptions;

    fn compile(
        &mut self,
        _kernel: KernelDefinition,
        _options: &Self::CompilationOptions,
    ) -> Result<Self::Representation, CompilationError> {
        Err(CompilationError::Generic {
            reason: "this build has no LLVM (`vendor/cubecl-llvm` stands in for it): enable the \
                     feature `cuda-cpp` of `cubecl` to compile CUDA kernels through NVRTC"
                .to_string(),
            backtrace: BackTrace::capture(),
        })
    }

    fn extension(&self) -> &'static str {
        "ll"
    }

    fn lang_tag(&self) -> &'static str {
        "llvm"
    }
}
