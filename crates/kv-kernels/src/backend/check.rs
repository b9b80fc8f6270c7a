//! Argument checks that the ops share: everything is refused before a launch.

use burn::backend::DispatchDevice;
use burn::tensor::{Bool, DType, Device, Float, Int, Tensor};

use crate::KernelError;

/// What a check needs to know of a tensor, whatever its kind.
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

    /// The op.
    pub(crate) fn op(&self) -> &'static str {
        self.op
    }

    /// The op's device.
    pub(crate) fn device(&self) -> Device {
        self.device.clone()
    }

    /// Refuses devices that no implementation is for.
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

    /// Whether the op is a kernel, which writes through every clone of a tensor, rather than loops
    /// on the CPU, which write in place through the sole reference only.
    pub(crate) fn on_gpu(&self) -> bool {
        match self.device.as_dispatch() {
            #[cfg(feature = "gpu")]
            DispatchDevice::Cube(_) => true,
            _ => false,
        }
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
        // Devices are equal whether or not they track gradients, which kernels cannot.
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

    /// A tensor of another argument's dtype, which `expected` names.
    pub(crate) fn same_dtype(
        &self,
        argument: &'static str,
        tensor: &impl Described,
        expected: &'static str,
        dtype: DType,
    ) -> Result<(), KernelError> {
        self.dtype(argument, tensor, expected, |actual| actual == dtype)
    }

    /// A tensor of at least one element.
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

    /// Refuses a value that no implementation is for.
    pub(crate) fn unsupported(
        &self,
        argument: &'static str,
        actual: usize,
        supported: &'static str,
    ) -> KernelError {
        KernelError::Unsupported { op: self.op, argument, actual: actual.to_string(), supported }
    }

    /// A tensor whose elements a kernel can count in 32 bits.
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

    /// The tensor, to be written in place: the sole reference on the CPU, where a placeholder stays
    /// behind.
    pub(crate) fn take<const D: usize>(&self, tensor: &mut Tensor<D>) -> Tensor<D> {
        if self.on_gpu() {
            return tensor.clone();
        }
        let placeholder = Tensor::empty([0; D], (&tensor.device(), tensor.dtype()));
        std::mem::replace(tensor, placeholder)
    }

    /// The same for integers.
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
