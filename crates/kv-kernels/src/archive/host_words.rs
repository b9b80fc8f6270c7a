//! Words of 32 bits in host memory, which kernels read and write.

#[cfg(feature = "gpu")]
use std::sync::Arc;

use burn::backend::tensor::IntTensor;
use burn::backend::{Backend, ExtensionType};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};

use crate::backend::check::Check;

/// Words of 32 bits in host memory, which a device's kernels read and write.
///
/// CUDA devices reach page-locked host memory over the bus, at the address that the host has: reads
/// need neither the host's help nor a copy, and can be recorded. Devices without such memory (wgpu,
/// and CUDA where the driver has no page-locked memory left) keep the words in a tensor of their
/// own, which takes the device's memory. A CPU's memory is host
/// memory.
///
/// As with tensors of a GPU, kernels that write into the words write into their clones.
#[derive(Debug, Clone)]
pub struct HostWords {
    /// The words, or where they are page-locked a few that nobody reads.
    tensor: Tensor<1, Int>,
    #[cfg(feature = "gpu")]
    page_locked: Option<Arc<page_locked::Memory>>,
}

impl HostWords {
    /// `length` words of 0 for a device's kernels.
    pub fn zeros(length: usize, device: &Device) -> Self {
        Self::of(TensorData::zeros::<i32, _>([length]), device)
    }

    /// Words with contents, `[N]`, 32-bit integers.
    pub fn of(data: TensorData, device: &Device) -> Self {
        #[cfg(feature = "gpu")]
        let (data, page_locked) = match page_locked::Memory::of(data, device) {
            Ok(memory) => (TensorData::zeros::<i32, _>([1]), Some(Arc::new(memory))),
            Err(data) => (data, None),
        };
        Self {
            tensor: Tensor::from_data(data, (device, DType::I32)),
            #[cfg(feature = "gpu")]
            page_locked,
        }
    }

    /// Words that are a tensor.
    fn of_tensor(tensor: Tensor<1, Int>) -> Self {
        Self {
            tensor,
            #[cfg(feature = "gpu")]
            page_locked: None,
        }
    }

    /// The number of words.
    pub fn length(&self) -> usize {
        #[cfg(feature = "gpu")]
        if let Some(memory) = &self.page_locked {
            return memory.length();
        }
        self.tensor.dims()[0]
    }

    /// The device whose kernels read the words.
    pub fn device(&self) -> Device {
        self.tensor.device()
    }

    /// Whether the words take none of a GPU's memory.
    pub fn are_in_host_memory(&self) -> bool {
        self.address() != 0 || !Check::new("host words", &self.tensor).on_gpu()
    }

    /// The words, `[N]`, as all kernels before have left them.
    ///
    /// # Errors
    /// A description, where the device fails.
    pub fn to_data(&self) -> Result<TensorData, String> {
        #[cfg(feature = "gpu")]
        if let Some(memory) = &self.page_locked {
            return memory.to_data();
        }
        self.tensor.clone().try_into_data().map_err(|error| error.to_string())
    }

    /// The words in a memory of their own, for the kernels of `device`.
    ///
    /// # Errors
    /// A description, where a device fails.
    pub fn copied(&self, device: &Device) -> Result<Self, String> {
        if self.address() != 0 || self.device() != *device {
            return Ok(Self::of(self.to_data()?, device));
        }
        Ok(Self::of_tensor(apart(&self.tensor)))
    }

    /// The words of several, one after another, for the kernels of the first one's device.
    ///
    /// # Errors
    /// A description, where the device fails.
    ///
    /// # Panics
    /// Without any words.
    pub fn concat(parts: &[&Self]) -> Result<Self, String> {
        if parts.iter().all(|part| part.address() == 0) {
            return Ok(Self::of_tensor(joined(parts.iter().map(|part| &part.tensor))));
        }
        let mut words = Vec::new();
        for part in parts {
            words.extend(part.to_data()?.try_into_vec::<i32>().map_err(|error| error.to_string())?);
        }
        let length = words.len();
        Ok(Self::of(TensorData::new(words, [length]), &parts[0].device()))
    }

    /// The address at which a device's kernels reach the words; 0 where they are a tensor.
    fn address(&self) -> u64 {
        #[cfg(feature = "gpu")]
        if let Some(memory) = &self.page_locked {
            return memory.address();
        }
        0
    }

    /// The words as backends take them, to be read.
    pub(crate) fn to_read(&self) -> HostWordTensor<burn::backend::Dispatch> {
        HostWordTensor { tensor: self.tensor.clone().into_dispatch(), address: self.address() }
    }

    /// The words as backends take them, to be written. [`Self::put_back`] must follow.
    pub(crate) fn taken(&mut self, check: &Check) -> HostWordTensor<burn::backend::Dispatch> {
        let address = self.address();
        HostWordTensor { tensor: check.take_ints(&mut self.tensor).into_dispatch(), address }
    }

    /// Puts back the tensor that [`Self::taken`] took.
    pub(crate) fn put_back(&mut self, written: IntTensor<burn::backend::Dispatch>) {
        self.tensor = Tensor::from_dispatch(written);
    }
}

/// A copy with a buffer of its own: a kernel that wrote through a shared tensor would write into
/// both.
pub(crate) fn apart(words: &Tensor<1, Int>) -> Tensor<1, Int> {
    match words.dims() {
        // Devices do not launch over nothing.
        [0] => words.clone(),
        _ => words.clone().add_scalar(0),
    }
}

/// Words one after another.
pub(crate) fn joined<'a>(parts: impl Iterator<Item = &'a Tensor<1, Int>>) -> Tensor<1, Int> {
    let parts: Vec<_> = parts.cloned().collect();
    match parts.iter().all(|part| part.dims() == [0]) {
        true => parts[0].clone(),
        false => Tensor::cat(parts, 0),
    }
}

/// [`HostWords`] as backends take them.
#[derive(ExtensionType)]
pub(crate) struct HostWordTensor<B: Backend> {
    /// The words, or where `address` is not 0 a few that nobody reads.
    pub(crate) tensor: IntTensor<B>,
    pub(crate) address: u64,
}

#[cfg(feature = "gpu")]
mod page_locked {
    //! Page-locked memory of CUDA devices.

    use std::iter::once;
    use std::sync::{Mutex, PoisonError};

    use burn::backend::DispatchDevice;
    use burn::tensor::{AllocationProperty, Bytes, DType, Device, StreamId, TensorData};

    use crate::backend::client::is_cuda;
    use crate::device_work;

    /// Page-locked memory. Kernels use its address, so it is freed once they have ended.
    #[derive(Debug)]
    pub(super) struct Memory {
        bytes: Bytes,
        device: Device,
        /// The streams of the threads that have launched kernels with the address.
        streams: Mutex<Vec<StreamId>>,
    }

    impl Memory {
        /// The data in page-locked memory; as it was, where the device has none.
        pub(super) fn of(data: TensorData, device: &Device) -> Result<Self, TensorData> {
            let DispatchDevice::Cube(cube) = device.as_dispatch() else { return Err(data) };
            let client = cube.client();
            if !is_cuda(&client) || data.num_elements() == 0 {
                return Err(data);
            }
            let (mut bytes, shape, dtype) = data.into_parts();
            client.staging(once(&mut bytes), false);
            match bytes.property() {
                AllocationProperty::Pinned => {
                    Ok(Self { bytes, device: device.clone(), streams: Mutex::default() })
                }
                _ => Err(TensorData::from_bytes(bytes, shape, dtype)),
            }
        }

        pub(super) fn length(&self) -> usize {
            self.bytes.len() / size_of::<i32>()
        }

        /// The address, for a kernel that this thread launches.
        pub(super) fn address(&self) -> u64 {
            let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
            let own = StreamId::current();
            if !streams.contains(&own) {
                streams.push(own);
            }
            self.bytes.as_ptr().addr() as u64
        }

        /// Waits for all kernels that have the address.
        fn wait(&self) -> Result<(), String> {
            let streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
            streams.iter().try_for_each(|stream| {
                // A wait ends the work of one stream, which is a thread's.
                stream.executes(|| self.device.sync()).map_err(|error| error.to_string())
            })
        }

        pub(super) fn to_data(&self) -> Result<TensorData, String> {
            self.wait()?;
            let bytes = Bytes::from_bytes_vec(self.bytes.to_vec());
            Ok(TensorData::from_bytes(bytes, [self.length()], DType::I32))
        }
    }

    impl Drop for Memory {
        fn drop(&mut self) {
            let _work = device_work();
            // Where the device has failed, no kernel runs any more.
            let _ = self.wait();
        }
    }
}

#[cfg(feature = "gpu")]
pub(crate) mod kernel {
    //! The words as kernels take them.

    use cubecl::prelude::*;

    use crate::components::ptx::{read_far, write_far};

    /// Words in host memory at an address, or in a buffer.
    #[derive(CubeType, CubeLaunch)]
    pub(crate) struct FarWords {
        /// The words, or a few that nobody reads.
        pub(crate) words: Box<[u32]>,
        /// The lower and the upper half of the address.
        pub(crate) low: u32,
        pub(crate) high: u32,
        /// Whether the words are at the address.
        #[cube(comptime)]
        pub(crate) far: bool,
    }

    #[cube]
    impl FarWords {
        pub(crate) fn read(&self, at: usize) -> u32 {
            if comptime!(self.far) {
                read_far(self.low, self.high, at as u32)
            } else {
                self.words[at]
            }
        }

        pub(crate) fn write(&mut self, at: usize, word: u32) {
            if comptime!(self.far) {
                write_far(self.low, self.high, at as u32, word);
            } else {
                self.words[at] = word;
            }
        }
    }
}
