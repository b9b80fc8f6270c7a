//! Merges chosen on the host: many victims a head at once.

use burn::tensor::{DType, Device, Int, Tensor};
use kv_core::{LayerCache, MergeLists, MergeOptions, SlotLists, nearest_slots, read_f32, read_i32};

use crate::Result;

/// What stays and what goes of every (sequence, head), as places within it.
pub(crate) struct Groups {
    pub(crate) kept: Vec<Vec<u32>>,
    pub(crate) victims: Vec<Vec<u32>>,
}

impl Groups {
    /// `kept` of `lengths` places, ascending.
    pub(crate) fn new(kept: &[Vec<u32>], lengths: &[usize]) -> Self {
        let victims = kept.iter().zip(lengths).map(|(kept, &length)| {
            let mut stays = vec![false; length];
            kept.iter().for_each(|&place| stays[place as usize] = true);
            (0..length as u32).filter(|&place| !stays[place as usize]).collect()
        });
        Self { kept: kept.to_vec(), victims: victims.collect() }
    }

    /// Each victim's most similar kept one, as a place among these, and the cosine. `first` is where a
    /// head's rows of `keys` begin.
    pub(crate) fn nearest(
        &self,
        keys: &Tensor<2>,
        first: impl Fn(usize) -> usize,
    ) -> Result<Vec<Vec<(i32, f32)>>> {
        if self.victims.iter().all(Vec::is_empty) {
            return Ok(vec![Vec::new(); self.victims.len()]);
        }
        let device = keys.device();
        let of = lists(&self.victims, &first, &device);
        let among = lists(&self.kept, &first, &device);
        let rows = read_nearest(keys, &of, &among, false)?;
        let rows = rows.into_iter().zip(&self.victims);
        Ok(rows
            .map(|(mut row, victims)| {
                row.truncate(victims.len());
                row
            })
            .collect())
    }

    /// Merges victims into the cache's kept slots, which stand in order at the beginning of every head
    /// where victims come from elsewhere (`from`). `weights` are `ln p` and `ln ŝ` of a head's place.
    /// Returns the slots that something went into, `[N]`, −1 for none, and what they weigh, `[N, 2]`.
    pub(crate) fn merge(
        &self,
        cache: &mut LayerCache,
        from: Option<[&Tensor<2>; 2]>,
        targets: &[Vec<i32>],
        weights: impl Fn(usize, u32) -> [f32; 2],
        options: MergeOptions,
    ) -> Result<Option<(Tensor<1, Int>, Tensor<2>)>> {
        // Heads' rows of `from`, and of the cache.
        let rows = from.map(|[keys, _]| keys.dims()[0] / self.kept.len().max(1));
        let offsets = cache.layout().offsets().to_vec();
        let first = |pair: usize| rows.map_or(offsets[pair], |rows| pair * rows);
        let device = cache.options().device.clone();
        // Only what something goes into is listed.
        let mut used: Vec<Vec<u32>> = Vec::with_capacity(targets.len());
        let mut places: Vec<Vec<i32>> = Vec::with_capacity(targets.len());
        for targets in targets {
            let mut own: Vec<u32> =
                targets.iter().filter_map(|&at| u32::try_from(at).ok()).collect();
            own.sort_unstable();
            own.dedup();
            places.push(
                targets
                    .iter()
                    .map(|&at| match u32::try_from(at).map(|at| own.binary_search(&at)) {
                        Ok(Ok(place)) => place as i32,
                        _ => -1,
                    })
                    .collect(),
            );
            used.push(own);
        }
        if used.iter().all(Vec::is_empty) {
            return Ok(None);
        }
        let slots: Vec<Vec<u32>> = used
            .iter()
            .zip(&self.kept)
            .map(|(used, kept)| {
                let place = |&at: &u32| if rows.is_some() { at } else { kept[at as usize] };
                used.iter().map(place).collect()
            })
            .collect();
        let kept = lists(&slots, |pair| offsets[pair], &device);
        let (width, wide) = (kept.slots.dims()[1], places.iter().map(Vec::len).max().unwrap_or(1));
        let numbers = |pair: usize, places: &mut dyn Iterator<Item = u32>, width: usize| {
            let mut all: Vec<f32> = places.flat_map(|at| weights(pair, at)).collect();
            all.resize(2 * width, 0.0);
            all
        };
        let of_victims = self.victims.iter().enumerate();
        let of_victims: Vec<f32> = of_victims
            .flat_map(|(pair, victims)| numbers(pair, &mut victims.iter().copied(), wide))
            .collect();
        let of_kept: Vec<f32> = used
            .iter()
            .zip(&self.kept)
            .enumerate()
            .flat_map(|(pair, (used, kept))| {
                numbers(pair, &mut used.iter().map(|&at| kept[at as usize]), width)
            })
            .collect();
        let pairs = targets.len();
        let floats = |values: &[f32], width: usize| {
            Tensor::<1>::from_data(values, (&device, DType::F32)).reshape([pairs, width, 2])
        };
        let padded: Vec<i32> =
            places.iter().flat_map(|places| pad(places.iter().copied(), wide)).collect();
        let lists = MergeLists {
            victims: lists(&self.victims, first, &device),
            targets: ints(&padded, [pairs, wide], &device),
            victim_weights: floats(&of_victims, wide),
            kept_weights: floats(&of_kept, width),
            kept,
        };
        let merged = cache.merge_slots(from, &lists, &options)?;
        // What is behind a list's end is written nowhere.
        let slots: Vec<i32> = slots
            .iter()
            .enumerate()
            .flat_map(|(pair, slots)| {
                pad(slots.iter().map(|&at| (offsets[pair] + at as usize) as i32), width)
            })
            .collect();
        let slots = ints(&slots, [pairs, width], &device).reshape([pairs * width]);
        Ok(Some((slots, merged.weights.reshape([pairs * width, 2]))))
    }
}

/// Every place's most similar one among those before it in its own list, and the cosine.
pub(crate) fn leaders(
    keys: &Tensor<2>,
    ranked: &[Vec<u32>],
    tokens: usize,
) -> Result<Vec<Vec<(i32, f32)>>> {
    let lists = lists(ranked, |pair| pair * tokens, &keys.device());
    read_nearest(keys, &lists, &lists, true)
}

fn read_nearest(
    keys: &Tensor<2>,
    of: &SlotLists,
    among: &SlotLists,
    earlier: bool,
) -> Result<Vec<Vec<(i32, f32)>>> {
    let nearest = nearest_slots(keys.clone(), of, among, earlier).map_err(kv_core::Error::from)?;
    let width = nearest.places.dims()[1];
    let places = read_i32("nearest slots", nearest.places)?;
    let cosines = read_f32("cosines", nearest.cosines)?;
    let rows = places.chunks(width).zip(cosines.chunks(width));
    let row = |(places, cosines): (&[i32], &[f32])| {
        places.iter().copied().zip(cosines.iter().copied()).collect()
    };
    Ok(rows.map(row).collect())
}

/// Lists of places as slots on the device, padded with −1.
fn lists(places: &[Vec<u32>], first: impl Fn(usize) -> usize, device: &Device) -> SlotLists {
    let width = places.iter().map(Vec::len).max().unwrap_or_default().max(1);
    let slots: Vec<i32> = places
        .iter()
        .enumerate()
        .flat_map(|(pair, own)| {
            let first = first(pair);
            pad(own.iter().map(|&at| (first + at as usize) as i32), width)
        })
        .collect();
    let counts: Vec<i32> = places.iter().map(|places| places.len() as i32).collect();
    SlotLists {
        slots: ints(&slots, [places.len(), width], device),
        counts: Tensor::from_data(counts.as_slice(), (device, DType::I32)),
    }
}

fn pad(values: impl Iterator<Item = i32>, width: usize) -> Vec<i32> {
    values.chain(std::iter::repeat(-1)).take(width).collect()
}

fn ints(values: &[i32], shape: [usize; 2], device: &Device) -> Tensor<2, Int> {
    Tensor::<1, Int>::from_data(values, (device, DType::I32)).reshape(shape)
}
