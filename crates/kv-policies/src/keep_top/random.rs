//! Random tokens, a yardstick. [`Scorer::prefill`] draws the scores of a prompt.

use burn::tensor::{DType, Tensor, TensorData};
use rand::Rng;
use serde::{Deserialize, Serialize};

use crate::policy::generator::generator;
use crate::{Observation, Result, Scorer};

/// Tokens at random, independently per sequence, layer and key-value head: the floor that every
/// method must beat. Draws from the request's seed, so that a request gives the same whatever
/// batch it runs in.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Random {}

impl Scorer for Random {
    const NAME: &'static str = "random";
    const DRAWS: bool = true;

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
