//! Clusters of cubes: their barrier, and writes into each other's shared memory. CubeCL compiles
//! clusters for NVIDIA's Hopper and later, but has no such writes, so they are PTX here.

// The compiler does not see that PTX writes variables.
#![allow(unused_assignments)]

use cubecl::client::Client;
use cubecl::prelude::*;

/// The most cubes of a cluster.
pub(crate) const LARGEST_CLUSTER: usize = 8;

/// Whether a device has clusters.
pub(crate) fn has_clusters(client: &Client) -> bool {
    client.properties().features.cube_cluster
}

/// Arrives at the barrier of the cluster's cubes. Cubes that wait see all that was sent before.
#[cube]
pub(crate) fn arrive_at_cluster() {
    gpu_asm!("barrier.cluster.arrive.release;");
}

/// Waits until all units of the cluster's cubes have arrived.
#[cube]
pub(crate) fn wait_for_cluster() {
    gpu_asm!("barrier.cluster.wait.acquire;");
}

/// Writes a number into the shared memory of the cluster's cube `to`: element `at` of the array
/// that begins at `base` in every cube.
#[cube]
pub(crate) fn send(number: f32, base: *const f32, at: usize, to: usize) {
    write_to_cube::<f32>(u32::reinterpret(number), base, at, to);
}

/// [`send`] for an integer.
#[cube]
#[allow(clippy::identity_op, reason = "an operation makes a value of what may be a variable")]
pub(crate) fn send_word(word: u32, base: *const u32, at: usize, to: usize) {
    write_to_cube::<u32>(word | 0u32, base, at, to);
}

#[cube]
fn write_to_cube<T: CubePrimitive>(bits: u32, base: *const T, at: usize, to: usize) {
    // An operation turns a variable into a value, which `gpu_asm!` needs.
    let bytes = (at * 4) as u32;
    let to = to as u32 & comptime!(LARGEST_CLUSTER as u32 - 1);
    gpu_asm!(
        "{{\n .reg .b64 base;\n .reg .b32 here, there;\n",
        "cvta.to.shared.u64 base, {};\n cvt.u32.u64 here, base;\n add.u32 here, here, {};\n",
        "mapa.shared::cluster.u32 there, here, {};\n st.shared::cluster.b32 [there], {};\n }}",
        in(_) base, in(_) bytes, in(_) to, in(_) bits
    );
}
