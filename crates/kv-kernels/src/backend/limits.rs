//! Limits of a device's memory.

use burn::tensor::Device;

/// The most bytes of one tensor, where a device limits them below its memory's size. `None` on the
/// CPU.
pub fn largest_tensor(device: &Device) -> Option<usize> {
    match device.as_dispatch() {
        #[cfg(feature = "gpu")]
        burn::backend::DispatchDevice::Cube(device) => {
            usize::try_from(device.client().properties().memory.max_page_size).ok()
        }
        #[allow(unreachable_patterns)]
        _ => None,
    }
}
