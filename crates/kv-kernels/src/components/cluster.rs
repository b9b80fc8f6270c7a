//! Cubes of a cluster: they wait for each other, and write into each other's shared memory. CubeCL
//! compiles clusters for NVIDIA's Hopper and what came after, but knows no such writes, which are
//! PTX here.

// What PTX writes looks unwritten to the compiler.
#![allow(unused_assignments)]

use cubecl::client::Client;
use cubecl::prelude::*;

/// Cubes of a cluster, at most.
pub(crate) const LARGEST_CLUSTER: usize = 8;

/// Whether a device has clusters.
pub(crate) fn has_clusters(client: &Client) -> bool {
    client.properties().features.cube_cluster
}

/// Arrives at the barrier of the cluster's cubes; what was sent before is seen by those that wait.
#[cube]
pub(crate) fn arrive_at_cluster() {
    gpu_asm!("barrier.cluster.arrive.release;");
}

/// Waits until all units of the cluster's cubes have arrived.
#[cube]
pub(crate) fn wait_for_cluster() {
    gpu_asm!("barrier.cluster.wait.acquire;");
}

/// Writes a number into the cluster's cube `to`: the `at`-th from `base` on, as `base` lies in this
/// cube.
#[cube]
pub(crate) fn send(number: f32, base: *const f32, at: usize, to: usize) {
    write_to_cube::<f32>(u32::reinterpret(number), base, at, to);
}

/// The same of an integer.
#[cube]
#[allow(clippy::identity_op, reason = "an operation makes a value of what may be a variable")]
pub(crate) fn send_word(word: u32, base: *const u32, at: usize, to: usize) {
    write_to_cube::<u32>(word | 0u32, base, at, to);
}

#[cube]
fn write_to_cube<T: CubePrimitive>(bits: u32, base: *const T, at: usize, to: usize) {
    // Operations make values of what may be variables.
    let bytes = (at * 4) as u32;
    let to = to as u32 & comptime!(LARGEST_CLUSTER as u32 - 1);
    gpu_asm!(
        "{{\n .reg .b64 base;\n .reg .b32 here, there;\n",
        "cvta.to.shared.u64 base, {};\n cvt.u32.u64 here, base;\n add.u32 here, here, {};\n",
        "mapa.shared::cluster.u32 there, here, {};\n st.shared::cluster.b32 [there], {};\n }}",
        in(_) base, in(_) bytes, in(_) to, in(_) bits
    );
}
