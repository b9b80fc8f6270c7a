#[allow(unused_imports)]
use burn::tensor::DeviceType;
use burn::tensor::{DType, Device};

/// A device that tests run on.
#[derive(Debug, Clone)]
pub struct TestDevice {
    /// `cpu`, `wgpu`, `vulkan`, `metal` or `cuda`.
    pub name: &'static str,
    /// The device.
    pub device: Device,
}

impl TestDevice {
    /// Whether matrix products of f32 tensors are exact to f32. CUDA's run on tensor cores, which
    /// round the factors to 10 bits: comparisons to 1e-5 make no sense there.
    pub fn exact_products(&self) -> bool {
        self.name != "cuda"
    }

    /// Whether it is a software driver of a GPU, which takes seconds to compile a kernel.
    pub fn is_software(&self) -> bool {
        #[cfg(any(feature = "wgpu", feature = "cuda"))]
        return self.device.identity().is_some_and(|identity| identity.physical.is_none());
        #[cfg(not(any(feature = "wgpu", feature = "cuda")))]
        false
    }

    /// Whether tests run all their cases on it, however many kernels they have: on every device but
    /// a software driver, and there too with the feature `slow-tests`.
    pub fn runs_everything(&self) -> bool {
        cfg!(feature = "slow-tests") || !self.is_software()
    }

    /// All cases where the device [runs everything](Self::runs_everything), and else the first of
    /// each `every`: drivers compile a kernel for a case.
    pub fn some<T>(
        &self,
        cases: impl IntoIterator<Item = T>,
        every: usize,
    ) -> impl Iterator<Item = T> {
        cases.into_iter().step_by(if self.runs_everything() { 1 } else { every })
    }

    /// The dtypes among f32, f16 and bf16 that it computes in.
    pub fn float_dtypes(&self) -> Vec<DType> {
        let all = [DType::F32, DType::F16, DType::BF16];
        all.into_iter().filter(|dtype| self.device.supports_dtype(*dtype)).collect()
    }
}

/// [`devices`] whose matrix products are exact to f32; tells that `test` lacks the others.
pub fn exact_devices(test: &str) -> Vec<TestDevice> {
    that_are_exact(test, devices())
}

/// [`devices`] that [run everything](TestDevice::runs_everything); tells that `part` of the tests
/// lacks the others.
pub fn quick_devices(part: &str) -> Vec<TestDevice> {
    let why = "a software driver takes minutes to compile its kernels (--slow runs it)";
    those(part, devices(), TestDevice::runs_everything, why)
}

/// [`quick_devices`] that are among the [`exact_devices`].
pub fn quick_exact_devices(part: &str) -> Vec<TestDevice> {
    that_are_exact(part, quick_devices(part))
}

fn that_are_exact(part: &str, devices: Vec<TestDevice>) -> Vec<TestDevice> {
    let why = "its f32 matrix products are rounded to TF32";
    those(part, devices, TestDevice::exact_products, why)
}

/// The devices that `part` of the tests runs on; tells why it lacks the others.
fn those(
    part: &str,
    devices: Vec<TestDevice>,
    runs: impl Fn(&TestDevice) -> bool,
    why: &str,
) -> Vec<TestDevice> {
    let (kept, others): (Vec<_>, Vec<_>) = devices.into_iter().partition(runs);
    for device in others {
        crate::lacks(&format!("{part} on {}", device.name), why);
    }
    kept
}

/// The CPU, and one device of each GPU backend that is compiled in and there.
pub fn devices() -> Vec<TestDevice> {
    #[allow(unused_mut)]
    let mut found: Vec<TestDevice> = Vec::new();
    #[allow(unused_macros)]
    macro_rules! look {
        ($feature:literal, $name:literal, $kind:ident) => {
            #[cfg(feature = $feature)]
            if let Some(device) = Device::enumerate(DeviceType::$kind).into_vec().into_iter().next()
            {
                found.push(TestDevice { name: $name, device });
            }
        };
    }
    look!("flex", "cpu", Flex);
    // With `vulkan` compiled in, wgpu means SPIR-V too, which software drivers do not survive.
    #[cfg(not(feature = "vulkan"))]
    look!("wgpu", "wgpu", Wgpu);
    look!("vulkan", "vulkan", Vulkan);
    look!("metal", "metal", Metal);
    look!("cuda", "cuda", Cuda);
    assert!(!found.is_empty(), "no device to test on: kv-testing was built without a backend");
    for device in &found {
        crate::report(&format!("device {}", device.name));
    }
    found
}
