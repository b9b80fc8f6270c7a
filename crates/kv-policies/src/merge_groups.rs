//! Merges chosen on the host: many victims a head at once.

use burn::tensor::{DType, Device, Int, Tensor};
use kv_core::{
    LayerCache, MergeLists, MergeOptions, Nearest, SlotLists, nearest_slots, read_f32, read_i32,
};
use rayon::prelude::*;

use crate::Result;

/// What stays and what goes of every (sequence, head), as places within it.
pub(crate) struct Groups {
    pub(crate) kept: Vec<Vec<u32>>,
    pub(crate) victims: Vec<Vec<u32>>,
    /// Where heads' rows begin in the pool that victims are in.
    firsts: Vec<usize>,
    /// The victims' rows.
    rows: SlotLists,
}

impl Groups {
    /// `kept` of `lengths` places, ascending, of rows that begin at `firsts`.
    pub(crate) fn new(
        kept: &[Vec<u32>],
        lengths: &[usize],
        firsts: Vec<usize>,
        device: &Device,
    ) -> Self {
        let others = |(kept, &length): (&Vec<u32>, &usize)| {
            let mut stays = vec![false; length];
            kept.iter().for_each(|&place| stays[place as usize] = true);
            (0..length as u32).filter(|&place| !stays[place as usize]).collect()
        };
        let victims: Vec<Vec<u32>> = kept.par_iter().zip(lengths).map(others).collect();
        let rows = lists(&victims, &firsts, device);
        Self { kept: kept.to_vec(), victims, firsts, rows }
    }

    /// Of prompts of so many tokens, whose rows follow each other.
    pub(crate) fn of_prompts(kept: &[Vec<u32>], tokens: usize, device: &Device) -> Self {
        let firsts = (0..kept.len()).map(|pair| pair * tokens).collect();
        Self::new(kept, &vec![tokens; kept.len()], firsts, device)
    }

    /// Of a cache's slots.
    pub(crate) fn of_slots(kept: &[Vec<u32>], cache: &LayerCache) -> Self {
        let (layout, device) = (cache.layout(), &cache.options().device);
        Self::new(kept, layout.lengths(), layout.offsets().to_vec(), device)
    }

    /// Each victim's most similar kept one, as a place among these, and the cosine.
    pub(crate) fn nearest(&self, keys: &Tensor<2>) -> Result<Vec<Vec<(i32, f32)>>> {
        if self.victims.iter().all(Vec::is_empty) {
            return Ok(vec![Vec::new(); self.victims.len()]);
        }
        let Nearest { places, cosines } = self.pair(keys)?;
        let width = places.dims()[1];
        let places = read_i32("nearest slots", places)?;
        let cosines = read_f32("cosines", cosines)?;
        let rows = places.chunks(width).zip(cosines.chunks(width)).zip(&self.victims);
        Ok(rows
            .map(|((places, cosines), victims)| {
                let row = places.iter().copied().zip(cosines.iter().copied());
                row.take(victims.len()).collect()
            })
            .collect())
    }

    /// Where each victim goes: its most similar kept one, as a place among these, −1 where the cosine is not above the
    /// threshold.
    pub(crate) fn targets(&self, keys: &Tensor<2>, threshold: f32) -> Result<Vec<Vec<i32>>> {
        if self.victims.iter().all(Vec::is_empty) {
            return Ok(vec![Vec::new(); self.victims.len()]);
        }
        let near = above(self.pair(keys)?, threshold);
        let width = near.dims()[1];
        let near = read_i32("nearest slots", near)?;
        let rows = near.chunks(width).zip(&self.victims);
        Ok(rows.map(|(row, victims)| row[..victims.len()].to_vec()).collect())
    }

    fn pair(&self, keys: &Tensor<2>) -> Result<Nearest> {
        let among = lists(&self.kept, &self.firsts, &keys.device());
        Ok(nearest_slots(keys.clone(), &self.rows, &among, false).map_err(kv_core::Error::from)?)
    }

    /// Merges victims into the cache's kept slots, which stand in order at the beginning of every head
    /// where victims come from elsewhere (`from`). `weights` are `ln p` and `ln ŝ` of a head's place.
    /// Returns the slots that something went into, `[N]`, −1 for none, and what they weigh, `[N, 2]`.
    pub(crate) fn merge(
        &self,
        cache: &mut LayerCache,
        from: Option<[&Tensor<2>; 2]>,
        targets: &[Vec<i32>],
        weights: impl Fn(usize, u32) -> [f32; 2] + Sync,
        options: MergeOptions,
    ) -> Result<Option<(Tensor<1, Int>, Tensor<2>)>> {
        let offsets = cache.layout().offsets();
        let device = cache.options().device.clone();
        // Only what something goes into is listed.
        let listed: Vec<Listed> = targets
            .par_iter()
            .zip(&self.kept)
            .map(|(own, kept)| Listed::new(own, kept.len()))
            .collect();
        if listed.iter().all(|own| own.used.is_empty()) {
            return Ok(None);
        }
        let slots = listed.iter().zip(&self.kept).map(|(listed, kept)| {
            let place = |&at: &u32| if from.is_some() { at } else { kept[at as usize] };
            listed.used.iter().map(place).collect()
        });
        let slots: Vec<Vec<u32>> = slots.collect();
        let pairs = targets.len();
        let kept = lists(&slots, offsets, &device);
        let (width, wide) = (kept.slots.dims()[1], self.rows.slots.dims()[1]);
        let floats = |values: Vec<[f32; 2]>, width: usize| {
            let values = values.as_flattened();
            Tensor::<1>::from_data(values, (&device, DType::F32)).reshape([pairs, width, 2])
        };
        let weights = &weights;
        let of_victims = padded(pairs, wide, [0.0; 2], |pair| {
            self.victims[pair].iter().map(move |&at| weights(pair, at))
        });
        let of_kept = padded(pairs, width, [0.0; 2], |pair| {
            let kept = &self.kept[pair];
            listed[pair].used.iter().map(move |&at| weights(pair, kept[at as usize]))
        });
        let places = padded(pairs, wide, -1, |pair| listed[pair].places.iter().copied());
        let lists = MergeLists {
            targets: ints(&places, [pairs, wide], &device),
            victim_weights: floats(of_victims, wide),
            kept_weights: floats(of_kept, width),
            victims: self.rows.clone(),
            kept,
        };
        let merged = cache.merge_slots(from, &lists, &options)?;
        // What is behind a list's end is written nowhere.
        let slots = lists.kept.slots.reshape([pairs * width]);
        Ok(Some((slots, merged.weights.reshape([pairs * width, 2]))))
    }
}

/// What victims of a head go into.
struct Listed {
    /// Kept ones, ascending, as places among these.
    used: Vec<u32>,
    /// Each victim's place among them, −1 for none.
    places: Vec<i32>,
}

impl Listed {
    /// Of victims' places among `kept` ones.
    fn new(targets: &[i32], kept: usize) -> Self {
        let mut place_of = vec![-1; kept];
        let targets = targets.iter().map(|&at| usize::try_from(at).ok());
        targets.clone().flatten().for_each(|at| place_of[at] = 0);
        let used: Vec<u32> = (0..kept as u32).filter(|&at| place_of[at as usize] == 0).collect();
        used.iter().zip(0..).for_each(|(&at, place)| place_of[at as usize] = place);
        let places = targets.map(|at| at.map_or(-1, |at| place_of[at])).collect();
        Self { used, places }
    }
}

/// Every place's most similar one among those before it in its own list, `[pairs, tokens]`; −1 where the cosine is not
/// above the threshold.
pub(crate) fn leaders(
    keys: &Tensor<2>,
    ranked: &[Vec<u32>],
    tokens: usize,
    threshold: f32,
) -> Result<Vec<i32>> {
    let firsts: Vec<usize> = (0..ranked.len()).map(|pair| pair * tokens).collect();
    let lists = lists(ranked, &firsts, &keys.device());
    let nearest =
        nearest_slots(keys.clone(), &lists, &lists, true).map_err(kv_core::Error::from)?;
    Ok(read_i32("nearest slots", above(nearest, threshold))?)
}

/// Places whose cosines are above a threshold, −1 else.
fn above(nearest: Nearest, threshold: f32) -> Tensor<2, Int> {
    let near = nearest.cosines.greater_scalar(threshold);
    nearest.places.mask_fill(near.bool_not(), -1)
}

/// Lists of places as slots on the device, padded with −1; heads' slots begin at `firsts`.
fn lists(places: &[Vec<u32>], firsts: &[usize], device: &Device) -> SlotLists {
    let width = places.iter().map(Vec::len).max().unwrap_or_default().max(1);
    let slots = padded(places.len(), width, -1, |pair| {
        places[pair].iter().map(move |&at| (firsts[pair] + at as usize) as i32)
    });
    let counts: Vec<i32> = places.iter().map(|places| places.len() as i32).collect();
    SlotLists {
        slots: ints(&slots, [places.len(), width], device),
        counts: Tensor::from_data(counts.as_slice(), (device, DType::I32)),
    }
}

/// Rows of a matrix `[rows, width]`, padded.
fn padded<T: Copy + Send + Sync, R: Iterator<Item = T>>(
    rows: usize,
    width: usize,
    padding: T,
    row: impl Fn(usize) -> R + Sync,
) -> Vec<T> {
    let mut all = vec![padding; rows * width];
    all.par_chunks_mut(width.max(1)).enumerate().for_each(|(at, to)| {
        to.iter_mut().zip(row(at)).for_each(|(to, value)| *to = value);
    });
    all
}

fn ints(values: &[i32], shape: [usize; 2], device: &Device) -> Tensor<2, Int> {
    Tensor::<1, Int>::from_data(values, (device, DType::I32)).reshape(shape)
}
