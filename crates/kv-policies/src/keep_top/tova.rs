//! TOVA (<https://arxiv.org/abs/2401.06104>): the last query's attention, over all heads of a
//! layer. [`Scorer::prefill`] takes a prompt's last query, [`Scorer::decode`] the step's.

use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};

use crate::policy::attention_scores::window_weights;
use crate::{DecodeView, Decoding, Needs, Observation, Result, Scorer};

/// TOVA (Oren et al., 2024, section 3.2): the last query's attention, averaged over all query
/// heads, so that all heads of a layer keep the same tokens; in prefill and after every decode
/// step's attention. No sinks, no recents: even the current token may go.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Tova {}

impl Scorer for Tova {
    const NAME: &'static str = "tova";

    fn needs(&self) -> Needs {
        Needs { window: 1, ..Needs::default() }
    }

    fn heads_agree(&self) -> bool {
        true
    }

    fn prefill(&self, observation: &Observation<'_>, _budget: usize) -> Result<Tensor<3>> {
        let query = observation.last_queries(Self::NAME, 1)?;
        let [batch, kv_heads, tokens, _] = observation.dims();
        let mean = window_weights(&query, observation.keys)?.mean_dim(1);
        Ok(mean.reshape([batch, 1, tokens]).expand([batch, kv_heads, tokens]))
    }

    fn decoding(&self) -> Decoding {
        Decoding::AfterAttention { probabilities: true, accumulate: false }
    }

    fn decode(&self, view: &DecodeView<'_>) -> Result<Tensor<1>> {
        let probabilities = view.probabilities()?.clone().mean_dim(1);
        let layout = view.cache.layout();
        let (batch, kv_heads) = (layout.batch(), layout.kv_heads());
        // One choice for all heads: their slots are in the same order, since they always change
        // together.
        let mean = |of: Tensor<2>, rows: usize, capacity: usize| {
            let mean = of.reshape([rows, kv_heads, capacity]).mean_dim(1);
            mean.expand([rows, kv_heads, capacity]).reshape([rows * kv_heads * capacity])
        };
        if let Some(capacity) = layout.uniform_capacity() {
            return Ok(mean(probabilities, batch, capacity));
        }
        let rows = layout.capacities().chunks(kv_heads).scan(0, |start, capacities| {
            let slots: usize = capacities.iter().sum();
            let own = probabilities.clone().narrow(0, *start, slots);
            *start += slots;
            let even = capacities.iter().all(|capacity| *capacity == capacities[0]);
            // Heads that another policy left with different slots choose for themselves.
            Some(if even { mean(own, 1, capacities[0]) } else { own.squeeze_dim(1) })
        });
        Ok(Tensor::cat(rows.collect(), 0))
    }
}
