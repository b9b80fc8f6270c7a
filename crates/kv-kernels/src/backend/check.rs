//! Argument checks that the ops share. They refuse a call before anything is launched.

use burn::backend::DispatchDevice;
use burn::tensor::{Bool, DType, Device, Float, Int, Tensor};

use crate::KernelError;

/// The shape, dtype and device of a tensor of any kind.
pub(crate) trait Described {
    fn describe(&self) -> (Vec<usize>, DType, Device);
}

macro_rules! described {
    ($($kind:ty),*) => {$(
        impl<const D: usize> Described for Tensor<D, $kind> {
            fn describe(&self) -> (Vec<usize>, DType, Device) {
                (self.dims().to_vec(), self.dtype(), self.device())
            }
        }
    )*};
}
described!(Float, Int, Bool);

/// The checks of one op call.
pub(crate) struct Check {
    op: &'static str,
    device: Device,
}

impl Check {
    pub(crate) fn new(op: &'static str, first: &impl Described) -> Self {
        Self { op, device: first.describe().2 }
    }

    /// The op's name.
    pub(crate) fn op(&self) -> &'static str {
        self.op
    }

    /// The op's device.
    pub(crate) fn device(&self) -> Device {
        self.device.clone()
    }

    /// Refuses devices that have no implementation.
    pub(crate) fn supported(&self) -> Result<(), KernelError> {
        match self.device.as_dispatch() {
            #[cfg(feature = "flex")]
            DispatchDevice::Flex(_) => Ok(()),
            #[cfg(feature = "gpu")]
            DispatchDevice::Cube(_) => Ok(()),
            #[allow(unreachable_patterns)]
            _ => Err(KernelError::UnsupportedDevice {
                op: self.op,
                device: format!("{:?}", self.device),
            }),
        }
    }

    /// Whether the op runs as a kernel, which writes through every clone of a tensor. On the CPU,
    /// loops write in place through the only reference.
    pub(crate) fn on_gpu(&self) -> bool {
        match self.device.as_dispatch() {
            #[cfg(feature = "gpu")]
            DispatchDevice::Cube(_) => true,
            _ => false,
        }
    }

    /// Whether the op runs on the CPU.
    #[cfg(feature = "flex")]
    pub(crate) fn on_cpu(&self) -> bool {
        matches!(self.device.as_dispatch(), DispatchDevice::Flex(_))
    }

    /// Whether the op runs on the CPU.
    #[cfg(not(feature = "flex"))]
    pub(crate) fn on_cpu(&self) -> bool {
        false
    }

    pub(crate) fn shape(
        &self,
        argument: &'static str,
        tensor: &impl Described,
        expected: &[usize],
    ) -> Result<(), KernelError> {
        let (actual, _, device) = tensor.describe();
        if actual != expected {
            return Err(KernelError::Shape {
                op: self.op,
                argument,
                expected: expected.to_vec(),
                actual,
            });
        }
        // Devices compare as equal whether or not they track gradients. Kernels cannot track them.
        if device != self.device || device.is_autodiff() != self.device.is_autodiff() {
            return Err(KernelError::Device {
                op: self.op,
                argument,
                expected: format!("{:?}", self.device),
                actual: format!("{device:?}"),
            });
        }
        Ok(())
    }

    pub(crate) fn float(
        &self,
        argument: &'static str,
        tensor: &impl Described,
    ) -> Result<(), KernelError> {
        self.dtype(argument, tensor, "f32, f16 or bf16", |dtype| {
            matches!(dtype, DType::F32 | DType::F16 | DType::BF16)
        })
    }

    pub(crate) fn f32(
        &self,
        argument: &'static str,
        tensor: &impl Described,
    ) -> Result<(), KernelError> {
        self.dtype(argument, tensor, "f32", |dtype| dtype == DType::F32)
    }

    pub(crate) fn int(
        &self,
        argument: &'static str,
        tensor: &impl Described,
    ) -> Result<(), KernelError> {
        self.dtype(argument, tensor, "32-bit integers", |dtype| dtype == DType::I32)
    }

    /// Checks that a tensor has the dtype of another argument, which `expected` names.
    pub(crate) fn same_dtype(
        &self,
        argument: &'static str,
        tensor: &impl Described,
        expected: &'static str,
        dtype: DType,
    ) -> Result<(), KernelError> {
        self.dtype(argument, tensor, expected, |actual| actual == dtype)
    }

    /// Checks that a tensor has at least one element.
    pub(crate) fn filled(
        &self,
        argument: &'static str,
        tensor: &impl Described,
    ) -> Result<(), KernelError> {
        let (shape, ..) = tensor.describe();
        if shape.contains(&0) {
            return Err(KernelError::Unsupported {
                op: self.op,
                argument,
                actual: format!("{shape:?}"),
                supported: "at least one element",
            });
        }
        Ok(())
    }

    /// The error for a value that the op does not support.
    pub(crate) fn unsupported(
        &self,
        argument: &'static str,
        actual: impl std::fmt::Display,
        supported: &'static str,
    ) -> KernelError {
        KernelError::Unsupported { op: self.op, argument, actual: actual.to_string(), supported }
    }

    /// Checks that a kernel can count the tensor's elements in 32 bits.
    pub(crate) fn counted(
        &self,
        argument: &'static str,
        tensor: &impl Described,
    ) -> Result<(), KernelError> {
        let (shape, ..) = tensor.describe();
        if u32::try_from(shape.iter().product::<usize>()).is_err() {
            return Err(KernelError::Unsupported {
                op: self.op,
                argument,
                actual: format!("{shape:?}"),
                supported: "fewer than 4,294,967,296 elements",
            });
        }
        Ok(())
    }

    /// The tensor, to be written in place. On the CPU this is the only reference, and a placeholder
    /// stays behind.
    pub(crate) fn take<const D: usize>(&self, tensor: &mut Tensor<D>) -> Tensor<D> {
        if self.on_gpu() {
            return tensor.clone();
        }
        let placeholder = Tensor::empty([0; D], (&tensor.device(), tensor.dtype()));
        std::mem::replace(tensor, placeholder)
    }

    /// [`Self::take`] for integers.
    pub(crate) fn take_ints<const D: usize>(&self, tensor: &mut Tensor<D, Int>) -> Tensor<D, Int> {
        if self.on_gpu() {
            return tensor.clone();
        }
        let placeholder = Tensor::empty([0; D], (&tensor.device(), tensor.dtype()));
        std::mem::replace(tensor, placeholder)
    }

    fn dtype(
        &self,
        argument: &'static str,
        tensor: &impl Described,
        expected: &'static str,
        accepts: impl Fn(DType) -> bool,
    ) -> Result<(), KernelError> {
        let actual = tensor.describe().1;
        if accepts(actual) {
            Ok(())
        } else {
            Err(KernelError::Dtype { op: self.op, argument, expected, actual })
        }
    }
}
