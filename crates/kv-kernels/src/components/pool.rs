//! Pools of slots and the head ranges in them, as kernels take them.

use cubecl::prelude::*;

/// The keys and values of a pool's slots.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Pool<K: CubePrimitive, V: CubePrimitive> {
    /// `[S, D]`, in the kernel's vectors or words.
    pub(crate) keys: Box<[K]>,
    /// `[S, D]`, likewise.
    pub(crate) values: Box<[V]>,
}
