//! CaM: the values of another policy's victims are spread on the slots that stay.

mod decode;
mod many;

use std::sync::Arc;

use burn::tensor::{DType, Int, Tensor};
use kv_core::{LayerCache, Selection, read_f32};
use kv_kernels::GroupReduction;
use rand::Rng;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::policy::attention_scores::window_weights;
use crate::policy::check::Check;
use crate::policy::config::{Config, EVICTOR, config_around};
use crate::policy::evictor::{evictor_of, evictor_part};
use crate::policy::forward::forward;
use crate::policy::generator::generator;
use crate::policy::state_tensors::int_numbers;
use crate::{
    Attended, Capabilities, Composition, Eviction, EvictionPolicy, LayerContext, Merge, Needs,
    Observation, Policy, PolicyError, Reduction, Result, Scorer, Step, StepPlan, StreamingLlm,
};

const NAME: &str = "cam";
/// Track of each slot's attention, the group's mean, summed since the prompt's first query.
const ATTENTION: &str = "attention";
/// State of each head's seed, `[B, Hkv, 2]`: two numbers of 24 bits.
const SEEDS: &str = "seeds";

/// CaM (Zhang et al., 2024) around any policy that evicts by scores: with probability
/// `clamp(A_e / mean(A_next), 0, 1)` the value of a victim `e` is spread evenly on the next
/// `spread` survivors in the order of positions, `v_j + v_e / m` for each of the `m` that there
/// are; else it is dropped. Keys stay as they are, and each head draws its own random numbers. Of a
/// prompt, survivors receive the victims' original values, not merged ones.
///
/// `A` is the attention of each token from the last query, as in the authors' generation code
/// (HELM) with a `spread` of 32, or from all queries, as in their streaming code with a `spread` of
/// 16. Both codes keep sinks and recents, merge no tokens of the prompt, and merge one token in
/// each decode step.
#[derive(Debug, Clone)]
pub struct Cam {
    evictor: Arc<dyn EvictionPolicy>,
    options: CamOptions,
}

/// CaM's own options.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CamOptions {
    /// Survivors that a value is spread on.
    pub spread: usize,
    /// The attention that probabilities follow from.
    pub attention: CamAttention,
    /// Which of a prompt's victims may be spread; none in the authors' code.
    pub candidates: Candidates,
    /// Whether a victim is compared with all survivors behind it rather than the next ones, and
    /// each share is `1 / spread` even where fewer receive one, as in the authors' generation code.
    pub official: bool,
}

/// Which of a prompt's victims may be spread: a number or `"all"`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, expecting = "`candidates` is neither a number of tokens nor \"all\"")]
pub enum Candidates {
    /// This number of victims, of the highest scores (`n_steps` in kvpress); 0 for none.
    Most(usize),
    /// All victims. Ours.
    All(All),
}

/// The word `"all"`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum All {
    /// All.
    All,
}

impl Candidates {
    /// All victims.
    pub const ALL: Self = Self::All(All::All);
}

/// The queries whose attention decides which values are spread.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CamAttention {
    /// All queries so far.
    Accumulated,
    /// The last query.
    #[default]
    Step,
}

impl Default for CamOptions {
    fn default() -> Self {
        let attention = CamAttention::default();
        Self { spread: 32, attention, candidates: Candidates::Most(0), official: false }
    }
}

impl Cam {
    /// # Errors
    /// [`PolicyError::InvalidConfig`] for policies that do not evict by scores, and options out of
    /// range.
    pub fn new(evictor: Arc<dyn Policy>, options: CamOptions) -> Result<Self> {
        let evictor = evictor_of(evictor, NAME)?;
        Check(NAME).positive("spread", options.spread)?;
        Ok(Self { evictor, options })
    }

    /// [`Policy::init_cache`] with given random numbers in `[0, 1)`: `uniform` returns the number
    /// of a head range and a token.
    ///
    /// # Errors
    /// The errors of [`Policy::init_cache`].
    // For comparisons with the authors' numbers, whose random numbers are given.
    #[doc(hidden)]
    pub fn init_cache_with(
        &self,
        cache: &mut LayerCache,
        observation: &Observation<'_>,
        selection: &Selection,
        uniform: impl Fn(usize, usize) -> f32,
    ) -> Result<()> {
        self.evictor.init_cache(cache, observation, selection)?;
        let [batch, kv_heads, ..] = observation.dims();
        let mut seeds = Vec::with_capacity(2 * batch * kv_heads);
        for row in 0..batch {
            for head in 0..kv_heads {
                seeds.extend(seed(observation, row, head).map(|part| part as usize));
            }
        }
        let device = cache.options().device.clone();
        cache.set_int_state(SEEDS, int_numbers(seeds, [batch, kv_heads, 2], &device));

        let spreads = self.options.candidates != Candidates::Most(0);
        if !spreads && self.options.attention == CamAttention::Step {
            return Ok(());
        }
        let attention = self.prompt_attention(observation)?;
        if self.options.attention == CamAttention::Accumulated {
            let attention = attention.clone().flatten(0, 1);
            cache.set_kept_track(ATTENTION, attention, selection, 0.0)?;
        }
        if !spreads {
            return Ok(());
        }
        let attention = read_f32("attention", attention)?;
        self.spread_prompt(cache, observation, selection, &attention, uniform)
    }

    /// [`Policy::step`] with given random numbers in `[0, 1)`, `[B, Hkv]`, f32, for evictors that
    /// drop single slots.
    ///
    /// # Errors
    /// The errors of [`Policy::step`].
    // As above.
    #[doc(hidden)]
    pub fn step_with(
        &self,
        layer: LayerContext,
        cache: &mut LayerCache,
        step: &Step,
        uniforms: Tensor<2>,
    ) -> Result<Tensor<3>> {
        let spreading = Spreading { cam: self, uniforms: Some(uniforms) };
        self.evictor.plan(layer, cache)?.merging(&spreading).run(layer, cache, step)
    }

    /// Each slot's attention after a step, `[S]`. Accumulated attention is written to its track.
    fn observe(&self, cache: &mut LayerCache, attended: &Attended<'_>) -> Result<Tensor<1>> {
        let (logits, log_sum_exp) = (attended.logits.clone(), attended.log_sum_exp.clone());
        if self.options.attention == CamAttention::Step {
            return Ok(cache.probabilities(logits, log_sum_exp, GroupReduction::Mean)?);
        }
        cache.add_probabilities(ATTENTION, logits, log_sum_exp, GroupReduction::Mean)?;
        let missing = PolicyError::MissingObservation { policy: NAME, what: "a prompt" };
        Ok(cache.track(ATTENTION).ok_or(missing)?.clone())
    }

    /// The attention that each token of a prompt has had, `[B, Hkv, T]`.
    fn prompt_attention(&self, observation: &Observation<'_>) -> Result<Tensor<3>> {
        let kv_heads = observation.dims()[1];
        let attention = match self.options.attention {
            CamAttention::Accumulated => observation.attention_sums(NAME)?,
            CamAttention::Step => {
                let query = observation.last_queries(NAME, 1)?;
                window_weights(&query, observation.keys)?.squeeze_dim(2)
            }
        };
        Ok(Reduction::Mean.groups(attention, kv_heads))
    }

    /// The policy from its configuration, around the evictor that it names or the paper's.
    pub(crate) fn from_config(config: &mut Config) -> Result<Arc<dyn Policy>> {
        let evictor = evictor_part(config, StreamingLlm::NAME)?;
        Ok(Arc::new(Self::new(evictor, config.take_all::<CamOptions>(NAME)?)?))
    }
}

/// The seed of one (sequence, layer, head): two numbers of 24 bits.
fn seed(observation: &Observation<'_>, row: usize, head: usize) -> [u32; 2] {
    let mut draws = generator(observation, row, head);
    [(); 2].map(|()| draws.random::<u32>() >> 8)
}

/// One number for each head range, `[B, Hkv]`: the new token's position is the counter.
fn draw(cache: &LayerCache, position: &Tensor<1, Int>) -> Result<Tensor<2>> {
    let (batch, heads) = (cache.layout().batch(), cache.layout().kv_heads());
    let missing = PolicyError::MissingObservation { policy: NAME, what: "a prompt" };
    let seeds = cache.int_state(SEEDS).ok_or(missing)?.clone();
    let draws = position.clone().cast(DType::I32).unsqueeze_dim::<2>(1).expand([batch, heads]);
    let seeds = seeds.reshape([batch * heads, 2]);
    let numbers = kv_kernels::uniforms(seeds, draws.reshape([batch * heads]))?;
    Ok(numbers.reshape([batch, heads]))
}

impl Policy for Cam {
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
        let own = match self.options.attention {
            CamAttention::Accumulated => Needs { column_sums: true, ..Needs::default() },
            CamAttention::Step => Needs { window: 1, ..Needs::default() },
        };
        self.evictor.needs().union(own)
    }

    fn init_cache(
        &self,
        cache: &mut LayerCache,
        observation: &Observation<'_>,
        selection: &Selection,
    ) -> Result<()> {
        let [batch, kv_heads, ..] = observation.dims();
        let seeds: Vec<[u32; 2]> = (0..batch * kv_heads)
            .map(|range| seed(observation, range / kv_heads, range % kv_heads))
            .collect();
        self.init_cache_with(cache, observation, selection, |range, token| {
            kv_kernels::uniform(seeds[range], token as u32)
        })
    }

    fn restore(&self, cache: &mut LayerCache) -> Result<()> {
        cache.states_to_ints(&[SEEDS]);
        self.evictor.restore(cache)
    }

    fn capabilities(&self) -> Capabilities {
        let compares_heads = self.evictor.capabilities().compares_heads;
        Capabilities {
            changes_decode: true,
            compares_heads,
            draws: true,
            ..Capabilities::default()
        }
    }

    fn plan(&self, layer: LayerContext, cache: &LayerCache) -> Result<StepPlan<'_>> {
        let plan = self.evictor.plan(layer, cache)?;
        let recordable = plan.recordable && self.evictor.capabilities().changes_decode;
        Ok(plan.merging(self).recordable(recordable))
    }
}

/// CaM's merge. Evictors that drop single slots need random numbers in `[0, 1)`, `[B, Hkv]`, f32;
/// they are drawn where none are given.
struct Spreading<'a> {
    cam: &'a Cam,
    uniforms: Option<Tensor<2>>,
}

impl Merge for Cam {
    fn merge(&self, cache: &mut LayerCache, attended: Attended<'_>) -> Result<Option<Eviction>> {
        Spreading { cam: self, uniforms: None }.merge(cache, attended)
    }
}

impl Merge for Spreading<'_> {
    fn merge(&self, cache: &mut LayerCache, attended: Attended<'_>) -> Result<Option<Eviction>> {
        let attention = self.cam.observe(cache, &attended)?;
        Ok(match attended.due {
            Some(Eviction::One { victims, limits }) => {
                let uniforms = match &self.uniforms {
                    Some(uniforms) => uniforms.clone(),
                    None => draw(cache, &attended.step.position)?,
                };
                self.cam.spread_victims(cache, &victims, &limits, &attention, uniforms)?;
                Some(Eviction::One { victims, limits })
            }
            Some(many) => {
                let kept = many.kept(cache)?;
                self.cam.spread_others(cache, &kept, attention)?;
                Some(Eviction::Keep(kept))
            }
            None => None,
        })
    }
}
