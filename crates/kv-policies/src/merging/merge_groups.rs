//! Merges of many victims a head at once, found and carried out on the device.

use burn::tensor::{Bool, DType, Device, Int, Tensor};
use kv_core::{LayerCache, Selection, read_i32};
use kv_kernels::{
    MergeLists, MergeOptions, NO_SLOT, Nearest, NearestSlotsOptions, SlotLists, TAKES_ANY,
    TAKES_SIMILAR, nearest_slots,
};

use crate::Result;
use crate::policy::kept_tokens::{KeptTokens, first_slots, of_rows};

/// The kept tokens and the victims of every head range.
pub(crate) struct Groups {
    kept: Selection,
    /// The slots of the kept tokens in a cache that victims are merged into from elsewhere.
    places: Option<Tensor<2, Int>>,
    others: Selection,
    /// The kept tokens, as rows of the pool that victims are in.
    kept_rows: SlotLists,
    victims: SlotLists,
    /// The kept tokens that victims may go into; `None` for all.
    open: Option<Open>,
    /// The index of the kept token that takes the victims which resemble no other, `[P, 1]`, −1 for
    /// none; `None` where all heads drop such victims.
    takes_any: Option<Tensor<2, Int>>,
}

/// Kept tokens that victims may go into.
struct Open {
    rows: SlotLists,
    /// Their indices among all kept tokens, `[P, N]`.
    indices: Tensor<2, Int>,
}

/// Kept slots behind a merge.
pub(crate) struct Merged {
    /// Slots of the cache, `[N]`.
    slots: Tensor<1, Int>,
    /// The slots' weights before, `[N, W]`.
    before: Tensor<2>,
    /// The slots' weights, `[N, W]`.
    pub(crate) weights: Tensor<2>,
}

impl Merged {
    /// The slots that victims went into, `[N]`; −1 for others. Weights must have votes.
    pub(crate) fn slots(&self) -> Tensor<1, Int> {
        // Every victim that goes into a slot brings votes.
        let more = (self.weights.clone() - self.before.clone()).narrow(1, 2, 2);
        let untouched = more.abs().sum_dim(1).squeeze_dim::<1>(1).equal_scalar(0.0);
        self.slots.clone().mask_fill(untouched, NO_SLOT)
    }
}

impl Groups {
    /// The groups of heads of `lengths` tokens, whose rows begin at `firsts`.
    pub(crate) fn new(
        kept: &Selection,
        lengths: &[usize],
        firsts: &[usize],
        device: &Device,
    ) -> Result<Self> {
        Self::of_rows(kept, lengths, firsts, kept.lists(firsts, device)?)
    }

    /// [`Self::new`] with the kept tokens' rows.
    fn of_rows(
        kept: &Selection,
        lengths: &[usize],
        firsts: &[usize],
        kept_rows: SlotLists,
    ) -> Result<Self> {
        let others = kept.others(lengths)?;
        let victims = others.lists(firsts, &kept_rows.slots.device())?;
        let kept = kept.clone();
        Ok(Self { kept, places: None, others, kept_rows, victims, open: None, takes_any: None })
    }

    /// Spares the first and the last `[sinks, recents]` of a prompt's kept tokens: nothing is
    /// merged into them.
    pub(crate) fn sparing_ends(mut self, [sinks, recents]: [usize; 2]) -> Self {
        let [total_kv_heads, width] = self.kept_rows.slots.dims();
        let counts = self.kept.lengths().iter();
        let counts: Vec<usize> =
            counts.map(|count| count.saturating_sub(sinks + recents)).collect();
        // At least one column, even if no head uses it.
        let most = counts.iter().copied().max().unwrap_or_default().max(1);
        let first = sinks.min(width.saturating_sub(most));
        let device = self.kept_rows.slots.device();
        let indices = columns([total_kv_heads, most], &device).add_scalar(first as i32);
        let slots = self.kept_rows.slots.clone().narrow(1, first, most);
        self.open =
            Some(Open { rows: SlotLists { slots, counts: ints(&counts, &device) }, indices });
        self
    }

    /// Spares all kept slots of a cache but the ones that `open` names, by their indices among the
    /// kept slots.
    pub(crate) fn sparing_all_but(mut self, open: &[Vec<u32>]) -> Self {
        let device = self.kept_rows.slots.device();
        let width = open.iter().map(Vec::len).max().unwrap_or_default().max(1);
        let rows = open.iter().flat_map(|own| {
            let filled = own.iter().map(|&index| index as i32);
            filled.chain(std::iter::repeat(0)).take(width)
        });
        let rows: Vec<i32> = rows.collect();
        let indices = Tensor::<1, Int>::from_data(rows.as_slice(), (&device, DType::I32));
        let indices = indices.reshape([open.len(), width]);
        let slots = self.kept_rows.slots.clone().gather(1, indices.clone());
        let counts: Vec<usize> = open.iter().map(Vec::len).collect();
        self.open =
            Some(Open { rows: SlotLists { slots, counts: ints(&counts, &device) }, indices });
        self
    }

    /// Lets each kept slot take the victims that `takes` says, `[S]`:
    /// [`kv_kernels::TAKES_SIMILAR`], [`kv_kernels::TAKES_NONE`] or [`kv_kernels::TAKES_ANY`]. The
    /// cache has the kept tokens at `slots`, `[P, M]`.
    pub(crate) fn taking(mut self, takes: &Tensor<1>, slots: &Tensor<2, Int>) -> Self {
        let [total_kv_heads, most] = slots.dims();
        let own = takes.clone().select(0, slots.clone().clamp_min(0).flatten(0, 1));
        let own = own.reshape([total_kv_heads, most]);
        let Open { rows, indices } = self.open.take().unwrap_or_else(|| Open {
            rows: self.kept_rows.clone(),
            indices: columns([total_kv_heads, most], &slots.device()),
        });
        let live = |counts: &Tensor<1, Int>, dims: [usize; 2]| {
            let counts = counts.clone().cast(DType::I32).unsqueeze_dim::<2>(1).expand(dims);
            columns(dims, &counts.device()).lower(counts)
        };
        let kept = live(&self.kept_rows.counts, [total_kv_heads, most]);
        self.takes_any = Some(first_of(own.clone().equal_scalar(TAKES_ANY).bool_and(kept)));

        // Slots that take nothing are replaced by the first one that takes similar victims, so that
        // counts need not be known and the first of equals stays the first.
        let similar = own.gather(1, indices.clone()).equal_scalar(TAKES_SIMILAR);
        let similar = similar.bool_and(live(&rows.counts, indices.dims()));
        let first = first_of(similar.clone());
        let any = first.clone().greater_equal_elem(0);
        let first = first.clamp_min(0);
        let replaced = |all: Tensor<2, Int>| {
            let first = all.clone().gather(1, first.clone()).expand(all.dims());
            first.mask_where(similar.clone(), all)
        };
        let counts = rows.counts.mask_fill(any.squeeze_dim::<1>(1).bool_not(), 0);
        self.open = Some(Open {
            rows: SlotLists { slots: replaced(rows.slots), counts },
            indices: replaced(indices),
        });
        self
    }

    /// Values of victims and of kept tokens, `[P, N]` and `[P, M]`, out of the values of all tokens
    /// of a prompt, `[P, T]`.
    pub(crate) fn values(&self, all: &Tensor<2>) -> [Tensor<2>; 2] {
        [&self.victims, &self.kept_rows].map(|rows| of_rows(all, rows))
    }

    /// The kept slots of a cache, `[P, M]`, −1 behind a head's last one.
    pub(crate) fn kept_slots(&self) -> &Tensor<2, Int> {
        &self.kept_rows.slots
    }

    /// The groups of prompts of `tokens` tokens, whose rows follow each other. Victims are merged
    /// into a cache of the kept tokens.
    pub(crate) fn of_prompts(kept: &Selection, tokens: usize, into: &KeptTokens) -> Result<Self> {
        let firsts: Vec<usize> = (0..kept.head_ranges()).map(|range| range * tokens).collect();
        let lengths = vec![tokens; kept.head_ranges()];
        let groups = Self::of_rows(kept, &lengths, &firsts, into.rows.clone())?;
        Ok(Self { places: Some(into.slots.clone()), ..groups })
    }

    /// The groups of a cache's slots.
    pub(crate) fn of_slots(kept: &Selection, cache: &LayerCache) -> Result<Self> {
        let (layout, device) = (cache.layout(), &cache.options().device);
        Self::new(kept, layout.lengths(), layout.offsets(), device)
    }

    /// Whether there are no victims, or no kept tokens.
    pub(crate) fn is_empty(&self) -> bool {
        self.others.total() == 0 || self.kept.total() == 0
    }

    /// How many victims each head has.
    pub(crate) fn victim_counts(&self) -> &[usize] {
        self.others.lengths()
    }

    /// The victims of each head. Waits for the device where it has chosen them.
    pub(crate) fn victims(&self) -> Result<&[Vec<u32>]> {
        Ok(self.others.kept()?)
    }

    /// The kept tokens, the victims, and each victim's target, an index among the kept tokens.
    /// Waits for the device.
    pub(crate) fn read(&self, targets: &Tensor<2, Int>) -> Result<Read<'_>> {
        let [_, width] = targets.dims();
        let targets = read_i32("merges", targets.clone())?;
        let rows = targets.chunks(width).zip(self.victim_counts());
        let targets = rows.map(|(row, &count)| row[..count].to_vec()).collect();
        Ok(Read { kept: self.kept.kept()?, victims: self.others.kept()?, targets })
    }

    /// Each victim's most similar kept token, as an index among the kept tokens, and the cosine,
    /// `[P, N]`. Entries behind a head's last victim are arbitrary.
    pub(crate) fn nearest(&self, keys: &Tensor<2>) -> Result<Nearest> {
        let among = self.open.as_ref().map_or(&self.kept_rows, |open| &open.rows);
        let near =
            nearest_slots(keys.clone(), &self.victims, among, NearestSlotsOptions::default());
        let Nearest { places: indices, cosines } = near.map_err(kv_core::Error::from)?;
        let Some(open) = &self.open else { return Ok(Nearest { places: indices, cosines }) };
        let none = indices.clone().lower_elem(0);
        let indices = open.indices.clone().gather(1, indices.clamp_min(0)).mask_fill(none, NO_SLOT);
        Ok(Nearest { places: indices, cosines })
    }

    /// Each victim's target, `[P, N]`: its most similar kept token, as an index among the kept
    /// tokens; where the cosine is not above the threshold, the kept token that takes any victim,
    /// −1 for none.
    pub(crate) fn targets(&self, keys: &Tensor<2>, threshold: f32) -> Result<Tensor<2, Int>> {
        let targets = above(self.nearest(keys)?, threshold);
        Ok(match &self.takes_any {
            Some(index) => {
                let none = targets.clone().lower_elem(0);
                let index = index.clone().cast(targets.dtype()).expand(targets.dims());
                targets.mask_where(none, index)
            }
            None => targets,
        })
    }

    /// Weights of victims and of kept slots, `[P, N, W]` and `[P, M, W]`, out of the weights of all
    /// rows, `[S, W]`.
    pub(crate) fn weights(&self, all: &Tensor<2>) -> [Tensor<3>; 2] {
        [&self.victims, &self.kept_rows].map(|lists| {
            let [total_kv_heads, width] = lists.slots.dims();
            let [_, columns] = all.dims();
            let rows = lists.slots.clone().clamp_min(0).flatten(0, 1);
            all.clone().select(0, rows).reshape([total_kv_heads, width, columns])
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
        let kept = match (from, &self.places) {
            (Some(_), places) => SlotLists {
                slots: match places {
                    Some(places) => places.clone(),
                    None => first_slots(cache, self.kept.lengths())?,
                },
                counts: self.kept_rows.counts.clone(),
            },
            (None, _) => self.kept_rows.clone(),
        };
        let lists = MergeLists {
            targets,
            victim_weights,
            kept_weights,
            victims: self.victims.clone(),
            kept,
        };
        let merged = cache.merge_slots(from, &lists, &options)?;
        Ok(Merged {
            slots: lists.kept.slots.flatten(0, 1),
            before: lists.kept_weights.flatten(0, 1),
            weights: merged.weights.flatten(0, 1),
        })
    }
}

/// The lists of all heads on the host.
pub(crate) struct Read<'a> {
    pub(crate) kept: &'a [Vec<u32>],
    pub(crate) victims: &'a [Vec<u32>],
    pub(crate) targets: Vec<Vec<i32>>,
}

/// Weights of tokens that stand for themselves alone, `[P, N, 4]`: `ln p` of 0, their scores, `[P,
/// N]`, and one vote.
pub(crate) fn one_vote_each(log_scores: Tensor<2>) -> Tensor<3> {
    let [rows, width] = log_scores.dims();
    let (device, shape) = (log_scores.device(), [rows, width, 4]);
    let others = Tensor::<1>::from_data([0.0, 0.0, 1.0, 0.0].as_slice(), (&device, DType::F32));
    let columns = Tensor::<1, Int>::arange(0..4, (&device, DType::I32));
    let own = columns.equal_scalar(1).reshape([1, 1, 4]).expand(shape);
    let scores = log_scores.unsqueeze_dim::<3>(2).expand(shape);
    others.reshape([1, 1, 4]).expand(shape).mask_where(own, scores)
}

/// For the token of every rank, the rank of the most similar token that ranks higher, `[P, T]`; −1
/// where the cosine is not above the threshold. `ranked` has the `T` tokens of each head, the best
/// first. The first `spared` ranks take no part.
pub(crate) fn leaders(
    keys: &Tensor<2>,
    ranked: &Tensor<2, Int>,
    threshold: f32,
    spared: usize,
) -> Result<Tensor<2, Int>> {
    let [total_kv_heads, tokens] = ranked.dims();
    let spared = spared.min(tokens);
    let rest = tokens - spared;
    let device = keys.device();
    let alone = Tensor::full([total_kv_heads, spared], NO_SLOT, (&device, ranked.dtype()));
    if rest == 0 {
        return Ok(alone);
    }
    let firsts = Tensor::<1, Int>::arange(0..total_kv_heads as i64, (&device, DType::I32));
    let firsts =
        firsts.mul_scalar(tokens as i32).unsqueeze_dim::<2>(1).expand([total_kv_heads, rest]);
    let slots = ranked.clone().narrow(1, spared, rest) + firsts;
    let lists = SlotLists { slots, counts: ints(&vec![rest; total_kv_heads], &device) };
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

/// The indices into `kept[range]` of kept slots that are neither among their sequence's first
/// tokens nor among its last ones; `ends` has these two numbers for each head. Waits for the
/// device.
pub(crate) fn unprotected(
    cache: &LayerCache,
    kept: &[Vec<u32>],
    ends: &[[usize; 2]],
) -> Result<Vec<Vec<u32>>> {
    let positions = cache.read_positions()?;
    let heads = kept.iter().zip(ends).enumerate().map(|(range, (kept, &[sinks, recents]))| {
        let live = &positions[cache.layout().live(range)];
        let newest = live.iter().copied().max().unwrap_or_default() as usize;
        let open = |at: u32| {
            let position = live[at as usize] as usize;
            position >= sinks && position + recents <= newest
        };
        let indices = kept.iter().enumerate().filter(|(_, at)| open(**at));
        indices.map(|(index, _)| index as u32).collect()
    });
    Ok(heads.collect())
}

fn ints(counts: &[usize], device: &Device) -> Tensor<1, Int> {
    let counts: Vec<i32> = counts.iter().map(|&count| count as i32).collect();
    Tensor::from_data(counts.as_slice(), (device, DType::I32))
}

/// The index of each column, `[P, N]`.
fn columns([total_kv_heads, width]: [usize; 2], device: &Device) -> Tensor<2, Int> {
    let indices = Tensor::<1, Int>::arange(0..width as i64, (device, DType::I32));
    indices.unsqueeze_dim::<2>(0).expand([total_kv_heads, width])
}

/// The first index of each row that is marked, `[P, 1]`; −1 for none.
fn first_of(marks: Tensor<2, Bool>) -> Tensor<2, Int> {
    let [_, width] = marks.dims();
    let indices = columns(marks.dims(), &marks.device());
    let first = indices.mask_fill(marks.bool_not(), width as i32).min_dim(1);
    let none = first.clone().equal_elem(width as i32);
    first.mask_fill(none, NO_SLOT)
}

/// The indices whose cosines are above a threshold; −1 elsewhere.
fn above(nearest: Nearest, threshold: f32) -> Tensor<2, Int> {
    let near = nearest.cosines.greater_scalar(threshold);
    nearest.places.mask_fill(near.bool_not(), NO_SLOT)
}
