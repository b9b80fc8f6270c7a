//! The tokens that a cache keeps of a prompt, for all that is written beside them.

use burn::tensor::{DType, Int, Tensor};
use kv_core::{LayerCache, Selection};
use kv_kernels::{SlotLists, range_slots, scatter_scalars};

use crate::Result;

/// The kept tokens of every head range, in order.
#[derive(Debug, Clone)]
pub(crate) struct KeptTokens {
    /// Their rows of a prompt whose head ranges follow each other, `[P, M]`.
    pub(crate) rows: SlotLists,
    /// Their slots of the cache, `[P, M]`; −1 behind a head's last one.
    pub(crate) slots: Tensor<2, Int>,
}

impl KeptTokens {
    /// The tokens that `cache` keeps of a prompt of `tokens` tokens.
    ///
    /// # Errors
    /// The errors of [`Selection::lists`] and [`LayerCache::first_slots`].
    pub(crate) fn new(cache: &LayerCache, selection: &Selection, tokens: usize) -> Result<Self> {
        let firsts: Vec<usize> = (0..selection.head_ranges()).map(|range| range * tokens).collect();
        let rows = selection.lists(&firsts, &cache.options().device)?;
        Ok(Self { rows, slots: first_slots(cache, selection.lengths())? })
    }

    /// [`LayerCache::set_kept_track`].
    ///
    /// # Shapes
    /// `of` `[P, T]`, f32.
    ///
    /// # Errors
    /// The errors of [`LayerCache::set_track`].
    pub(crate) fn set_track(
        &self,
        cache: &mut LayerCache,
        name: &str,
        of: &Tensor<2>,
        initial: f32,
    ) -> Result<()> {
        let slots = cache.positions().dims()[0];
        let mut values = Tensor::full([slots], initial, (&of.device(), DType::F32));
        if slots > 0 {
            let kept = of_rows(of, &self.rows).flatten(0, 1);
            scatter_scalars(&mut values, self.slots.clone().flatten(0, 1), kept)
                .map_err(kv_core::Error::from)?;
        }
        Ok(cache.set_track(name, values, initial)?)
    }
}

/// The values `[P, N]` of the tokens that `rows` lists, out of the values of all tokens, `[P, T]`.
/// Entries behind a head's last one are arbitrary.
pub(crate) fn of_rows(all: &Tensor<2>, rows: &SlotLists) -> Tensor<2> {
    let [total_kv_heads, tokens] = all.dims();
    let dims = rows.slots.dims();
    let flat = all.clone().reshape([total_kv_heads * tokens]);
    flat.select(0, rows.slots.clone().clamp_min(0).flatten(0, 1)).reshape(dims)
}

/// [`LayerCache::first_slots`], in one launch where all heads have one length.
pub(crate) fn first_slots(cache: &LayerCache, lengths: &[usize]) -> Result<Tensor<2, Int>> {
    match lengths.first() {
        Some(&length) if length > 0 && lengths.iter().all(|&own| own == length) => {
            let offsets = &cache.ranges().offsets;
            Ok(range_slots(offsets, length).map_err(kv_core::Error::from)?)
        }
        _ => Ok(cache.first_slots(lengths)?),
    }
}

#[cfg(test)]
mod tests {
    use kv_core::{CacheOptions, Room, read_f32, read_i32};
    use kv_testing::{Numbers, devices};

    use super::*;
    use crate::Observation;

    /// As the cache itself sets tracks, for heads of equal and of different lengths.
    #[test]
    fn tracks_are_those_of_the_cache() {
        for tested in devices() {
            let device = &tested.device;
            let mut numbers = Numbers::new(3);
            let keys = numbers.tensor([2, 2, 9, 4], device);
            let values = numbers.tensor([4, 9], device);
            let positions = Tensor::<2, Int>::zeros([2, 9], (device, DType::I32));
            let observation = Observation::new(&keys, &keys, &positions);
            for counts in [[5; 4], [9, 1, 0, 6], [0; 4]] {
                let scores = numbers.tensor([4, 9], device);
                let kept = Selection::highest_of(scores, &[9; 4], &counts).unwrap();
                let options = CacheOptions::new(device, DType::F32);
                let mut cache = observation.cache(&kept, Room::Extra(2), options).unwrap();
                cache.set_kept_track("expected", values.clone(), &kept, -1.0).unwrap();
                let tokens = KeptTokens::new(&cache, &kept, 9).unwrap();
                tokens.set_track(&mut cache, "actual", &values, -1.0).unwrap();
                let [expected, actual] = ["expected", "actual"]
                    .map(|name| read_f32("track", cache.track(name).unwrap().clone()).unwrap());
                assert_eq!(actual, expected, "{counts:?} on {}", tested.name);
                let expected = cache.first_slots(&counts).unwrap();
                let [actual, expected] =
                    [tokens.slots, expected].map(|slots| read_i32("slots", slots).unwrap());
                assert_eq!(actual, expected, "{counts:?} on {}", tested.name);
            }
        }
    }
}
