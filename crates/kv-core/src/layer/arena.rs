//! Arenas: pools whose sequences come and go while recorded steps stay valid.
//!
//! A recorded step reads and writes the tensors that were there when it was recorded, and launches
//! grids that follow from capacities. An arena therefore keeps its tensors for life, and its
//! largest capacity is fixed. A sequence that joins gets a block of slots, and the offsets and
//! lengths of its head ranges are written into the tensors that steps read. A sequence that leaves
//! gives its block back.
//!
//! Rows without a sequence are idle: steps run for them too. They write to a few scratch slots at
//! the end of the pool, which all idle rows share, and begin anew when these are full.

use std::ops::Range;

use kv_kernels::{SlotRanges, assign_ints};

use super::{LayoutTensors, expect_shape};
use crate::layout::ArenaLayout;
use crate::tensors::{columns, listed};
use crate::{CacheOptions, Error, LayerCache, Result, SlotLayout};

impl LayerCache {
    /// Slots of an arena's pool beyond the slots of its sequences. Idle rows write to them, and
    /// their lengths are reset after this many steps.
    pub const SCRATCH: usize = 64;

    /// A pool of `slots` slots for up to `rows` sequences of `kv_heads` heads, whose head ranges
    /// have at most `most` slots. All rows are idle.
    ///
    /// Its sequences append and attend to all live slots; it has no tracks but the ones that
    /// [`Self::set_track`] adds, and no state.
    pub fn arena(
        [rows, kv_heads, head_dim]: [usize; 3],
        slots: usize,
        most: usize,
        options: CacheOptions,
    ) -> Self {
        let ranges = rows * kv_heads;
        let mut pool = vec![0; ranges];
        if let Some(first) = pool.first_mut() {
            *first = slots + LayerCache::SCRATCH;
        }
        let mut cache = Self::new(SlotLayout::new(kv_heads, pool), head_dim, options);
        let most = most.max(LayerCache::SCRATCH);
        let blocks = vec![None; rows];
        cache.layout.arena = Some(ArenaLayout { slots: slots + LayerCache::SCRATCH, most, blocks });
        (0..ranges).for_each(|range| cache.layout.set_range(range, slots, LayerCache::SCRATCH, 0));
        cache.ranges = cache.layout.to_device(&cache.options.device);
        cache
    }

    /// Whether the cache is an arena.
    pub fn is_arena(&self) -> bool {
        self.layout.arena.is_some()
    }

    /// Slots of the arena that no sequence has.
    pub fn free_in_arena(&self) -> usize {
        let Some(arena) = &self.layout.arena else { return 0 };
        let taken: usize = arena.blocks.iter().flatten().map(Range::len).sum();
        arena.slots - LayerCache::SCRATCH - taken
    }

    /// The share of the arena's slots that sequences have.
    pub fn share_of_arena(&self) -> f64 {
        let Some(arena) = &self.layout.arena else { return 0.0 };
        let all = arena.slots - LayerCache::SCRATCH;
        (all - self.free_in_arena()) as f64 / all.max(1) as f64
    }

    /// Puts the one sequence of `from` into the idle row `row`, with heads of `capacities` slots,
    /// `[Hkv]`. Sequences in the way of one block are moved. Does not wait for the device.
    ///
    /// # Errors
    /// [`Error::ArenaFull`]; [`Error::InvalidPlan`] for a row that is taken, a capacity below what
    /// the head holds or above the arena's most, and a cache that is no arena; [`Error::Shape`].
    pub fn place_row(&mut self, row: usize, from: &Self, capacities: &[usize]) -> Result<()> {
        self.place_row_by(row, from, capacities, &mut LayoutTensors::default())
    }

    /// [`Self::place_row`] with tensors that layers share.
    pub(crate) fn place_row_by(
        &mut self,
        row: usize,
        from: &Self,
        capacities: &[usize],
        tensors: &mut LayoutTensors,
    ) -> Result<()> {
        let heads = self.layout.kv_heads();
        expect_shape("capacities", &[capacities.len()], &[heads])?;
        expect_shape("head ranges", &[from.layout.head_ranges()], &[heads])?;
        let invalid = |reason: String| Error::InvalidPlan { what: "row", reason };
        let arena = self.layout.arena.as_ref().ok_or_else(|| invalid("no arena".into()))?;
        match arena.blocks.get(row) {
            None => return Err(invalid(format!("{row} of {}", arena.blocks.len()))),
            Some(Some(_)) => return Err(invalid(format!("{row} has a sequence already"))),
            Some(None) => {}
        }
        for (&capacity, &length) in capacities.iter().zip(from.layout.lengths()) {
            if capacity < length || capacity > arena.most {
                let reason = format!("capacity {capacity}, expected {length} to {}", arena.most);
                return Err(invalid(reason));
            }
        }
        let requested: usize = capacities.iter().sum();
        let start = match arena.gap(requested) {
            Some(start) => start,
            None if self.free_in_arena() >= requested => self.make_gap(requested, tensors)?,
            None => return Err(Error::ArenaFull { requested, free: self.free_in_arena() }),
        };
        let mut offset = start;
        for (head, &capacity) in capacities.iter().enumerate() {
            let length = from.layout.lengths()[head];
            self.layout.set_range(row * heads + head, offset, capacity, length);
            offset += capacity;
        }
        if let Some(arena) = &mut self.layout.arena {
            arena.blocks[row] = Some(start..offset);
        }
        self.write_ranges(tensors)?;
        self.copy_sequence(row, from, tensors)
    }

    /// Frees the block of a row, which is idle from then on.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    pub fn free_row(&mut self, row: usize) -> Result<()> {
        self.free_row_by(row, &mut LayoutTensors::default())
    }

    /// [`Self::free_row`] with tensors that layers share.
    pub(crate) fn free_row_by(&mut self, row: usize, tensors: &mut LayoutTensors) -> Result<()> {
        let heads = self.layout.kv_heads();
        let Some(arena) = &mut self.layout.arena else { return Ok(()) };
        if arena.blocks.get_mut(row).and_then(Option::take).is_none() {
            return Ok(());
        }
        let scratch = arena.slots - LayerCache::SCRATCH;
        let ranges = row * heads..(row + 1) * heads;
        ranges.for_each(|range| self.layout.set_range(range, scratch, LayerCache::SCRATCH, 0));
        self.write_ranges(tensors)
    }

    /// Empties idle rows whose scratch slots are full, so that another step can run. Call it before
    /// every step.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    pub(crate) fn rest_idle_rows(&mut self, tensors: &mut LayoutTensors) -> Result<()> {
        let heads = self.layout.kv_heads();
        let Some(arena) = &self.layout.arena else { return Ok(()) };
        let blocks = arena.blocks.iter().enumerate();
        let idle: Vec<usize> =
            blocks.filter(|(_, block)| block.is_none()).map(|(r, _)| r).collect();
        let full = |row: &usize| self.layout.lengths()[row * heads] >= LayerCache::SCRATCH;
        if !idle.iter().any(full) {
            return Ok(());
        }
        for range in idle.into_iter().flat_map(|row| row * heads..(row + 1) * heads) {
            self.layout.lengths_mut()[range] = 0;
        }
        self.write_ranges(tensors)
    }

    /// Makes a gap of at least `slots` slots, which are free in smaller gaps: moves the blocks
    /// between some of these towards the beginning of the pool, as few slots as possible. Returns
    /// the gap's first slot.
    fn make_gap(&mut self, slots: usize, tensors: &mut LayoutTensors) -> Result<usize> {
        let heads = self.layout.kv_heads();
        let Some(arena) = &self.layout.arena else { return Ok(0) };
        let (mut end, moved) = arena.cheapest_gap(slots);
        for (row, block) in moved {
            let goes_to = end..end + block.len();
            end = goes_to.end;
            if goes_to.start == block.start {
                continue;
            }
            let ranges = row * heads..(row + 1) * heads;
            let lengths = &self.layout.lengths()[ranges.clone()];
            let most = lengths.iter().copied().max().unwrap_or_default();
            let old = self.layout.offsets()[ranges.clone()].to_vec();
            let new: Vec<usize> =
                old.iter().map(|offset| offset - block.start + goes_to.start).collect();
            if most > 0 {
                let [of, to] = tensors.lists([&old, lengths, &new].concat(), || {
                    let columns = || columns(heads, most, &self.options.device);
                    let counts = self.upload(lengths.iter().copied());
                    let upload = |firsts: &[usize]| self.upload(firsts.iter().copied());
                    let of = listed(columns(), upload(&old), counts.clone());
                    let to = listed(columns(), upload(&new), counts);
                    Ok([of.clamp_min(0).flatten(0, 1), to.flatten(0, 1)])
                })?;
                // A copy: a block may overlap with where it goes.
                let rows = self.read_slots(&of);
                self.write_slots(&to, rows)?;
            }
            for (range, offset) in ranges.zip(new) {
                let (capacity, length) =
                    (self.layout.capacities()[range], self.layout.lengths()[range]);
                self.layout.set_range(range, offset, capacity, length);
            }
            if let Some(arena) = &mut self.layout.arena {
                arena.blocks[row] = Some(goes_to);
            }
        }
        Ok(end)
    }

    /// Writes the host's offsets and lengths into the tensors that steps read.
    pub(super) fn write_ranges(&mut self, tensors: &mut LayoutTensors) -> Result<()> {
        let device = &self.options.device;
        let SlotRanges { offsets, lengths } =
            tensors.ranges(&self.layout, || self.layout.to_device(device));
        assign_ints(&mut self.ranges.offsets, offsets)?;
        Ok(assign_ints(&mut self.ranges.lengths, lengths)?)
    }
}

impl ArenaLayout {
    /// The first slot of the smallest gap of at least `slots` slots.
    fn gap(&self, slots: usize) -> Option<usize> {
        let mut taken: Vec<&Range<usize>> = self.blocks.iter().flatten().collect();
        taken.sort_by_key(|block| block.start);
        let ends = std::iter::once(0).chain(taken.iter().map(|block| block.end));
        let starts =
            taken.iter().map(|block| block.start).chain([self.slots - LayerCache::SCRATCH]);
        let gaps = ends.zip(starts).filter(|(end, start)| end + slots <= *start);
        gaps.min_by_key(|(end, start)| start - end).map(|(end, _)| end)
    }

    /// How to make a gap of at least `slots` slots, which are free: the slot from which on blocks
    /// are to follow each other, and these blocks with their rows, in the order of the pool. Of all
    /// neighbouring blocks whose gaps together suffice, the ones with the fewest slots.
    fn cheapest_gap(&self, slots: usize) -> (usize, Vec<(usize, Range<usize>)>) {
        let mut taken: Vec<(usize, Range<usize>)> = (0..)
            .zip(&self.blocks)
            .filter_map(|(row, block)| Some((row, block.clone()?)))
            .collect();
        taken.sort_by_key(|(_, block)| block.start);
        let end = self.slots - LayerCache::SCRATCH;
        let before = |at: usize| if at == 0 { 0 } else { taken[at - 1].1.end };
        let after = |at: usize| taken.get(at).map_or(end, |(_, block)| block.start);
        let (mut cheapest, mut first) = (None, 0);
        let mut moved = 0;
        // The blocks `first..=last` are moved: a window that slides over the pool.
        for last in 0..taken.len() {
            moved += taken[last].1.len();
            while after(last + 1) - before(first) >= moved + slots {
                if cheapest.as_ref().is_none_or(|(least, _)| moved < *least) {
                    cheapest = Some((moved, first..last + 1));
                }
                if first == last {
                    break;
                }
                moved -= taken[first].1.len();
                first += 1;
            }
        }
        let window = cheapest.map_or(0..taken.len(), |(_, window)| window);
        (before(window.start), taken[window].to_vec())
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{DType, Device, Distribution, Int, Tensor};
    use kv_kernels::DecodeAttentionOptions;
    use kv_testing::devices;

    use super::*;

    fn sequence(device: &Device, tokens: usize) -> LayerCache {
        let options = CacheOptions::new(device, DType::F32);
        let mut cache = LayerCache::new(SlotLayout::new(2, vec![tokens + 4; 2]), 8, options);
        for at in 0..tokens {
            let of = || Tensor::<3>::random([1, 2, 8], Distribution::Default, device);
            let position = Tensor::<1, Int>::full([1], at as i64, (device, DType::I32));
            cache.append(of(), of(), position).unwrap();
        }
        cache
    }

    fn attend(cache: &LayerCache, query: &Tensor<3>) -> Vec<f32> {
        let rows = cache.layout().batch();
        let query = query.clone().repeat_dim(0, rows);
        let output = cache.attend(query, DecodeAttentionOptions::default()).unwrap().output;
        output.try_into_vec_as::<f32>().unwrap()
    }

    #[test]
    fn sequences_come_and_go_without_seeing_each_other() {
        for tested in devices() {
            let device = &tested.device;
            let options = CacheOptions::new(device, DType::F32);
            let mut arena = LayerCache::arena([3, 2, 8], 60, 20, options);
            let query = Tensor::<3>::random([1, 4, 8], Distribution::Default, device);
            let own: Vec<LayerCache> = [5, 9, 3, 12].map(|n| sequence(device, n)).into();
            let alone: Vec<Vec<f32>> = own.iter().map(|one| attend(one, &query)).collect();
            let check = |arena: &LayerCache, rows: &[(usize, usize)]| {
                let all = attend(arena, &query);
                for &(row, of) in rows {
                    for (a, b) in all[row * 32..(row + 1) * 32].iter().zip(&alone[of]) {
                        assert!((a - b).abs() < 1e-5, "{} row {row}: {a} {b}", tested.name);
                    }
                }
            };
            arena.place_row(0, &own[0], &[6, 6]).unwrap();
            arena.place_row(1, &own[1], &[10, 10]).unwrap();
            arena.place_row(2, &own[2], &[8, 8]).unwrap();
            check(&arena, &[(0, 0), (1, 1), (2, 2)]);
            assert_eq!(arena.free_in_arena(), 12);
            let full = arena.place_row(0, &own[3], &[13, 13]).unwrap_err();
            assert!(matches!(full, Error::InvalidPlan { .. }), "{full}");
            arena.free_row(0).unwrap();
            // 24 slots are free in two gaps of 12: the other sequences move together.
            let full = arena.place_row(0, &own[3], &[13, 13]).unwrap_err();
            assert!(matches!(full, Error::ArenaFull { requested: 26, free: 24 }), "{full}");
            arena.place_row(0, &own[3], &[12, 12]).unwrap();
            assert_eq!(arena.free_in_arena(), 0);
            check(&arena, &[(0, 3), (1, 1), (2, 2)]);
        }
    }

    #[test]
    fn heads_of_different_lengths_move_with_their_tracks() {
        for tested in devices() {
            let device = &tested.device;
            let mut arena =
                LayerCache::arena([3, 2, 8], 60, 20, CacheOptions::new(device, DType::F32));
            let all = arena.keys().dims()[0];
            arena.set_track("age", Tensor::zeros([all], (device, DType::F32)), 0.0).unwrap();
            let uneven = |tokens: usize| {
                let mut cache = sequence(device, tokens);
                for _ in 0..3 {
                    let victims = cache.lowest_slots(cache.positions().clone().float()).unwrap();
                    cache.evict_slots(victims, &[tokens, tokens - 3]).unwrap();
                }
                cache.set_track("age", cache.positions().clone().float(), 0.0).unwrap();
                cache
            };
            let own: Vec<LayerCache> = [5, 9, 4, 12].map(uneven).into();
            let query = Tensor::<3>::random([1, 4, 8], Distribution::Default, device);
            let ages = |cache: &LayerCache, row: usize| -> Vec<f32> {
                let all: Vec<f32> = cache.track("age").unwrap().clone().try_into_vec_as().unwrap();
                (2 * row..2 * row + 2).flat_map(|r| all[cache.layout().live(r)].to_vec()).collect()
            };
            arena.place_row(0, &own[0], &[8, 8]).unwrap();
            arena.place_row(1, &own[1], &[10, 10]).unwrap();
            arena.place_row(2, &own[2], &[8, 8]).unwrap();
            arena.free_row(0).unwrap();
            // 16 slots are free before row 1, and 8 behind row 2.
            arena.place_row(0, &own[3], &[12, 12]).unwrap();
            let found = attend(&arena, &query);
            for (row, one) in [(0, &own[3]), (1, &own[1]), (2, &own[2])] {
                assert_eq!(arena.layout().lengths()[2 * row..2 * row + 2], *one.layout().lengths());
                assert_eq!(ages(&arena, row), ages(one, 0), "{} row {row}", tested.name);
                for (a, b) in found[row * 32..].iter().zip(attend(one, &query)) {
                    assert!((a - b).abs() < 1e-5, "{} row {row}: {a} {b}", tested.name);
                }
            }
        }
    }

    #[test]
    fn the_fewest_slots_are_moved_for_a_gap() {
        // Gaps of 2, 3, 4 and 1 slots around blocks of 20, 5 and 6, which rows 2, 0 and 3 have.
        let layout = ArenaLayout {
            slots: 41 + LayerCache::SCRATCH,
            most: 20,
            blocks: vec![Some(25..30), None, Some(2..22), Some(34..40)],
        };
        assert_eq!(layout.cheapest_gap(7), (22, vec![(0, 25..30)]));
        assert_eq!(layout.cheapest_gap(8), (22, vec![(0, 25..30), (3, 34..40)]));
        assert_eq!(layout.cheapest_gap(9), (0, vec![(2, 2..22), (0, 25..30)]));
        let all = vec![(2, 2..22), (0, 25..30), (3, 34..40)];
        assert_eq!(layout.cheapest_gap(10), (0, all));
    }

    #[test]
    fn idle_rows_never_run_out_of_room() {
        let device = Device::flex();
        let options = CacheOptions::new(&device, DType::F32);
        let mut arena = LayerCache::arena([2, 2, 8], 300, 150, options);
        arena.place_row(1, &sequence(&device, 3), &[140, 140]).unwrap();
        for step in 0..2 * LayerCache::SCRATCH + 5 {
            arena.rest_idle_rows(&mut LayoutTensors::default()).unwrap();
            let of = || Tensor::<3>::ones([2, 2, 8], (&device, DType::F32));
            let position = Tensor::<1, Int>::full([2], step as i64, (&device, DType::I32));
            arena.append(of(), of(), position).unwrap();
        }
        assert_eq!(arena.layout().lengths()[2..], [2 * LayerCache::SCRATCH + 8; 2]);
    }
}
