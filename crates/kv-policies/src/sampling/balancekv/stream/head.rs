//! The state of a stream's heads, as tensors of a cache.

use burn::tensor::{DType, Tensor};
use kv_core::{LayerCache, read_f32, read_i32};

use super::NAME;
use super::sizes::Sizes;
use crate::Result;
use crate::policy::state_tensors::{int_numbers, int_state, state};

/// State of every head, integers `[B, Hkv, 8]`: positions, sizes, and two halves of a seed.
const STREAM: &str = "balancekv-stream";
/// Numbers of a head in [`STREAM`].
const WIDTH: usize = 8;
/// State of every head's longest value, `[B, Hkv, 1]`.
const LONGEST: &str = "balancekv-longest";
// Files of earlier versions store all of a head's numbers as f32 in `STREAM`: this number of them,
// the longest value included.
const F32_WIDTH: usize = 9;
const F32_LONGEST: usize = 6;

/// The state of a head range besides its slots.
#[derive(Debug, Clone, Copy)]
pub(super) struct Head {
    pub(super) sizes: Sizes,
    /// The position of the first token that is no sink.
    pub(super) stream: usize,
    /// The position of the first token that waits.
    pub(super) waiting: usize,
    /// The longest value so far.
    pub(super) longest: f32,
    /// 48 bits.
    pub(super) seed: u64,
}

impl Head {
    /// Stores the state of all heads in a cache.
    pub(super) fn store(heads: &[Self], cache: &mut LayerCache) {
        let [batch, kv_heads] = [cache.layout().batch(), cache.layout().kv_heads()];
        let device = cache.options().device.clone();
        let integers = heads.iter().flat_map(|head| {
            let Sizes { sinks, recents, batch, instances } = head.sizes;
            let halves = [head.seed & 0xff_ffff, head.seed >> 24].map(|half| half as usize);
            [[head.stream, head.waiting, sinks, recents, batch, instances].as_slice(), &halves]
                .concat()
        });
        let longest: Vec<f32> = heads.iter().map(|head| head.longest).collect();
        cache.set_int_state(STREAM, int_numbers(integers, [batch, kv_heads, WIDTH], &device));
        let longest = Tensor::<1>::from_data(longest.as_slice(), (&device, DType::F32));
        cache.set_state(LONGEST, longest.reshape([batch, kv_heads, 1]));
    }

    /// The state of all heads of a cache. Waits for the device.
    ///
    /// # Errors
    /// [`crate::PolicyError::MissingObservation`] for a cache that no stream has filled.
    pub(super) fn load(cache: &LayerCache) -> Result<Vec<Self>> {
        let integers = read_i32("state", int_state(NAME, cache, STREAM)?)?;
        let longest = read_f32("state", state(NAME, cache, LONGEST)?)?;
        let heads = integers.chunks_exact(WIDTH).zip(longest).map(|(head, longest)| {
            let count = |at: usize| head[at].max(0) as usize;
            Self {
                sizes: Sizes {
                    sinks: count(2),
                    recents: count(3),
                    batch: count(4),
                    instances: count(5),
                },
                stream: count(0),
                waiting: count(1),
                longest,
                seed: count(6) as u64 | ((count(7) as u64) << 24),
            }
        });
        Ok(heads.collect())
    }

    /// Takes the state of a file of an earlier version apart.
    pub(super) fn restore(cache: &mut LayerCache) {
        let Some(all) = cache.state(STREAM).cloned() else { return };
        if all.dims()[2] != F32_WIDTH {
            return;
        }
        let part = |from: usize, to: usize| all.clone().narrow(2, from, to - from);
        let integers = vec![part(0, F32_LONGEST), part(F32_LONGEST + 1, F32_WIDTH)];
        cache.set_state(LONGEST, part(F32_LONGEST, F32_LONGEST + 1));
        cache.set_int_state(STREAM, Tensor::cat(integers, 2).int());
    }
}
