//! The driver's context of a CUDA device, for calls that CubeCL has no names for.

use std::ffi::c_int;

use cudarc::driver::{DriverError, result, sys};

/// Makes the primary context of the CUDA device with this number, which CubeCL uses too, this
/// thread's.
pub(crate) fn make_current(device: usize) -> Result<(), DriverError> {
    let unknown = DriverError(sys::CUresult::CUDA_ERROR_INVALID_DEVICE);
    let number = c_int::try_from(device).map_err(|_| unknown)?;
    result::init()?;
    let device = result::device::get(number)?;
    // SAFETY: the device is there. The context is never released, as CubeCL keeps it as well.
    unsafe {
        let context = result::primary_ctx::retain(device)?;
        result::ctx::set_current(context)
    }
}
