//! The vague tokens of a layer in blocks, and the steps that add to them.

use burn::tensor::{DType, Device, Int, Tensor};
use kv_core::{
    Error, FullRange, Fullness, HostState, LayerCache, LoadState, PolicyState, Result, SavedState,
    Selection, StateBytes, StepLengths, expect_shape, state_of, states_of,
};
use kv_kernels::{AttendedSlots, NO_SLOT, SlotRanges, assign_int_rows, assign_ints};
use serde::{Deserialize, Serialize};

use super::form::VagueForm;
use super::pool::{BLOCK, VaguePool};

/// The sizes of one head range's exact and vague parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct VagueHead {
    /// Blocks of vague slots that the range has room for; a range without any drops the slots
    /// that leave.
    pub blocks: usize,
    /// Slots that are kept exactly.
    pub limit: usize,
    /// The number of exact slots for the most recent tokens.
    pub recents: usize,
    /// Exact slots over the limit that leave together: a block where the range has blocks.
    pub over: usize,
}

/// The vague tokens of a layer, in whole blocks. A range with no free block overwrites its
/// oldest one.
///
/// The device moves blocks by itself, so that the steps that do can be recorded. The host computes
/// the same counts: every step appends one slot to each range, and a block moves when the range is
/// full.
#[derive(Debug)]
pub struct VagueTokens {
    pool: VaguePool,
    places: Vec<Place>,
    kv_heads: usize,
    head_dim: usize,
    /// Each range at the time from which `appended` counts.
    start: Vec<Start>,
    /// Tokens that every sequence has seen since.
    appended: usize,
    /// The vague slots of each range.
    ranges: SlotRanges,
    on_device: DeviceHeads,
}

/// A head range's place in the pool.
#[derive(Debug, Clone, Copy)]
struct Place {
    head: VagueHead,
    /// The blocks that the range has. Its head may have room for fewer: a sequence that replaces
    /// another one in its row takes over its blocks.
    blocks: usize,
}

/// A range's counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Start {
    /// Exact slots.
    exact: usize,
    /// Blocks written so far; more than the range has room for once it has overwritten some.
    written: usize,
}

/// What the device knows of each range, `[B * Hkv]`.
#[derive(Debug)]
struct DeviceHeads {
    fullness: Fullness,
    recents: Tensor<1, Int>,
    /// The range's first block.
    first: Tensor<1, Int>,
    /// Blocks that the range has room for, at least 1.
    room: Tensor<1, Int>,
    /// 1 for ranges that have room for blocks, 0 for others.
    keeps: Tensor<1, Int>,
    /// Blocks written so far.
    written: Tensor<1, Int>,
}

impl VagueTokens {
    /// The track of the attention that exact slots have accumulated.
    pub const SCORES: &'static str = "score";

    /// Room for the vague tokens of heads `[B * Hkv]` that have `exact` exact slots.
    ///
    /// # Errors
    /// [`Error::InvalidPlan`] for heads whose parts do not fit together.
    pub fn new(
        heads: Vec<VagueHead>,
        kv_heads: usize,
        exact: &[usize],
        head_dim: usize,
        form: VagueForm,
        (dtype, device): (DType, &Device),
    ) -> Result<Self> {
        heads.iter().zip(exact).try_for_each(|(head, &exact)| head.check(exact))?;
        let pool = form.pool(heads.iter().map(|head| head.blocks).sum(), head_dim, dtype, device);
        let start = exact.iter().map(|&exact| Start { exact, written: 0 }).collect();
        let places = heads.into_iter().map(|head| Place { head, blocks: head.blocks });
        Self::of_pool(pool, places.collect(), kv_heads, head_dim, start)
    }

    fn of_pool(
        pool: VaguePool,
        places: Vec<Place>,
        kv_heads: usize,
        head_dim: usize,
        start: Vec<Start>,
    ) -> Result<Self> {
        let bounds = places.iter().map(|place| place.head.full()).collect();
        let fullness = Fullness::new(bounds, &pool.device())?;
        Ok(Self::of_parts(pool, places, kv_heads, head_dim, start, fullness))
    }

    fn of_parts(
        pool: VaguePool,
        places: Vec<Place>,
        kv_heads: usize,
        head_dim: usize,
        start: Vec<Start>,
        fullness: Fullness,
    ) -> Self {
        let device = pool.device();
        let heads = || places.iter().map(|place| &place.head);
        let first = first_blocks(&places);
        let offsets = first.iter().map(|first| first * BLOCK).collect();
        let of = |value: fn(&VagueHead) -> usize| numbers(heads().map(value).collect(), &device);
        let written: Vec<usize> = start.iter().map(|start| start.written).collect();
        let lengths = heads().zip(&written).map(|(head, &written)| head.slots(written));
        let ranges = SlotRanges {
            offsets: grid(offsets, kv_heads, &device),
            lengths: grid(lengths.collect(), kv_heads, &device),
        };
        let on_device = DeviceHeads {
            fullness,
            recents: of(|head| head.recents),
            first: numbers(first, &device),
            room: of(|head| head.blocks.max(1)),
            keeps: of(|head| usize::from(head.blocks > 0)),
            written: numbers(written, &device),
        };
        Self { pool, places, kv_heads, head_dim, start, appended: 0, ranges, on_device }
    }

    /// The head of each range.
    fn heads(&self) -> impl ExactSizeIterator<Item = &VagueHead> {
        self.places.iter().map(|place| &place.head)
    }

    /// Each range's counts by now.
    fn now(&self) -> Vec<Start> {
        let ranges = self.heads().zip(&self.start);
        ranges.map(|(head, start)| head.after(*start, self.appended)).collect()
    }

    /// The vague tokens of a cache.
    ///
    /// # Errors
    /// [`Error::InvalidPlan`] where it has none.
    pub fn of(cache: &LayerCache) -> Result<&Self> {
        cache.policy_state().ok_or_else(without)
    }

    /// The number of vague slots of each head range, `[B * Hkv]`.
    pub fn lengths(&self) -> Vec<usize> {
        let ranges = self.heads().zip(self.now());
        ranges.map(|(head, now)| head.slots(now.written)).collect()
    }

    /// The pool of vague slots.
    pub fn pool(&self) -> &VaguePool {
        &self.pool
    }

    /// Keeps tokens of a prompt.
    ///
    /// # Shapes
    /// `keys`, `values` `[B, Hkv, T, D]`; `tokens` has equally many whole blocks of each
    /// head range, or none.
    ///
    /// # Errors
    /// [`Error::Shape`] for more tokens than there is room for, [`Error::Kernel`].
    pub(super) fn fill(
        &mut self,
        keys: &Tensor<4>,
        values: &Tensor<4>,
        tokens: &Selection,
    ) -> Result<()> {
        if tokens.total() == 0 {
            return Ok(());
        }
        let [batch, kv_heads, prompt, head_dim] = keys.dims();
        expect_shape("keys", &[batch * kv_heads, head_dim], &[self.places.len(), self.head_dim])?;
        let firsts: Vec<usize> = (0..batch * kv_heads).map(|range| range * prompt).collect();
        let from = tokens.lists(&firsts, &keys.device())?.slots;
        let rows = |of: &Tensor<4>| of.clone().reshape([batch * kv_heads * prompt, head_dim]);
        // A list writes as many blocks as the longest one has.
        let count = tokens.lengths()[0];
        expect_shape("vague tokens", tokens.lengths(), &vec![count; self.places.len()])?;
        let blocks = count / BLOCK;
        for head in self.heads() {
            expect_shape("vague blocks", &[blocks.min(head.blocks)], &[blocks])?;
        }
        self.write(rows(keys), rows(values), from, None)?;
        self.start.iter_mut().for_each(|start| start.written += blocks);
        Ok(())
    }

    /// Writes the lists of `from`, whole blocks, behind each range's last block: all of them, or
    /// the lists of ranges that are `full` (1). The host's counts stay.
    fn write(
        &mut self,
        keys: Tensor<2>,
        values: Tensor<2>,
        from: Tensor<2, Int>,
        full: Option<Tensor<1, Int>>,
    ) -> Result<()> {
        let blocks = (from.dims()[1] / BLOCK) as i32;
        let DeviceHeads { first, room, keeps, written, .. } = &mut self.on_device;
        let writes = match full {
            Some(full) => full * keeps.clone(),
            None => keeps.clone(),
        };
        let to = first.clone() + written.clone().remainder(room.clone());
        // −1 where nothing is written.
        let to = (to.add_scalar(1) * writes.clone()).sub_scalar(1);
        self.pool.write(keys, values, from, to)?;
        let more = written.clone() + writes.mul_scalar(blocks);
        assign_ints(written, more)?;
        let slots = written.clone().min_pair(room.clone()) * keeps.clone();
        let slots = slots.mul_scalar(BLOCK as i32).reshape(self.ranges.lengths.dims());
        Ok(assign_ints(&mut self.ranges.lengths, slots)?)
    }

    /// Continues the attention over exact slots over the vague ones.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    pub fn attend(&self, query: Tensor<3>, before: AttendedSlots) -> Result<AttendedSlots> {
        // Recorded steps hold for all sequences that find room.
        let blocks = self.places.iter().map(|place| place.blocks);
        let longest = blocks.max().unwrap_or_default() * BLOCK;
        if longest == 0 {
            return Ok(before);
        }
        self.pool.attend(query, &self.ranges, before, longest)
    }

    /// Whether a step that appends `more` tokens moves a block of exact slots into the vague part.
    pub(super) fn is_due(&self, cache: &LayerCache, more: usize) -> bool {
        let lengths = cache.layout().lengths().iter().zip(self.heads());
        lengths.into_iter().any(|(length, head)| head.full().leaving(length + more) > 0)
    }

    /// Moves exact slots into the vague part, of each range that has enough over its limit: the
    /// slots of the lowest scores that are not recent. `position` has the newest tokens' positions,
    /// `[B]`.
    ///
    /// # Errors
    /// [`Error::InvalidPlan`] without vague tokens or scores, [`Error::Kernel`].
    pub(super) fn take_weakest(cache: &mut LayerCache, position: &Tensor<1, Int>) -> Result<()> {
        let mut state = cache.take_policy_state::<Self>().ok_or_else(without)?;
        let moved = state.take_weakest_of(cache, position);
        cache.insert_policy_state(state);
        moved
    }

    fn take_weakest_of(&mut self, cache: &mut LayerCache, position: &Tensor<1, Int>) -> Result<()> {
        let scores = self.protected_scores(cache, position)?;
        let leaving = cache.leaving(scores, &self.on_device.fullness)?;
        if self.places.iter().any(|place| place.blocks > 0) {
            let (keys, values) = (cache.keys().clone(), cache.values().clone());
            // Ranges with blocks give up whole ones; shorter lists of others are not written.
            let slots = in_blocks(leaving.slots.clone());
            self.write(keys, values, slots, Some(leaving.full.clone()))?;
        }
        cache.drop_leaving(leaving)
    }

    /// Whether the one sequence of `from` can take any row's place: its heads need no more blocks
    /// than the row has.
    fn has_room_for(&self, from: &Self) -> bool {
        let shape = |of: &Self| [of.kv_heads, of.head_dim];
        let rows = self.places.chunks(self.kv_heads.max(1));
        let mut heads = rows.flat_map(|row| row.iter().zip(from.heads()));
        from.places.len() == self.kv_heads
            && shape(self) == shape(from)
            && self.pool.accepts(&from.pool)
            && self.on_device.fullness.accepts(&from.on_device.fullness)
            && heads.all(|(own, head)| head.blocks <= own.blocks)
    }

    /// This state with more blocks: each head has at least as many as that head has in any row of
    /// `like`.
    fn widened(&self, like: &Self) -> Result<Self> {
        let (shape, device) = ([self.kv_heads, self.head_dim], self.pool.device());
        expect_shape("vague tokens", &[like.kv_heads, like.head_dim], &shape)?;
        let rows = like.places.chunks(self.kv_heads.max(1));
        let most = |head: usize| rows.clone().map(|row| row[head].blocks).max().unwrap_or_default();
        let places = self.places.iter().enumerate().map(|(range, place)| {
            let blocks = place.blocks.max(most(range % self.kv_heads.max(1)));
            Place { blocks, ..*place }
        });
        let places: Vec<Place> = places.collect();
        let all = places.iter().map(|place| place.blocks).sum();
        let goes = |(place, first): (&Place, usize)| first..first + place.blocks;
        let to = self.places.iter().zip(first_blocks(&places)).flat_map(goes);
        let to = block_list(to.map(|block| block as i32).collect(), &device);
        let pool = self.pool.moved(&to, all, self.head_dim)?;
        let mut fullness = self.on_device.fullness.clone();
        fullness.widen(&like.on_device.fullness);
        Ok(Self::of_parts(pool, places, self.kv_heads, self.head_dim, self.now(), fullness))
    }

    /// Puts the one sequence of `from` into the ranges from `first` on.
    fn replace(&mut self, first: usize, from: &Self) -> Result<()> {
        let behind = first + self.kv_heads;
        if behind > self.places.len() || !self.has_room_for(from) {
            let (own, other) = (&self.places, &from.places);
            return Err(invalid(format!("no room for {other:?} at range {first} of {own:?}")));
        }
        // `appended` counts the steps of all rows from one point in time, which is now.
        self.start = self.now();
        self.appended = 0;
        self.start[first..behind].copy_from_slice(&from.now());
        let targets = first_blocks(&self.places);
        let mut to: Vec<i32> = Vec::new();
        for (at, other) in (first..behind).zip(&from.places) {
            self.places[at].head = other.head;
            let goes_to = |block| match block < other.head.blocks {
                true => (targets[at] + block) as i32,
                false => NO_SLOT,
            };
            to.extend((0..other.blocks).map(goes_to));
        }
        self.pool.copy_blocks(&block_list(to, &self.pool.device()), &from.pool)?;
        self.on_device.replace(first, &from.on_device)?;
        let row = first / self.kv_heads;
        Ok(assign_int_rows(&mut self.ranges.lengths, row, from.ranges.lengths.clone())?)
    }

    /// Every slot's score, and of recent tokens a score above all others.
    fn protected_scores(&self, cache: &LayerCache, position: &Tensor<1, Int>) -> Result<Tensor<1>> {
        let scores = cache.track(Self::SCORES).cloned().ok_or_else(without)?;
        let recents = self.on_device.recents.clone();
        let of_slots = |of: Tensor<1, Int>| of.select(0, cache.slot_ranges().clone());
        let newest = position.clone().unsqueeze_dim::<2>(1);
        let newest =
            newest.expand([position.dims()[0], self.kv_heads]).reshape([self.places.len()]);
        let first = of_slots(newest - recents);
        let recent = cache.positions().clone().greater(first);
        Ok(scores.mask_fill(recent, f32::MAX))
    }
}

impl DeviceHeads {
    /// Puts other ranges in the place of those from `at` on, in place. Their blocks are the ones
    /// that were there.
    fn replace(&mut self, at: usize, from: &Self) -> Result<()> {
        self.fullness.replace(at, &from.fullness)?;
        assign_int_rows(&mut self.recents, at, from.recents.clone())?;
        assign_int_rows(&mut self.room, at, from.room.clone())?;
        assign_int_rows(&mut self.keeps, at, from.keeps.clone())?;
        Ok(assign_int_rows(&mut self.written, at, from.written.clone())?)
    }
}

impl VagueHead {
    /// Refuses parts that do not fit together, and more exact slots than steps leave.
    fn check(&self, exact: usize) -> Result<()> {
        let most = i32::MAX as usize - BLOCK;
        let whole = self.blocks == 0 || self.over == BLOCK;
        let sound = self.recents <= self.limit
            && self.limit <= most
            && (1..=BLOCK).contains(&self.over)
            && whole
            && exact < self.limit + self.over;
        if sound {
            return Ok(());
        }
        let reason = format!("{exact} exact slots in a head of {self:?}");
        Err(Error::InvalidPlan { what: "vague tokens", reason })
    }

    /// When slots leave the exact part, and how many.
    fn full(&self) -> FullRange {
        FullRange { at: self.limit + self.over, leave: self.over }
    }

    /// The counts behind `appended` steps from `start` on, of one token each: a step moves at most
    /// one block.
    fn after(&self, start: Start, appended: usize) -> Start {
        let FullRange { at, leave } = self.full();
        let exact = start.exact + appended;
        // A step appends a slot before a block moves.
        let moved = if appended > 0 && exact >= at { (exact - at) / leave + 1 } else { 0 };
        let written = if self.blocks > 0 { start.written + moved } else { 0 };
        Start { exact: exact - moved * leave, written }
    }

    /// Vague slots of a range that has written so many blocks.
    fn slots(&self, written: usize) -> usize {
        written.min(self.blocks) * BLOCK
    }
}

/// The first block of each head range.
fn first_blocks(places: &[Place]) -> Vec<usize> {
    let each = places.iter().scan(0, |next, place| {
        let first = *next;
        *next += place.blocks;
        Some(first)
    });
    each.collect()
}

/// The blocks to which the blocks of a pool are copied, on the device.
fn block_list(mut to: Vec<i32>, device: &Device) -> Tensor<1, Int> {
    if to.is_empty() {
        // The unused block of a pool without blocks.
        to.push(NO_SLOT);
    }
    Tensor::from_data(to.as_slice(), (device, DType::I32))
}

/// Lists of slots with −1 behind them, up to whole blocks.
fn in_blocks(slots: Tensor<2, Int>) -> Tensor<2, Int> {
    let [lists, count] = slots.dims();
    match count.next_multiple_of(BLOCK) - count {
        0 => slots,
        missing => {
            let none = Tensor::full([lists, missing], NO_SLOT, (&slots.device(), DType::I32));
            Tensor::cat(vec![slots, none], 1)
        }
    }
}

/// Numbers of head ranges, `[B * Hkv]`, on the device.
fn numbers(values: Vec<usize>, device: &Device) -> Tensor<1, Int> {
    let values: Vec<i32> = values.into_iter().map(|value| value as i32).collect();
    Tensor::from_data(values.as_slice(), (device, DType::I32))
}

/// Numbers of head ranges, `[B, Hkv]`, on the device.
fn grid(values: Vec<usize>, kv_heads: usize, device: &Device) -> Tensor<2, Int> {
    let batch = values.len() / kv_heads.max(1);
    numbers(values, device).reshape([batch, kv_heads])
}

fn invalid(reason: String) -> Error {
    Error::InvalidPlan { what: "vague tokens", reason }
}

fn unread(reason: String) -> Error {
    Error::Read { what: "vague tokens", reason }
}

fn without() -> Error {
    Error::InvalidPlan { what: "step", reason: "the cache has no vague tokens".into() }
}

impl VagueTokens {
    fn with_pool(&self, pool: VaguePool) -> Self {
        let fullness = self.on_device.fullness.copied(&pool.device());
        let (places, start) = (self.places.clone(), self.now());
        Self::of_parts(pool, places, self.kv_heads, self.head_dim, start, fullness)
    }

    fn concat(parts: &[&Self]) -> Result<Self> {
        let first = parts[0];
        let (shape, form) = ([first.kv_heads, first.head_dim], first.pool.form());
        for part in parts {
            expect_shape("vague tokens", &[part.kv_heads, part.head_dim], &shape)?;
            let own = part.pool.form();
            if own != form {
                return Err(invalid(format!("{own:?} beside {form:?}, expected one form")));
            }
        }
        let places = parts.iter().flat_map(|part| part.places.clone()).collect();
        let start = parts.iter().flat_map(|part| part.now()).collect();
        // A cache without blocks has one unused block.
        let own = |part: &Self| part.places.iter().map(|place| place.blocks).sum::<usize>();
        let with: Vec<_> =
            parts.iter().filter(|part| own(part) > 0).map(|part| &part.pool).collect();
        let pool = match with.is_empty() {
            true => first.pool.clone(),
            false => VaguePool::concat(&with).map_err(unread)?,
        };
        let mut joined = Self::of_pool(pool, places, first.kv_heads, first.head_dim, start)?;
        for part in parts {
            joined.on_device.fullness.widen(&part.on_device.fullness);
        }
        Ok(joined)
    }
}

/// The header of vague tokens in a file.
#[derive(Debug, Serialize, Deserialize)]
struct Header {
    heads: Vec<VagueHead>,
    /// The blocks of each range, where they are not as many as its head has room for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    blocks: Vec<usize>,
    form: VagueForm,
    written: Vec<usize>,
}

impl PolicyState for VagueTokens {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn copied(&self) -> Option<Box<dyn PolicyState>> {
        self.to_device(&self.pool.device())
    }

    fn to_device(&self, device: &Device) -> Option<Box<dyn PolicyState>> {
        // Where a device fails, the copy has no vague tokens, and its next step says so.
        Some(Box::new(self.with_pool(self.pool.copied(device).ok()?)))
    }

    fn joined(&self, others: &[&dyn PolicyState]) -> Result<Box<dyn PolicyState>> {
        Ok(Box::new(Self::concat(&states_of::<Self>(self, others)?)?))
    }

    fn accepts(&self, from: &dyn PolicyState) -> bool {
        state_of::<Self>(from).is_ok_and(|from| self.has_room_for(from))
    }

    fn replace_row(&mut self, row: usize, from: &dyn PolicyState) -> Result<()> {
        self.replace(row * self.kv_heads, state_of(from)?)
    }

    fn widen(&mut self, like: &dyn PolicyState) -> Result<()> {
        let like = state_of::<Self>(like)?;
        if self.pool.accepts(&like.pool) {
            *self = self.widened(like)?;
        }
        Ok(())
    }

    fn to_host(&self) -> Result<Option<HostState>> {
        let _work = kv_kernels::device_work();
        let are_all = self.places.iter().all(|place| place.head.blocks == place.blocks);
        let blocks = self.places.iter().filter(|_| !are_all).map(|place| place.blocks);
        let header = Header {
            heads: self.heads().copied().collect(),
            blocks: blocks.collect(),
            form: self.pool.form(),
            written: self.now().into_iter().map(|now| now.written).collect(),
        };
        let header = serde_json::to_value(header).map_err(|error| unread(error.to_string()))?;
        let tensors = self.pool.to_data().map_err(unread)?;
        Ok(Some(HostState::Saved(SavedState::of::<Self>(header, tensors))))
    }

    fn bytes(&self, _cache: &LayerCache) -> StateBytes {
        // Offsets, lengths and what else the device knows of each range.
        let ranges = 7 * self.places.len() * size_of::<i32>();
        let [device, host] = self.pool.bytes();
        let device = device + ranges + self.on_device.fullness.bytes();
        StateBytes { device, host, scratch: 0 }
    }

    /// A step appends before a block moves.
    fn lengths_of_step(&self, head: usize, before: usize) -> Option<StepLengths> {
        let (within, full) = (before + 1, self.places[head].head.full());
        Some(StepLengths { within, behind: within - full.leaving(within) })
    }

    fn appended(&mut self, tokens: usize) {
        self.appended += tokens;
    }

    fn counter(&self) -> usize {
        self.appended
    }

    fn set_counter(&mut self, counter: usize) {
        self.appended = counter;
    }

    /// Counts from the cache's lengths on.
    fn slots_moved(&mut self, cache: &LayerCache) -> Result<()> {
        let lengths = cache.layout().lengths();
        expect_shape("ranges of vague tokens", &[lengths.len()], &[self.places.len()])?;
        let now = self.now().into_iter().zip(lengths);
        self.start = now.map(|(now, &exact)| Start { exact, ..now }).collect();
        self.appended = 0;
        Ok(())
    }

    /// Counts all blocks as written, without contents.
    fn assume(&mut self, _tokens: usize) -> Result<()> {
        let written = |head: &VagueHead, start: Start| Start { written: head.blocks, ..start };
        let ranges = self.heads().zip(self.now());
        let start = ranges.map(|(head, now)| written(head, now)).collect();
        let (pool, places) = (self.pool.clone(), self.places.clone());
        *self = Self::of_pool(pool, places, self.kv_heads, self.head_dim, start)?;
        Ok(())
    }
}

impl LoadState for VagueTokens {
    const NAME: &'static str = "vague";

    fn load(mut saved: SavedState, cache: &LayerCache, _seen: &[usize]) -> Result<Self> {
        let header = std::mem::take(&mut saved.header);
        let header: Header =
            serde_json::from_value(header).map_err(|error| invalid(error.to_string()))?;
        let Header { heads, mut blocks, form, written } = header;
        if blocks.is_empty() {
            blocks = heads.iter().map(|head| head.blocks).collect();
        }
        let (ranges, head_dim) = (cache.layout().head_ranges(), cache.head_dim());
        let counts = [heads.len(), written.len(), blocks.len()];
        if counts != [ranges; 3] {
            let reason = format!("heads, written and all blocks of {counts:?} ranges");
            return Err(invalid(format!("{reason}, expected {ranges}")));
        }
        let too_many = |(head, &blocks): (&VagueHead, &usize)| head.blocks > blocks;
        if heads.iter().zip(&blocks).any(too_many) {
            return Err(invalid(format!("{heads:?} have more blocks than {blocks:?}")));
        }
        form.check().map_err(invalid)?;
        if cache.track(Self::SCORES).is_none() || cache.log_weights().is_some() {
            let track = Self::SCORES;
            return Err(invalid(format!("slots with weights, or without the track `{track}`")));
        }
        let lengths = cache.layout().lengths();
        heads.iter().zip(lengths).try_for_each(|(head, &exact)| head.check(exact))?;
        let most = i32::MAX as usize - BLOCK;
        if let Some(written) = written.iter().find(|written| **written > most) {
            return Err(invalid(format!("{written} blocks written")));
        }
        let all = blocks.iter().try_fold(0usize, |sum, &blocks| sum.checked_add(blocks));
        let all = all.filter(|blocks| blocks.checked_mul(2 * BLOCK * head_dim).is_some());
        let all = all.ok_or_else(|| invalid("blocks beyond counting".into()))?.max(1);
        let (device, dtype) = (&cache.options().device, cache.options().dtype);
        let pool = VaguePool::load(&mut saved, form, all, head_dim, dtype, device)?;
        let lengths = cache.layout().lengths().iter().zip(written);
        let start = lengths.map(|(&exact, written)| Start { exact, written }).collect();
        let places = heads.into_iter().zip(blocks).map(|(head, blocks)| Place { head, blocks });
        Self::of_pool(pool, places.collect(), cache.layout().kv_heads(), head_dim, start)
    }
}
