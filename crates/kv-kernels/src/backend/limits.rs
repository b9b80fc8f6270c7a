//! Limits of a device's memory.

use burn::tensor::Device;

#[cfg(feature = "cuda")]
use super::cuda_context::make_current;

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

/// Bytes of a device's memory that are free: those that no process has taken, and those that this
/// process's pool holds and does not use. On the CPU, bytes that the system can give without
/// swapping. `None` where the device does not tell, as through wgpu.
pub fn free_memory(device: &Device) -> Option<usize> {
    match device.as_dispatch() {
        #[cfg(feature = "flex")]
        burn::backend::DispatchDevice::Flex(_) => {
            let mut system = sysinfo::System::new();
            system.refresh_memory();
            usize::try_from(system.available_memory()).ok()
        }
        #[cfg(feature = "cuda")]
        burn::backend::DispatchDevice::Cube(_) => free_cuda_memory(device),
        #[allow(unreachable_patterns)]
        _ => None,
    }
}

#[cfg(feature = "cuda")]
fn free_cuda_memory(device: &Device) -> Option<usize> {
    let found = Device::enumerate(burn::tensor::DeviceType::Cuda).into_vec();
    make_current(found.iter().position(|other| other == device)?).ok()?;
    let (free, _) = cudarc::driver::result::mem_get_info().ok()?;
    let pool = device.memory_pool_usage()?;
    let unused = pool.bytes_reserved.saturating_sub(pool.bytes_in_use);
    Some(free + usize::try_from(unused).ok()?)
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;

    #[test]
    fn the_cpu_tells_its_free_memory() {
        let device = Device::flex();
        let free = free_memory(&device).unwrap();
        assert!(free > 1 << 20, "{free} bytes");
        assert_eq!(largest_tensor(&device), None);
    }
}
