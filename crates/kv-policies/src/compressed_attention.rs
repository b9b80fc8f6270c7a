//! A policy and one layer's cache as a Burn module.

use std::sync::Arc;

use burn::module::{
    Content, Devices, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper, ModuleVisitor,
};
use burn::tensor::{Device, Tensor};
use kv_core::{CacheOptions, LayerCache};

use crate::{LayerContext, Observation, Policy, PolicyError, Result, Step};

/// The attention of one layer over a compressed cache, to plug into a Burn model of one's own: show
/// it the prompt once, then each decode step.
///
/// It has no parameters. `to_device` and `fork` move and copy the cache; a module's record does not
/// hold it, since it belongs to a request: [`kv_core::KvCache::save`] does.
#[derive(Debug, Clone)]
pub struct CompressedAttention {
    policy: Arc<dyn Policy>,
    layer: LayerContext,
    cache: Option<LayerCache>,
}

impl CompressedAttention {
    /// Attention of `layer` under `policy`, without a prompt yet.
    pub fn new(policy: Arc<dyn Policy>, layer: LayerContext) -> Self {
        Self { policy, layer, cache: None }
    }

    /// Compresses the prompt, with room for `new_tokens` steps. [`Policy::needs`] says what
    /// `observation` must hold. A cache of an earlier prompt is freed.
    ///
    /// # Errors
    /// The errors of [`Policy::prefill`]; there is no cache then.
    pub fn prefill(
        &mut self,
        observation: &Observation<'_>,
        new_tokens: usize,
        options: CacheOptions,
    ) -> Result<()> {
        self.cache = None;
        self.cache = Some(self.policy.prefill(observation, new_tokens, options)?);
        Ok(())
    }

    /// One decode step: append, attend, update. Returns the attention output, `[B, Hq, D]`.
    ///
    /// # Errors
    /// [`PolicyError::MissingObservation`] before a prompt, and the errors of [`Policy::step`].
    pub fn forward(&mut self, step: Step) -> Result<Tensor<3>> {
        let policy = self.policy.name();
        let missing = PolicyError::MissingObservation { policy, what: "a prompt" };
        self.policy.step(self.layer, self.cache.as_mut().ok_or(missing)?, step)
    }

    /// The compressed cache.
    pub fn cache(&self) -> Option<&LayerCache> {
        self.cache.as_ref()
    }
}

impl Module for CompressedAttention {
    fn collect_devices(&self, mut devices: Devices) -> Devices {
        let own = self.cache.as_ref().map(|cache| &cache.options().device);
        if let Some(device) = own.filter(|device| !devices.contains(device)) {
            devices.push(device.clone());
        }
        devices
    }

    fn to_device(self, device: &Device) -> Self {
        Self { cache: self.cache.map(|cache| cache.to_device(device)), ..self }
    }

    fn fork(self, device: &Device) -> Self {
        self.to_device(device)
    }

    fn train(self) -> Self {
        self
    }

    fn valid(&self) -> Self {
        self.clone()
    }

    fn materialize(self) -> Self {
        self
    }

    fn visit<V: ModuleVisitor>(&self, _visitor: &mut V) {}

    fn map<M: ModuleMapper>(self, _mapper: &mut M) -> Self {
        self
    }
}

impl ModuleDisplayDefault for CompressedAttention {
    fn content(&self, content: Content) -> Option<Content> {
        let slots = self.cache.as_ref().map_or(0, |cache| cache.layout().used());
        content.add("policy", self.policy.name()).add("slots", &slots).optional()
    }
}

impl ModuleDisplay for CompressedAttention {}
