//! A barrier behind writes to memory.

use cubecl::prelude::*;

/// All units of the cube see what any of them wrote to memory. A cube's barrier does that on some
/// devices; on others, where it is to be `fenced`, it orders shared memory alone.
#[cube]
pub(crate) fn sync_memory(#[comptime] fenced: bool) {
    if fenced {
        sync_storage();
    } else {
        sync_cube();
    }
}
