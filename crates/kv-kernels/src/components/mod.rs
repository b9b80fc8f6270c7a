//! Parts of kernels that several ops share.
//!
//! - [`sentinels`]: values that stand for something that is no number, one for each meaning.
//! - [`softmax`]: weights of logits, and the merging of partial sums of them.
//! - [`argmin`]: the minimum over a cube's units, and its index.
//! - [`sort_key`]: integers that order as numbers do.
//! - [`top_k`]: the highest numbers of a row, found digit by digit (radix select).
//! - [`pool`]: pools of slots, as kernels take them.
//! - [`prefix_sum`]: sums over a cube's units before each unit.
//! - [`barrier`]: a barrier behind writes to memory.
//! - [`cluster`]: clusters of cubes (thread block clusters) and their distributed shared memory.
//! - [`ptx`]: instructions of NVIDIA devices that CubeCL has no names for.
//! - [`tma`]: tensor maps, asynchronous tile copies and their barriers on NVIDIA's Hopper.

#[cfg(feature = "gpu")]
pub(crate) mod argmin;
#[cfg(feature = "gpu")]
pub(crate) mod barrier;
#[cfg(feature = "gpu")]
pub(crate) mod cluster;
#[cfg(feature = "gpu")]
pub(crate) mod pool;
#[cfg(feature = "gpu")]
pub(crate) mod prefix_sum;
#[cfg(feature = "gpu")]
pub(crate) mod ptx;
pub(crate) mod sentinels;
#[cfg(feature = "gpu")]
pub(crate) mod softmax;
#[cfg(feature = "gpu")]
pub(crate) mod sort_key;
#[cfg(feature = "cuda")]
pub(crate) mod tma;
#[cfg(feature = "gpu")]
pub(crate) mod top_k;
