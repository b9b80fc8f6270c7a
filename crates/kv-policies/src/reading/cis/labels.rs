//! A few channels of every key, for retrievals that score slots by them alone.

use burn::tensor::{Device, Tensor};
use kv_core::{
    Error, HostState, LayerCache, LoadState, PolicyState, Result, SavedState, StateBytes,
    expect_shape, packed, read_i32, states_of,
};
use kv_kernels::copy_labels;

use crate::policy::lists::missing;
use crate::reading::channels::CHANNELS;

/// The label channels of every slot's key, `[S, r]`, in the cache's dtype. Which channels they are,
/// the cache's state [`CHANNELS`] says, integers `[B, Hkv, r]`.
#[derive(Debug)]
pub(super) struct LabelKeys(Tensor<2>);

impl LabelKeys {
    /// The labels of all slots of a cache.
    fn of(cache: &LayerCache) -> Result<Self> {
        let channels = cache.int_state(CHANNELS).ok_or_else(|| missing("label channels"))?;
        let [batch, kv_heads, count] = channels.dims();
        let channels = channels.clone().reshape([batch * kv_heads, count]);
        let of_slots = channels.select(0, cache.slot_ranges().clone());
        Ok(Self(packed(cache.keys().clone().gather(1, of_slots))))
    }

    /// Keeps the labels of a cache's slots from now on.
    ///
    /// # Errors
    /// [`Error::InvalidPlan`] for caches without the state [`CHANNELS`].
    pub(super) fn keep(cache: &mut LayerCache) -> Result<()> {
        let own = Self::of(cache)?;
        cache.insert_policy_state(own);
        Ok(())
    }

    /// Adds the labels of the newest slots, in place, and returns the label channels of queries and
    /// of all slots: `[B, N, r]` and `[S, r]`.
    ///
    /// # Shapes
    /// `queries` `[B, N, D]`, with the queries of a key-value head side by side.
    ///
    /// # Errors
    /// [`Error::InvalidPlan`] for caches without labels, [`Error::Shape`] for labels of another
    /// number of channels than `count`.
    pub(super) fn score(
        cache: &mut LayerCache,
        queries: Tensor<3>,
        count: usize,
    ) -> Result<(Tensor<3>, Tensor<2>)> {
        let scored = cache.with_policy_state(|own: &mut Self, cache| {
            let channels = cache.int_state(CHANNELS).ok_or_else(|| missing("label channels"))?;
            let [_, _, labels] = channels.dims();
            expect_shape("label channels", &[labels], &[count])?;
            let chosen = copy_labels(queries, cache.keys(), channels, cache.ranges(), &mut own.0)?;
            Ok((chosen, own.0.clone()))
        });
        scored.ok_or_else(|| missing("label channels of keys"))?
    }
}

impl PolicyState for LabelKeys {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn copied(&self) -> Option<Box<dyn PolicyState>> {
        Some(Box::new(Self(packed(self.0.clone().mul_scalar(1.0)))))
    }

    fn to_device(&self, device: &Device) -> Option<Box<dyn PolicyState>> {
        Some(Box::new(Self(packed(self.0.clone().to_device(device)))))
    }

    /// Labels are read out of the keys where the batch's slots are there.
    fn joined(&self, others: &[&dyn PolicyState]) -> Result<Box<dyn PolicyState>> {
        states_of::<Self>(self, others)?;
        Ok(Box::new(Self(self.0.clone())))
    }

    /// That there are labels: they follow from keys and channels.
    fn to_host(&self) -> Result<Option<HostState>> {
        let saved = SavedState::of::<Self>(true.into(), Default::default());
        Ok(Some(HostState::Saved(saved)))
    }

    fn bytes(&self, _cache: &LayerCache) -> StateBytes {
        let [slots, labels] = self.0.dims();
        StateBytes { device: slots * labels * self.0.dtype().size(), ..StateBytes::default() }
    }

    fn slots_moved(&mut self, cache: &LayerCache) -> Result<()> {
        *self = Self::of(cache)?;
        Ok(())
    }
}

impl LoadState for LabelKeys {
    const NAME: &'static str = "labels";

    fn load(_saved: SavedState, cache: &LayerCache, _seen: &[usize]) -> Result<Self> {
        let channels = cache.int_state(CHANNELS).ok_or_else(|| missing("label channels"))?;
        let (layout, dims) = (cache.layout(), channels.dims());
        expect_shape("label channels", &dims, &[layout.batch(), layout.kv_heads(), dims[2]])?;
        let dim = cache.head_dim() as i32;
        let known = read_i32("label channels", channels.clone())?;
        if let Some(channel) = known.into_iter().find(|channel| !(0..dim).contains(channel)) {
            let reason = format!("channel {channel}, expected 0 to {}", dim - 1);
            return Err(Error::InvalidPlan { what: "label channels", reason });
        }
        Self::of(cache)
    }
}
