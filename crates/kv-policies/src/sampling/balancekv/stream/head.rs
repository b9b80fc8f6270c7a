use burn::tensor::{DType, Device, Tensor, TensorData};

use super::sizes::Sizes;

/// The state tensor of a layer, `[B, Hkv, STATE]`.
pub(super) const STREAM: &str = "balancekv-stream";
const STATE: usize = 9;

/// What a (sequence, head) remembers besides its slots.
#[derive(Debug, Clone, Copy)]
pub(super) struct Head {
    pub(super) sizes: Sizes,
    /// The position of the first token that is no sink.
    pub(super) stream: usize,
    /// The position of the first token that waits.
    pub(super) waiting: usize,
    /// The longest value so far.
    pub(super) longest: f32,
    pub(super) seed: u64,
}

impl Head {
    pub(super) fn store(
        heads: &[Self],
        [batch, kv_heads]: [usize; 2],
        device: &Device,
    ) -> Tensor<3> {
        let values = heads.iter().flat_map(|head| {
            let Sizes { sinks, recents, batch, instances } = head.sizes;
            let counts = [head.stream, head.waiting, sinks, recents, batch, instances];
            let counts = counts.map(|count| count as f32);
            // Two halves of 24 bits, which f32 holds exactly.
            let halves = [head.seed & 0xff_ffff, head.seed >> 24].map(|half| half as f32);
            counts.into_iter().chain([head.longest]).chain(halves)
        });
        let data = TensorData::new(values.collect::<Vec<f32>>(), [batch, kv_heads, STATE]);
        Tensor::from_data(data, (device, DType::F32))
    }

    pub(super) fn load(state: &[f32]) -> Vec<Self> {
        let heads = state.chunks_exact(STATE);
        heads
            .map(|head| {
                let count = |at: usize| head[at] as usize;
                Self {
                    sizes: Sizes {
                        sinks: count(2),
                        recents: count(3),
                        batch: count(4),
                        instances: count(5),
                    },
                    stream: count(0),
                    waiting: count(1),
                    longest: head[6],
                    seed: head[7] as u64 | ((head[8] as u64) << 24),
                }
            })
            .collect()
    }
}
