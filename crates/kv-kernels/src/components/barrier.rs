//! A barrier that also orders writes to global memory.

use cubecl::prelude::*;

/// Waits for all units of the cube, and makes their writes to global memory visible to each other.
/// On some devices a cube's barrier does that; on others it orders shared memory alone, and
/// `fenced` must be set.
#[cube]
pub(crate) fn sync_memory(#[comptime] fenced: bool) {
    if fenced {
        sync_storage();
    } else {
        sync_cube();
    }
}
