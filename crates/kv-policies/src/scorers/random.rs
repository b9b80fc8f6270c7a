use burn::tensor::{DType, Tensor, TensorData};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

use crate::{Observation, Result, Scorer};

/// Tokens at random, independently per sequence, layer and key-value head: the floor that every
/// method must beat. Draws from the request's seed, so that a request gives the same whatever
/// batch it runs in.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Random {}

impl Scorer for Random {
    const NAME: &'static str = "random";

    fn prefill(&self, observation: &Observation<'_>, _budget: usize) -> Result<Tensor<3>> {
        let [batch, kv_heads, tokens, _] = observation.dims();
        let mut scores = Vec::with_capacity(batch * kv_heads * tokens);
        for row in 0..batch {
            for head in 0..kv_heads {
                let mut draws = generator(observation, row, head);
                scores.extend((0..tokens).map(|_| draws.random::<f32>()));
            }
        }
        let data = TensorData::new(scores, [batch, kv_heads, tokens]);
        Ok(Tensor::from_data(data, (&observation.keys.device(), DType::F32)))
    }
}

/// The generator of one (sequence, layer, head).
pub(crate) fn generator(observation: &Observation<'_>, row: usize, head: usize) -> ChaCha8Rng {
    let request = observation.seeds.get(row).copied().unwrap_or_default();
    let mut generator = ChaCha8Rng::seed_from_u64(request);
    generator.set_stream(((observation.layer.index as u64) << 32) | head as u64);
    generator
}
