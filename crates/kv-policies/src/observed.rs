//! Observations kept until all layers have been seen.

use burn::tensor::{DType, Int, Tensor};

use crate::{LayerContext, Needs, Observation};

/// An observation that outlives the pass that made it, for policies that compress all layers
/// together.
#[derive(Debug, Clone)]
pub struct Observed {
    layer: LayerContext,
    keys: Tensor<4>,
    values: Tensor<4>,
    positions: Tensor<2, Int>,
    prompt_tokens: usize,
    window: Option<Tensor<4>>,
    column_sums: Option<Tensor<3>>,
    raw_queries: Option<Tensor<4>>,
    inverse_frequencies: Vec<f64>,
    seeds: Vec<u64>,
}

impl Observed {
    /// An observation with what `needs` names of it.
    pub fn new(observation: &Observation<'_>, needs: Needs) -> Self {
        // A copy: a view would keep all queries alive.
        let window = observation.window.as_ref().filter(|_| needs.window > 0);
        let sums = observation.column_sums.clone().filter(|_| needs.column_sums);
        let queries = observation.raw_queries.clone().filter(|_| needs.raw_queries);
        Self {
            layer: observation.layer,
            keys: observation.keys.clone(),
            values: observation.values.clone(),
            positions: observation.positions.clone(),
            prompt_tokens: observation.prompt_tokens,
            window: window.map(|window| window.clone().mul_scalar(1.0)),
            column_sums: sums,
            raw_queries: queries,
            inverse_frequencies: observation.inverse_frequencies.to_vec(),
            seeds: observation.seeds.to_vec(),
        }
    }

    /// What a policy is shown.
    pub fn view(&self) -> Observation<'_> {
        Observation::new(&self.keys, &self.values, &self.positions)
            .of_layer(self.layer)
            .of_prompt(self.prompt_tokens)
            .with_window(self.window.clone())
            .with_column_sums(self.column_sums.clone())
            .with_raw_queries(self.raw_queries.clone())
            .with_frequencies(&self.inverse_frequencies)
            .with_seeds(&self.seeds)
    }

    /// One sequence of the batch.
    pub fn row(&self, row: usize) -> Self {
        let of = |tensor: &Tensor<4>| tensor.clone().narrow(0, row, 1);
        Self {
            layer: self.layer,
            keys: of(&self.keys),
            values: of(&self.values),
            positions: self.positions.clone().cast(DType::I32).narrow(0, row, 1),
            prompt_tokens: self.prompt_tokens,
            window: self.window.as_ref().map(of),
            column_sums: self.column_sums.as_ref().map(|sums| sums.clone().narrow(0, row, 1)),
            raw_queries: self.raw_queries.as_ref().map(of),
            inverse_frequencies: self.inverse_frequencies.clone(),
            seeds: self.seeds.get(row).copied().into_iter().collect(),
        }
    }
}
