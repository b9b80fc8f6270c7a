use burn::tensor::{DType, Tensor, TensorData};
use kv_core::{
    Budget, DecodeAttentionOptions, LayerCache, Room, Selection, read_f32, read_i32, top,
};
use serde::{Deserialize, Serialize};

use crate::{LayerContext, Needs, Observation, Plan, Policy, PolicyError, Reduction, Result, Step};

/// The top-k oracle: the whole cache stays, but every decode step attends only to sinks, recents
/// and the tokens between them that have the most attention. It shows what a perfect choice of that
/// size would keep; it reads everything to choose, and chooses on the host.
///
/// Sinks and recents are 1/16 and 1/4 of the budget, as in PrHS (8 and 32 of 128).
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TopKOracle {
    /// Tokens attended to per key-value head.
    pub budget: Budget,
    /// First tokens, always attended to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sinks: Option<usize>,
    /// Last tokens, always attended to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recents: Option<usize>,
    /// How a group's query heads become one score.
    #[serde(default)]
    pub reduction: Reduction,
}

impl TopKOracle {
    fn protected(&self, budget: usize) -> Result<(usize, usize)> {
        let sinks = self.sinks.unwrap_or(budget / 16);
        let recents = self.recents.unwrap_or(budget / 4);
        PolicyError::check_protected(self.name(), sinks, recents, budget)?;
        Ok((sinks, recents))
    }

    /// Log-weights `[S]` that leave only the chosen slots.
    fn choose(
        &self,
        cache: &LayerCache,
        probabilities: &Tensor<2>,
        now: &[i32],
    ) -> Result<Tensor<1>> {
        let [slots, group] = probabilities.dims();
        let layout = cache.layout();
        let positions = cache.read_positions()?;
        let probabilities = read_f32("probabilities", probabilities.clone())?;
        let own = cache.log_weights().cloned();
        let own = own.map(|weights| read_f32("log_weights", weights)).transpose()?;
        let mut chosen = vec![f32::NEG_INFINITY; slots];
        for pair in 0..layout.pairs() {
            let budget = cache.limits().map_or(usize::MAX, |limits| limits[pair]);
            let (sinks, recents) = self.protected(budget.min(layout.lengths()[pair]))?;
            let newest = i64::from(now[pair / layout.kv_heads()]);
            let live = layout.live(pair);
            let scores: Vec<f32> = live
                .clone()
                .map(|slot| {
                    let position = i64::from(positions[slot]);
                    let members = &probabilities[slot * group..][..group];
                    if position < sinks as i64 || position > newest - recents as i64 {
                        f32::INFINITY
                    } else if self.reduction == Reduction::Max {
                        members.iter().copied().fold(0.0, f32::max)
                    } else {
                        members.iter().sum()
                    }
                })
                .collect();
            for index in top(&scores, budget) {
                let slot = live.start + index as usize;
                chosen[slot] = own.as_ref().map_or(0.0, |own| own[slot]);
            }
        }
        let device = &cache.options().device;
        Ok(Tensor::from_data(TensorData::new(chosen, [slots]), (device, DType::F32)))
    }
}

impl Policy for TopKOracle {
    fn name(&self) -> &'static str {
        "top-k-oracle"
    }

    fn config(&self) -> serde_json::Value {
        crate::registry::config_of(self.name(), self)
    }

    fn needs(&self) -> Needs {
        Needs::default()
    }

    fn select(&self, observation: &Observation<'_>) -> Result<Plan> {
        let [batch, kv_heads, tokens, _] = observation.dims();
        self.protected(self.budget.resolve(tokens))?;
        Ok(Selection::all(batch * kv_heads, tokens).into())
    }

    fn prime(
        &self,
        cache: &mut LayerCache,
        observation: &Observation<'_>,
        _selection: &Selection,
    ) -> Result<()> {
        let budget = match self.budget {
            Budget::Tokens(count) => count,
            Budget::Ratio(_) => self.budget.resolve(observation.tokens()),
        };
        Ok(cache.set_limits(vec![budget; cache.layout().pairs()])?)
    }

    fn room(&self, _observation: &Observation<'_>, new_tokens: usize) -> Result<Room> {
        Ok(Room::Extra(new_tokens))
    }

    fn changes_decode(&self) -> bool {
        true
    }

    fn step(&self, _layer: LayerContext, cache: &mut LayerCache, step: Step) -> Result<Tensor<3>> {
        let query = step.append(cache)?;
        let options = DecodeAttentionOptions { probabilities: true, ..Default::default() };
        let whole = cache.attend(query.clone(), options)?;
        let within = cache.limits().is_some_and(|limits| {
            limits.iter().zip(cache.layout().lengths()).all(|(limit, length)| length <= limit)
        });
        let Some(probabilities) = whole.probabilities.filter(|_| !within) else {
            return Ok(whole.output);
        };
        let now = read_i32("positions", step.position)?;
        let weights = self.choose(cache, &probabilities, &now)?;
        let options = DecodeAttentionOptions::default();
        Ok(cache.attend_weighted(query, Some(weights), options)?.output)
    }
}
