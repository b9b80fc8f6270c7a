//! Parts of kernels that several ops share. What only one op uses stays in the op's folder.
//!
//! - [`sentinels`]: numbers that stand for "none" or infinity, one for each meaning.
//! - [`softmax`]: weights of logits, and helpers to merge partial softmax sums.
//! - [`argmin`]: the least number of a cube's units, and its index.
//! - [`sort_key`]: integers that have the order of f32 numbers.
//! - [`top_k`]: the highest numbers of a row, found digit by digit (radix select).
//! - [`bf16_pairs`]: factors of matrix instructions as sums of two bf16 numbers.
//! - [`pool`]: pools of slots and head ranges as kernel arguments.
//! - [`prefix_sum`]: exclusive prefix sums over a cube's units.
//! - [`host_vectors`]: vector instructions of CPUs.
//! - [`host_product`]: matrix products on CPUs.
//! - [`barrier`]: a barrier that also orders writes to global memory.
//! - [`cluster`]: clusters of cubes (thread block clusters) and their distributed shared memory.
//! - [`ptx`]: NVIDIA instructions that CubeCL does not offer.
//! - [`tma`]: tensor maps, asynchronous tile copies and their barriers on NVIDIA's Hopper.

#[cfg(feature = "gpu")]
pub(crate) mod argmin;
#[cfg(feature = "gpu")]
pub(crate) mod barrier;
#[cfg(feature = "gpu")]
pub(crate) mod bf16_pairs;
#[cfg(feature = "gpu")]
pub(crate) mod cluster;
#[cfg(feature = "flex")]
pub(crate) mod host_product;
#[cfg(feature = "flex")]
pub(crate) mod host_vectors;
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
