//! D2O: H2O's victims are averaged into the most similar slots that stay.

mod decode;
mod layers;

use std::sync::Arc;

use burn::tensor::{DType, Tensor};
use kv_core::{CacheOptions, LayerCache, Selection};
use kv_kernels::{KeyRule, MergeOptions, NO_SLOT, Nearest};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::merging::merge_groups::{Groups, one_vote_each};
use crate::policy::check::Check;
use crate::policy::config::{Config, EVICTOR, config_around};
use crate::policy::evictor::{evictor_of, evictor_part};
use crate::policy::forward::forward;
use crate::policy::kept_tokens::KeptTokens;
use crate::policy::sentinels::NO_THRESHOLD;
use crate::{
    Attended, Capabilities, Composition, Eviction, EvictionPolicy, H2o, LayerContext, Merge, Needs,
    Observation, OwnedObservation, Policy, Result, Scorer, StepPlan,
};

const NAME: &str = "d2o";
/// State of each sequence's threshold, `[B, 1, 1]`.
const THRESHOLD: &str = "threshold";

/// D2O (Wan et al., 2024): each victim of H2O is merged into the kept slot of the most similar key,
/// if the cosine reaches a threshold, else dropped. The threshold starts as the mean of the highest
/// cosines of the prompt's victims, and is then a moving average over steps (equation 7). Keys and
/// values are averaged with weights `exp(cos)`, and `e` for the kept slot itself (equations 8 and
/// 9); a merged slot counts as one in attention.
///
/// A layer's budget is in proportion to `softmax(−f)`, where `f` is the variation of its attention
/// over tokens. All `f` are known once the whole prompt has been prefilled, so layers are
/// compressed together ([`Policy::prefill_layers`]). A layer that is compressed alone has an equal
/// share.
#[derive(Debug, Clone)]
pub struct D2o {
    evictor: Arc<dyn EvictionPolicy>,
    options: D2oOptions,
}

/// D2O's own options.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct D2oOptions {
    /// The weight of a step's cosines in the threshold's moving average.
    pub momentum: f64,
    /// Whether layers have budgets by the variation of their attention, rather than by the
    /// evictor's `layers`.
    pub dynamic_layers: bool,
    /// Whether merges and budgets are as in the authors' code. Sums have the weights `cos` and 1
    /// and are divided by the number of tokens. The `i`-th victims of all heads are merged or
    /// dropped together, by their mean cosine. With dynamic budgets, the first two layers and the
    /// last stay whole, and the least and most slots of a layer change no other layer's budget.
    pub official: bool,
    /// Whether first and last tokens that the evictor always keeps take no merges, so that they
    /// stay as they are. The paper and the authors' code merge into all that is kept.
    pub spare_protected: bool,
}

impl Default for D2oOptions {
    fn default() -> Self {
        Self { momentum: 0.5, dynamic_layers: true, official: false, spare_protected: false }
    }
}

impl D2o {
    /// # Errors
    /// [`crate::PolicyError::InvalidConfig`] for policies that do not evict by scores, and options
    /// out of range.
    pub fn new(evictor: Arc<dyn Policy>, options: D2oOptions) -> Result<Self> {
        let evictor = evictor_of(evictor, NAME)?;
        Check(NAME).share("momentum", options.momentum)?;
        Ok(Self { evictor, options })
    }

    fn merging() -> MergeOptions {
        MergeOptions { rule: KeyRule::Mean, ..Default::default() }
    }

    /// `ln s` of members by their cosines; the kept slot's cosine is 1.
    fn log_scores<const D: usize>(&self, cosines: Tensor<D>) -> Tensor<D> {
        // 1e-30 is lost in f32 beside 1; the logarithm of 0 is no number on some devices.
        if self.options.official { cosines.clamp_min(1e-30).log() } else { cosines }
    }

    /// Merges a prompt's victims, and sets the thresholds.
    fn merge_prompt(
        &self,
        cache: &mut LayerCache,
        observation: &Observation<'_>,
        selection: &Selection,
    ) -> Result<()> {
        let [batch, kv_heads, tokens, head_dim] = observation.dims();
        let total_kv_heads = batch * kv_heads;
        let device = cache.options().device.clone();
        let kept = KeptTokens::new(cache, selection, tokens)?;
        let mut groups = Groups::of_prompts(selection, tokens, &kept)?;
        if groups.is_empty() {
            let none_yet = Tensor::full([batch, 1, 1], NO_THRESHOLD, (&device, DType::F32));
            cache.set_state(THRESHOLD, none_yet);
            return Ok(());
        }
        if self.options.spare_protected {
            let slots = selection.lengths().iter().copied().min().unwrap_or_default();
            groups = groups.sparing_ends(self.evictor.protected(slots, false)?);
        }
        let flat = |tensor: &Tensor<4>| {
            let rows = tensor.clone().reshape([total_kv_heads * tokens, head_dim]);
            rows.cast(cache.options().dtype)
        };
        let (keys, values) = (flat(observation.keys), flat(observation.values));
        let Nearest { places, cosines } = groups.nearest(&keys)?;
        let [_, width] = cosines.dims();
        let mut cosines = cosines.reshape([batch, kv_heads, width]);
        let counts = groups.victim_counts();
        // Where heads have different numbers of victims, cosines behind a head's last one are 0.
        let ragged = counts.iter().any(|&count| count < width);
        let lives = || {
            let lives = counts
                .iter()
                .flat_map(|&count| (0..width).map(move |at| f32::from(at < count)))
                .collect::<Vec<_>>();
            let lives = Tensor::<1>::from_data(lives.as_slice(), (&device, DType::F32));
            lives.reshape([batch, kv_heads, width])
        };
        if ragged {
            cosines = cosines.mask_fill(lives().equal_scalar(0.0), 0.0);
        }
        let totals: Vec<f32> =
            counts.chunks(kv_heads).map(|of| of.iter().sum::<usize>() as f32).collect();
        let some = totals.iter().all(|&total| total > 0.0);
        let totals = Tensor::<1>::from_data(totals.as_slice(), (&device, DType::F32));
        let totals = totals.reshape([batch, 1, 1]);
        let sums = cosines.clone().sum_dim(2).sum_dim(1);
        let thresholds = match some {
            true => sums / totals,
            false => {
                let none = totals.clone().equal_scalar(0.0);
                (sums / totals.clamp_min(1.0)).mask_fill(none, NO_THRESHOLD)
            }
        };
        cache.set_state(THRESHOLD, thresholds.clone());
        let decides = match self.options.official {
            // The authors decide by victims' ranks, for all heads together.
            true => {
                let heads = lives().sum_dim(1).clamp_min(1.0);
                (cosines.clone().sum_dim(1) / heads).expand([batch, kv_heads, width])
            }
            false => cosines.clone(),
        };
        let goes = decides.lower(thresholds.expand([batch, kv_heads, width]));
        let targets = places.mask_fill(goes.reshape([total_kv_heads, width]), NO_SLOT);

        let of_victims = self.log_scores(cosines.reshape([total_kv_heads, width]));
        let most = selection.lengths().iter().copied().max().unwrap_or_default();
        let of_kept = Tensor::ones([total_kv_heads, most], (&device, DType::F32));
        let weights = [of_victims, self.log_scores(of_kept)].map(one_vote_each);
        let from = Some([&keys, &values]);
        let merged = groups.merge(cache, from, targets, weights, Self::merging())?;
        if !self.options.official {
            return Ok(());
        }
        // The authors divide by the number of tokens rather than by the weights: the mean of these
        // is the slot's score.
        let slots = merged.slots();
        let factors = merged.weights.narrow(1, 1, 1).squeeze_dim::<1>(1).exp();
        Ok(cache.scale_slots(&slots, factors)?)
    }

    /// The policy from its configuration, around the evictor that it names or the paper's.
    pub(crate) fn from_config(config: &mut Config) -> Result<Arc<dyn Policy>> {
        let evictor = evictor_part(config, H2o::NAME)?;
        Ok(Arc::new(Self::new(evictor, config.take_all::<D2oOptions>(NAME)?)?))
    }
}

impl Policy for D2o {
    forward!(evictor: budget, select, room);

    fn name(&self) -> &'static str {
        NAME
    }

    fn config(&self) -> Value {
        config_around(NAME, &self.options, &*self.evictor)
    }

    fn composition(&self) -> Composition<'_> {
        Composition::Around { option: EVICTOR, inner: &*self.evictor }
    }

    fn needs(&self) -> Needs {
        let own = Needs { column_sums: self.options.dynamic_layers, ..Needs::default() };
        self.evictor.needs().union(own)
    }

    fn init_cache(
        &self,
        cache: &mut LayerCache,
        observation: &Observation<'_>,
        selection: &Selection,
    ) -> Result<()> {
        self.evictor.init_cache(cache, observation, selection)?;
        self.merge_prompt(cache, observation, selection)
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            needs_all_layers: self.options.dynamic_layers,
            changes_decode: true,
            // Thresholds are means over a layer's heads.
            compares_heads: true,
            draws: self.evictor.capabilities().draws,
            ..Capabilities::default()
        }
    }

    fn prefill_layers(
        &self,
        layers: &[OwnedObservation],
        new_tokens: usize,
        options: CacheOptions,
    ) -> Result<Vec<LayerCache>> {
        if self.options.dynamic_layers {
            return self.prefill_together(layers, new_tokens, &options);
        }
        let each = layers.iter();
        each.map(|layer| self.prefill(&layer.view(), new_tokens, options.clone())).collect()
    }

    fn plan(&self, layer: LayerContext, cache: &LayerCache) -> Result<StepPlan<'_>> {
        let plan = self.evictor.plan(layer, cache)?;
        // The list of slots that are not protected is made on the host.
        let evicts = self.evictor.capabilities().changes_decode;
        let recordable = plan.recordable && evicts && !self.options.spare_protected;
        Ok(plan.merging(self).recordable(recordable))
    }
}

impl Merge for D2o {
    fn merge(&self, cache: &mut LayerCache, attended: Attended<'_>) -> Result<Option<Eviction>> {
        // Many victims at once are dropped unmerged: the paper merges one at every step.
        if let Some(Eviction::One { victims, limits }) = &attended.due {
            self.merge_victims(cache, victims, limits)?;
        }
        Ok(attended.due)
    }
}
