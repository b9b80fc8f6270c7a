//! Merges of many victims a head at once, found and carried out on the device.

use burn::tensor::{DType, Device, Int, Tensor};
use kv_core::{LayerCache, Selection, read_i32};
use kv_kernels::{
    MergeLists, MergeOptions, NO_SLOT, Nearest, NearestSlotsOptions, SlotLists, nearest_slots,
};

use crate::Result;

/// What stays and what goes of every (sequence, head).
pub(crate) struct Groups {
    kept: Selection,
    others: Selection,
    /// The kept tokens, as rows of the pool that victims are in.
    kept_rows: SlotLists,
    victims: SlotLists,
    /// The kept tokens that victims may go into; `None` for all.
    open: Option<Open>,
}

/// Kept ones that victims may go into.
struct Open {
    rows: SlotLists,
    /// Their places among all that stay, `[P, N]`.
    places: Tensor<2, Int>,
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
        Ok(Self { kept: kept.clone(), others, kept_rows, victims, open: None })
    }

    /// Spares the first and the last `[sinks, recents]` of a prompt's kept tokens: nothing is
    /// merged into them.
    pub(crate) fn sparing_ends(mut self, [sinks, recents]: [usize; 2]) -> Self {
        let [pairs, width] = self.kept_rows.slots.dims();
        let counts = self.kept.lengths().iter();
        let counts: Vec<usize> =
            counts.map(|count| count.saturating_sub(sinks + recents)).collect();
        // One at least, which need not count.
        let most = counts.iter().copied().max().unwrap_or_default().max(1);
        let first = sinks.min(width.saturating_sub(most));
        let device = self.kept_rows.slots.device();
        let places = Tensor::<1, Int>::arange(0..most as i64, (&device, DType::I32));
        let places = places.add_scalar(first as i32).unsqueeze_dim::<2>(0).expand([pairs, most]);
        let slots = self.kept_rows.slots.clone().narrow(1, first, most);
        self.open =
            Some(Open { rows: SlotLists { slots, counts: ints(&counts, &device) }, places });
        self
    }

    /// Spares all kept slots of a cache but the ones that `open` names, by their places among the
    /// kept slots.
    pub(crate) fn sparing_all_but(mut self, open: &[Vec<u32>]) -> Self {
        let device = self.kept_rows.slots.device();
        let width = open.iter().map(Vec::len).max().unwrap_or_default().max(1);
        let rows = open.iter().flat_map(|own| {
            let filled = own.iter().map(|&place| place as i32);
            filled.chain(std::iter::repeat(0)).take(width)
        });
        let rows: Vec<i32> = rows.collect();
        let places = Tensor::<1, Int>::from_data(rows.as_slice(), (&device, DType::I32));
        let places = places.reshape([open.len(), width]);
        let slots = self.kept_rows.slots.clone().gather(1, places.clone());
        let counts: Vec<usize> = open.iter().map(Vec::len).collect();
        self.open =
            Some(Open { rows: SlotLists { slots, counts: ints(&counts, &device) }, places });
        self
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
        let among = self.open.as_ref().map_or(&self.kept_rows, |open| &open.rows);
        let near =
            nearest_slots(keys.clone(), &self.victims, among, NearestSlotsOptions::default());
        let Nearest { places, cosines } = near.map_err(kv_core::Error::from)?;
        let Some(open) = &self.open else { return Ok(Nearest { places, cosines }) };
        let none = places.clone().lower_elem(0);
        let places = open.places.clone().gather(1, places.clamp_min(0)).mask_fill(none, NO_SLOT);
        Ok(Nearest { places, cosines })
    }

    /// Where each victim goes, `[P, N]`: its most similar kept one, as a place among these, −1
    /// where the cosine is not above the threshold.
    pub(crate) fn targets(&self, keys: &Tensor<2>, threshold: f32) -> Result<Tensor<2, Int>> {
        Ok(above(self.nearest(keys)?, threshold))
    }

    /// Weights of victims and of kept slots, `[P, N, 4]` and `[P, M, 4]`, out of the weights of all
    /// rows, `[S, 4]`.
    pub(crate) fn weights(&self, all: &Tensor<2>) -> [Tensor<3>; 2] {
        [&self.victims, &self.kept_rows].map(|lists| {
            let [pairs, width] = lists.slots.dims();
            let [_, columns] = all.dims();
            let rows = lists.slots.clone().clamp_min(0).flatten(0, 1);
            all.clone().select(0, rows).reshape([pairs, width, columns])
        })
    }

    /// Merges victims into the cache's kept slots, which stand in order at the beginning of every
    /// head where victims come from elsewhere (`from`). `weights` has the victims' and the kept
    /// slots' weights with votes, as [`MergeLists`] has them.
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
        Ok(Merged { slots: slots.mask_fill(untouched, NO_SLOT), weights })
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
/// rows each. The first `spared` ranks neither lead nor follow.
pub(crate) fn leaders(
    keys: &Tensor<2>,
    ranked: &Tensor<2, Int>,
    threshold: f32,
    spared: usize,
) -> Result<Tensor<2, Int>> {
    let [pairs, tokens] = ranked.dims();
    let spared = spared.min(tokens);
    let rest = tokens - spared;
    let device = keys.device();
    let alone = Tensor::full([pairs, spared], NO_SLOT, (&device, ranked.dtype()));
    if rest == 0 {
        return Ok(alone);
    }
    let firsts = Tensor::<1, Int>::arange(0..pairs as i64, (&device, DType::I32));
    let firsts = firsts.mul_scalar(tokens as i32).unsqueeze_dim::<2>(1).expand([pairs, rest]);
    let slots = ranked.clone().narrow(1, spared, rest) + firsts;
    let lists = SlotLists { slots, counts: ints(&vec![rest; pairs], &device) };
    let options = NearestSlotsOptions { earlier: true, ..Default::default() };
    let nearest =
        nearest_slots(keys.clone(), &lists, &lists, options).map_err(kv_core::Error::from)?;
    let leaders = above(nearest, threshold);
    if spared == 0 {
        return Ok(leaders);
    }
    let none = leaders.clone().lower_elem(0);
    let leaders = leaders.add_scalar(spared as i32).mask_fill(none, NO_SLOT);
    Ok(Tensor::cat(vec![alone.cast(leaders.dtype()), leaders], 1))
}

/// Places of a cache's kept slots, `kept[pair]` of each head, that are neither among its sequence's
/// first tokens nor among its last ones, as `ends` says for each head. Waits for the device.
pub(crate) fn unprotected(
    cache: &LayerCache,
    kept: &[Vec<u32>],
    ends: &[[usize; 2]],
) -> Result<Vec<Vec<u32>>> {
    let positions = cache.read_positions()?;
    let heads = kept.iter().zip(ends).enumerate().map(|(pair, (kept, &[sinks, recents]))| {
        let live = &positions[cache.layout().live(pair)];
        let newest = live.iter().copied().max().unwrap_or_default() as usize;
        let open = |at: u32| {
            let position = live[at as usize] as usize;
            position >= sinks && position + recents <= newest
        };
        let places = kept.iter().enumerate().filter(|(_, at)| open(**at));
        places.map(|(place, _)| place as u32).collect()
    });
    Ok(heads.collect())
}

fn ints(counts: &[usize], device: &Device) -> Tensor<1, Int> {
    let counts: Vec<i32> = counts.iter().map(|&count| count as i32).collect();
    Tensor::from_data(counts.as_slice(), (device, DType::I32))
}

/// Places whose cosines are above a threshold, −1 else.
fn above(nearest: Nearest, threshold: f32) -> Tensor<2, Int> {
    let near = nearest.cosines.greater_scalar(threshold);
    nearest.places.mask_fill(near.bool_not(), NO_SLOT)
}
