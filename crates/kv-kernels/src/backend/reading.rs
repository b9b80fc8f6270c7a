//! Asynchronous reads of integers: the device works on while they travel to the host.

use std::fmt;

use burn::backend::tensor::IntTensor;
use burn::backend::{Backend, Dispatch, backend_extension};
use burn::tensor::{Int, Tensor};

use super::check::Check;
use crate::KernelError;

const OP: &str = "reading";

type Wait = Box<dyn FnOnce() -> Result<Vec<i32>, String> + Send>;

/// A read of a tensor's integers, which has begun. It gives the integers as they were then: work
/// launched later may change the tensor, and does not wait for the host. Dropping the read waits
/// too, because the device still writes into its buffer.
#[must_use = "the integers come from `wait`"]
pub struct Reading(Option<Wait>);

impl Reading {
    /// Begins to read the integers, after all work launched so far.
    ///
    /// # Shapes
    /// `tensor` `[N]`, 32-bit.
    ///
    /// # Errors
    /// [`KernelError::Dtype`] for other integers, and for devices without kernels of this crate.
    pub fn begin(tensor: Tensor<1, Int>) -> Result<Self, KernelError> {
        let check = Check::new(OP, &tensor);
        check.supported()?;
        check.int("tensor", &tensor)?;
        Ok(<Dispatch as ReadingOps>::begin_read(tensor.into_dispatch()))
    }

    /// Waits for the integers.
    ///
    /// # Errors
    /// [`KernelError::Unsupported`] where the device failed.
    pub fn wait(mut self) -> Result<Vec<i32>, KernelError> {
        let read = self.0.take().map_or_else(|| Ok(Vec::new()), |wait| wait());
        read.map_err(|reason| KernelError::Unsupported {
            op: OP,
            argument: "tensor",
            actual: reason,
            supported: "a device that works",
        })
    }

    /// Begins the copy, and returns the read that waits for it.
    #[cfg(feature = "gpu")]
    fn of(tensor: burn_cubecl::tensor::CubeTensor) -> Self {
        use std::task::{Context, Poll, Waker};

        use burn::backend::TensorMetadata;
        let tensor = burn_cubecl::kernel::into_contiguous(tensor);
        let count = tensor.shape().num_elements();
        let mut read = Box::pin(async move {
            // The first poll asks the client, which starts the copy.
            let bytes = tensor.client.read_async(vec![tensor.handle.clone()]);
            let mut asked = false;
            std::future::poll_fn(|_| match std::mem::replace(&mut asked, true) {
                true => Poll::Ready(()),
                false => Poll::Pending,
            })
            .await;
            let bytes = bytes.await.map_err(|error| error.to_string())?;
            let numbers = bytes[0].chunks_exact(size_of::<i32>()).take(count);
            Ok(numbers.map(|bytes| i32::from_ne_bytes(std::array::from_fn(|i| bytes[i]))).collect())
        });
        match read.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(read) => Self::new(move || read),
            Poll::Pending => Self::new(move || cubecl::future::block_on(read)),
        }
    }

    /// Wraps `wait`, from a backend that has begun the copy.
    fn new(wait: impl FnOnce() -> Result<Vec<i32>, String> + Send + 'static) -> Self {
        Self(Some(Box::new(wait)))
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        if let Some(wait) = self.0.take() {
            let _ = wait();
        }
    }
}

impl fmt::Debug for Reading {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Reading").finish_non_exhaustive()
    }
}

#[backend_extension(Cube: cfg(feature = "gpu"), Flex: cfg(feature = "flex"))]
pub(crate) trait ReadingOps: Backend {
    /// Begins to read integers `[N]`.
    fn begin_read(tensor: IntTensor<Self>) -> Reading;
}

#[cfg(feature = "gpu")]
impl ReadingOps for burn_cubecl::CubeBackend {
    fn begin_read(tensor: IntTensor<Self>) -> Reading {
        Reading::of(tensor)
    }
}

#[cfg(feature = "flex")]
impl ReadingOps for burn::backend::Flex {
    fn begin_read(tensor: IntTensor<Self>) -> Reading {
        let tensor = tensor.to_contiguous();
        Reading::new(move || Ok(super::host_buffers::slice(&tensor).to_vec()))
    }
}
