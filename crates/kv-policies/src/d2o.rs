//! D2O: what H2O evicts is averaged into the most similar of what it keeps.

mod decode;
mod layers;

use std::sync::Arc;

use burn::tensor::{DType, Tensor};
use kv_core::{CacheOptions, KeyRule, LayerCache, MergeOptions, Room, Selection};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::evictor::evictor_of;
use crate::merge_groups::Groups;
use crate::{
    Due, Evictor, LayerContext, Needs, Observation, Observed, Plan, Policy, PolicyError, Result,
    Step,
};

const NAME: &str = "d2o";
/// State of each sequence's threshold, `[B, 1, 1]`.
const THRESHOLD: &str = "threshold";
/// The threshold of a sequence that has had no victims: below all cosines.
const NONE_YET: f32 = -2.0;

/// D2O (Wan et al., 2024): each victim of H2O is merged into the kept slot of the most similar key, if
/// the cosine reaches a threshold, else dropped. The threshold starts as the mean of the prompt's
/// victims' highest cosines and follows those of the steps (equation 7). Keys and values are averaged
/// with weights `exp(cos)`, and `e` for the kept slot itself (equations 8 and 9); a merged slot counts
/// as one in attention.
///
/// Layers have budgets by how much their attention varies from token to token, the more the less it
/// does: in proportion to `softmax(−f)`. That is known when the whole prompt has been
/// prefilled, so that layers are compressed together ([`Policy::prefill_layers`]); a layer alone has
/// its own equal share.
#[derive(Debug, Clone)]
pub struct D2o {
    evictor: Arc<dyn Evictor>,
    options: D2oOptions,
}

/// D2O's own options.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct D2oOptions {
    /// How much a step's cosines count in the threshold.
    pub momentum: f64,
    /// Whether layers have budgets by how much their attention varies, rather than as the evictor's
    /// `layers` says.
    pub dynamic_layers: bool,
    /// Whether keys and values are summed and compared as in the authors' code: weights `cos` and 1,
    /// divided by the number of tokens; and the `i`-th victims of all heads stay or go together, by
    /// their mean cosine. With dynamic budgets, the first two layers and the last stay whole, and
    /// what a layer may have least and most is not made up for by others.
    pub official: bool,
}

impl Default for D2oOptions {
    fn default() -> Self {
        Self { momentum: 0.5, dynamic_layers: true, official: false }
    }
}

impl D2o {
    /// # Errors
    /// [`PolicyError::InvalidConfig`] for policies that do not evict by scores, and options out of
    /// range.
    pub fn new(evictor: Arc<dyn Policy>, options: D2oOptions) -> Result<Self> {
        let invalid = |reason| PolicyError::InvalidConfig { policy: NAME.into(), reason };
        let evictor = evictor_of(evictor, NAME)?;
        if !(0.0..=1.0).contains(&options.momentum) {
            let momentum = options.momentum;
            return Err(invalid(format!("`momentum` is {momentum}, expected 0 to 1")));
        }
        Ok(Self { evictor, options })
    }

    fn merging() -> MergeOptions {
        MergeOptions { rule: KeyRule::Mean, ..Default::default() }
    }

    /// A member's weight as a logarithm, `[ln p, ln s]`; the kept slot's own is that of a cosine of 1.
    fn weights(&self, cosine: f32) -> [f32; 2] {
        [0.0, if self.options.official { cosine.max(0.0).ln() } else { cosine }]
    }

    /// Merges a prompt's victims, and sets the thresholds.
    fn merge_prompt(
        &self,
        cache: &mut LayerCache,
        observation: &Observation<'_>,
        selection: &Selection,
    ) -> Result<()> {
        let [batch, kv_heads, tokens, head_dim] = observation.dims();
        let pairs = batch * kv_heads;
        let groups = Groups::of_prompts(selection.kept(), tokens, &observation.keys.device());
        let flat = |tensor: &Tensor<4>| {
            let rows = tensor.clone().reshape([pairs * tokens, head_dim]);
            rows.cast(cache.options().dtype)
        };
        let (keys, values) = (flat(observation.keys), flat(observation.values));
        let nearest = groups.nearest(&keys)?;
        let thresholds: Vec<f32> = nearest
            .chunks(kv_heads)
            .map(|heads| {
                let cosines = heads.iter().flatten().map(|(_, cosine)| f64::from(*cosine));
                match heads.iter().map(Vec::len).sum::<usize>() {
                    0 => NONE_YET,
                    count => (cosines.sum::<f64>() / count as f64) as f32,
                }
            })
            .collect();
        let device = cache.options().device.clone();
        let state = Tensor::<1>::from_data(thresholds.as_slice(), (&device, DType::F32));
        cache.set_state(THRESHOLD, state.reshape([batch, 1, 1]));

        let targets: Vec<Vec<i32>> = nearest
            .iter()
            .enumerate()
            .map(|(pair, own)| {
                let row = pair / kv_heads;
                let heads = &nearest[row * kv_heads..][..kv_heads];
                let stays = |rank: usize, cosine: f32| match self.options.official {
                    true => {
                        let ranked = heads.iter().filter_map(|head| head.get(rank));
                        let (sum, count) = ranked
                            .fold((0.0, 0), |(sum, count), (_, cosine)| (sum + cosine, count + 1));
                        sum / count as f32 >= thresholds[row]
                    }
                    false => cosine >= thresholds[row],
                };
                let ranked = own.iter().enumerate();
                let target = ranked.map(
                    |(rank, &(place, cosine))| {
                        if stays(rank, cosine) { place } else { -1 }
                    },
                );
                target.collect()
            })
            .collect();
        // Victims weigh by their cosines, kept tokens as their own like.
        let mut cosines = vec![1.0f32; pairs * tokens];
        for (pair, own) in nearest.iter().enumerate() {
            for (&victim, &(_, cosine)) in groups.victims[pair].iter().zip(own) {
                cosines[pair * tokens + victim as usize] = cosine;
            }
        }
        let weights = |pair: usize, at: u32| self.weights(cosines[pair * tokens + at as usize]);
        let from = Some([&keys, &values]);
        let merged = groups.merge(cache, from, &targets, weights, Self::merging())?;
        let Some((slots, _)) = merged.filter(|_| self.options.official) else { return Ok(()) };
        // The authors divide by the number of tokens rather than by the weights.
        let mut factors = Vec::new();
        for (pair, targets) in targets.iter().enumerate() {
            let mut sums = std::collections::BTreeMap::new();
            for (&target, &(_, cosine)) in targets.iter().zip(&nearest[pair]) {
                if target >= 0 {
                    let (sum, count) = sums.entry(target).or_insert((1.0f32, 1.0f32));
                    *sum += cosine.max(0.0);
                    *count += 1.0;
                }
            }
            factors.push(sums.into_values().map(|(sum, count)| sum / count).collect::<Vec<f32>>());
        }
        let width = slots.dims()[0] / pairs;
        let factors: Vec<f32> = factors
            .into_iter()
            .flat_map(|mut row| {
                row.resize(width, 1.0);
                row
            })
            .collect();
        let factors = Tensor::<1>::from_data(factors.as_slice(), (&device, DType::F32));
        Ok(cache.scale_slots(&slots, factors)?)
    }
}

impl Policy for D2o {
    fn name(&self) -> &'static str {
        NAME
    }

    fn config(&self) -> Value {
        crate::registry::config_around(NAME, &self.options, &*self.evictor)
    }

    fn needs(&self) -> Needs {
        let own = Needs { column_sums: self.options.dynamic_layers, ..Needs::default() };
        self.evictor.needs().union(own)
    }

    fn select(&self, observation: &Observation<'_>) -> Result<Plan> {
        self.evictor.select(observation)
    }

    fn prime(
        &self,
        cache: &mut LayerCache,
        observation: &Observation<'_>,
        selection: &Selection,
    ) -> Result<()> {
        self.evictor.prime(cache, observation, selection)?;
        self.merge_prompt(cache, observation, selection)
    }

    fn room(&self, observation: &Observation<'_>, new_tokens: usize) -> Result<Room> {
        self.evictor.room(observation, new_tokens)
    }

    fn defers(&self) -> bool {
        self.options.dynamic_layers
    }

    fn prefill_layers(
        &self,
        layers: &[Observed],
        new_tokens: usize,
        options: CacheOptions,
    ) -> Result<Vec<LayerCache>> {
        if self.options.dynamic_layers {
            return self.prefill_together(layers, new_tokens, &options);
        }
        let each = layers.iter();
        each.map(|layer| self.prefill(&layer.view(), new_tokens, options.clone())).collect()
    }

    fn changes_decode(&self) -> bool {
        true
    }

    fn step(&self, layer: LayerContext, cache: &mut LayerCache, step: Step) -> Result<Tensor<3>> {
        let attended = self.evictor.attend(layer, cache, &step)?;
        match attended.due {
            None => {}
            Some(Due::Slots { victims, limits }) => {
                self.merge_victims(cache, &victims, &limits)?;
                cache.evict_slots(victims, &limits)?;
            }
            // Many at once are dropped as they are: the paper merges at every step.
            Some(others) => others.drop_from(cache)?,
        }
        Ok(attended.output)
    }
}
