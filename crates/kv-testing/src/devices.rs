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

    /// The dtypes among f32, f16 and bf16 that it computes in.
    pub fn float_dtypes(&self) -> Vec<DType> {
        let all = [DType::F32, DType::F16, DType::BF16];
        all.into_iter().filter(|dtype| self.device.supports_dtype(*dtype)).collect()
    }
}

/// [`devices`] whose matrix products are exact to f32; tells that `test` lacks the others.
pub fn exact_devices(test: &str) -> Vec<TestDevice> {
    let (exact, others): (Vec<_>, Vec<_>) =
        devices().into_iter().partition(TestDevice::exact_products);
    for device in others {
        let why = "its f32 matrix products are rounded to TF32";
        crate::lacks(&format!("{test} on {}", device.name), why);
    }
    exact
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
