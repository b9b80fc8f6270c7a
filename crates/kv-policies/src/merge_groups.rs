//! Merges of many victims a head at once, found and carried out on the device.

use burn::tensor::{DType, Device, Int, Tensor};
use kv_core::{
    LayerCache, MergeLists, MergeOptions, Nearest, Selection, SlotLists, nearest_slots, read_i32,
};

use crate::Result;

/// What stays and what goes of every (sequence, head).
pub(crate) struct Groups {
    kept: Selection,
    others: Selection,
    /// The same as rows of the pool that victims are in.
    kept_rows: SlotLists,
    victims: SlotLists,
}

/// Kept slots that victims went into.
pub(crate) struct Merged {
    /// Slots of the cache, `[N]`, −1 for those that nothing went into.
    pub(crate) slots: Tensor<1, Int>,
    /// What they weigh, `[N, 4]`.
    pub(crate) weights: Tensor<2>,
}

impl Groups {
    /// Of heads of `lengths` places, whose rows begin at `firsts`.
    pub(crate) fn new(
        kept: &Selection,
        lengths: &[usize],
        firsts: &[usize],
        device: &Device,
    ) -> Result<Self> {
        let others = kept.others(lengths)?;
        let (kept_rows, victims) = (kept.lists(firsts, device)?, others.lists(firsts, device)?);
        Ok(Self { kept: kept.clone(), others, kept_rows, victims })
    }

    /// Of prompts of so many tokens, whose rows follow each other.
    pub(crate) fn of_prompts(kept: &Selection, tokens: usize, device: &Device) -> Result<Self> {
        let firsts: Vec<usize> = (0..kept.pairs()).map(|pair| pair * tokens).collect();
        Self::new(kept, &vec![tokens; kept.pairs()], &firsts, device)
    }

    /// Of a cache's slots.
    pub(crate) fn of_slots(kept: &Selection, cache: &LayerCache) -> Result<Self> {
        let (layout, device) = (cache.layout(), &cache.options().device);
        Self::new(kept, layout.lengths(), layout.offsets(), device)
    }

    /// Whether nothing goes, or nothing stays that it could go into.
    pub(crate) fn is_empty(&self) -> bool {
        self.others.total() == 0 || self.kept.total() == 0
    }

    /// How many victims each head has.
    pub(crate) fn victim_counts(&self) -> &[usize] {
        self.others.lengths()
    }

    /// What goes of each head, as places. Waits for the device where that has chosen it.
    pub(crate) fn victims(&self) -> Result<&[Vec<u32>]> {
        Ok(self.others.kept()?)
    }

    /// What stays and what goes, as places, and where it goes, as places among what stays. Waits
    /// for the device.
    pub(crate) fn read(&self, targets: &Tensor<2, Int>) -> Result<Read<'_>> {
        let [_, width] = targets.dims();
        let targets = read_i32("merges", targets.clone())?;
        let rows = targets.chunks(width).zip(self.victim_counts());
        let targets = rows.map(|(row, &count)| row[..count].to_vec()).collect();
        Ok(Read { kept: self.kept.kept()?, victims: self.others.kept()?, targets })
    }

    /// Each victim's most similar kept one, as a place among these, and the cosine, `[P, N]`;
    /// behind a head's last victim anything.
    pub(crate) fn nearest(&self, keys: &Tensor<2>) -> Result<Nearest> {
        let near = nearest_slots(keys.clone(), &self.victims, &self.kept_rows, false);
        Ok(near.map_err(kv_core::Error::from)?)
    }

    /// Where each victim goes, `[P, N]`: its most similar kept one, as a place among these, −1
    /// where the cosine is not above the threshold.
    pub(crate) fn targets(&self, keys: &Tensor<2>, threshold: f32) -> Result<Tensor<2, Int>> {
        Ok(above(self.nearest(keys)?, threshold))
    }

    /// What victims and kept ones weigh, `[P, N, 4]` and `[P, M, 4]`, of what all rows there are
    /// do, `[S, 4]`.
    pub(crate) fn weights(&self, all: &Tensor<2>) -> [Tensor<3>; 2] {
        [&self.victims, &self.kept_rows].map(|lists| {
            let [pairs, width] = lists.slots.dims();
            let [_, columns] = all.dims();
            let rows = lists.slots.clone().clamp_min(0).flatten(0, 1);
            all.clone().select(0, rows).reshape([pairs, width, columns])
        })
    }

    /// Merges victims into the cache's kept slots, which stand in order at the beginning of every
    /// head where victims come from elsewhere (`from`). Weights are those of victims and of kept
    /// ones, with votes, as [`MergeLists`] has them.
    pub(crate) fn merge(
        &self,
        cache: &mut LayerCache,
        from: Option<[&Tensor<2>; 2]>,
        targets: Tensor<2, Int>,
        [victim_weights, kept_weights]: [Tensor<3>; 2],
        options: MergeOptions,
    ) -> Result<Merged> {
        let kept = match from {
            Some(_) => SlotLists {
                slots: cache.first_slots(self.kept.lengths())?,
                counts: self.kept_rows.counts.clone(),
            },
            None => self.kept_rows.clone(),
        };
        let lists = MergeLists {
            targets,
            victim_weights,
            kept_weights,
            victims: self.victims.clone(),
            kept,
        };
        let merged = cache.merge_slots(from, &lists, &options)?;
        let weights: Tensor<2> = merged.weights.flatten(0, 1);
        let [count, _] = weights.dims();
        // Whatever goes into a slot brings votes.
        let more = (weights.clone() - lists.kept_weights.flatten(0, 1)).narrow(1, 2, 2);
        let untouched = more.abs().sum_dim(1).reshape([count]).equal_scalar(0.0);
        let slots: Tensor<1, Int> = lists.kept.slots.flatten(0, 1);
        Ok(Merged { slots: slots.mask_fill(untouched, -1), weights })
    }
}

/// A head's lists on the host.
pub(crate) struct Read<'a> {
    pub(crate) kept: &'a [Vec<u32>],
    pub(crate) victims: &'a [Vec<u32>],
    pub(crate) targets: Vec<Vec<i32>>,
}

/// Every ranked one's most similar one among those that rank higher, as a place among them,
/// `[P, T]`; −1 where the cosine is not above the threshold. `ranked` are places of heads of `T`
/// rows each.
pub(crate) fn leaders(
    keys: &Tensor<2>,
    ranked: &Tensor<2, Int>,
    threshold: f32,
) -> Result<Tensor<2, Int>> {
    let [pairs, tokens] = ranked.dims();
    let device = keys.device();
    let firsts = Tensor::<1, Int>::arange(0..pairs as i64, (&device, DType::I32));
    let firsts = firsts.mul_scalar(tokens as i32).unsqueeze_dim::<2>(1).expand([pairs, tokens]);
    let counts = Tensor::full([pairs], tokens as i32, (&device, DType::I32));
    let lists = SlotLists { slots: ranked.clone() + firsts, counts };
    let nearest =
        nearest_slots(keys.clone(), &lists, &lists, true).map_err(kv_core::Error::from)?;
    Ok(above(nearest, threshold))
}

/// Places whose cosines are above a threshold, −1 else.
fn above(nearest: Nearest, threshold: f32) -> Tensor<2, Int> {
    let near = nearest.cosines.greater_scalar(threshold);
    nearest.places.mask_fill(near.bool_not(), -1)
}
