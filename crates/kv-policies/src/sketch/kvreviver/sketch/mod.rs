//! Count-sketches of the tokens that a layer has dropped, which can come back (KVReviver).

mod saved;

use burn::tensor::{DType, Device, Int, Tensor};
use kv_kernels::{
    ABSENT, HEAD_FIELDS, NO_SLOT, SketchHashes, SketchPool, SketchSource, scatter_scalars,
    sketch_insert, sketch_query,
};
use serde::{Deserialize, Serialize};

use kv_core::{
    Error, HostState, LayerCache, LoadState, PolicyState, Result, SavedState, Selection,
    StateBytes, StepLengths, counted, expect_shape, packed, read_f32, read_i32, zero_rows,
};

/// The options of a layer's sketches, common to all heads.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct SketchOptions {
    /// `r`: buckets, in each of which a token has an entry.
    pub buckets: usize,
    /// Whether keys have random signs as values have.
    pub signed_keys: bool,
    /// Slots that a head may hold beyond the tokens that it keeps exactly. They go into the sketch
    /// together.
    pub slack: usize,
    /// A token changes places with the slot of the lowest score if its score is this many times
    /// higher; never for `None`.
    pub replace_rate: Option<f32>,
    /// Whether attention rebuilds the whole cache in scratch memory first.
    pub rebuild: bool,
}

/// The sizes of one head range's slots and sketch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SketchHead {
    /// `b`: entries of a bucket; 0 for a head without a sketch, which drops nothing.
    pub entries: usize,
    /// Slots that are kept exactly.
    pub limit: usize,
    /// The number of exact slots for the most recent tokens.
    pub recents: usize,
}

/// The sketches of a layer, one for every head range, and the score of each token: four bytes,
/// whether it is in a slot or in the sketch. A token's index is its logical position.
#[derive(Debug)]
pub struct Sketch {
    pub(super) options: SketchOptions,
    pub(super) heads: Vec<SketchHead>,
    pub(super) seeds: Vec<[u32; 2]>,
    /// Tokens that every head has room for.
    pub(super) tokens: usize,
    /// Tokens that the longest sequence has seen.
    pub(super) seen: usize,
    /// Entries, `[N, D]`.
    pub(super) keys: Tensor<2>,
    pub(super) values: Tensor<2>,
    /// `[B * Hkv * tokens]`: the accumulated attention of tokens in the sketch; [`ABSENT`] for all
    /// others.
    pub(super) scores: Tensor<1>,
    /// `[B * Hkv, 2]`
    pub(super) counters: Tensor<2, Int>,
    /// `[B * Hkv, 6]`, in the kernels' layout.
    pub(super) table: Tensor<2, Int>,
    pub(super) hashes: SketchHashes,
}

/// A sketch's tensors to be changed by a step.
pub(super) struct SketchParts<'a> {
    pub(super) pool: SketchPool<'a>,
    pub(super) scores: &'a mut Tensor<1>,
    pub(super) counters: &'a mut Tensor<2, Int>,
}

impl Sketch {
    /// The track of the attention that slots' tokens have accumulated, beside a sketch.
    pub const SCORES: &'static str = "score";

    /// The most slots beyond those that are kept.
    pub const MOST_SLACK: usize = 1 << 16;

    /// Empty sketches for heads `[B * Hkv]`, with room for `tokens` tokens each. `seeds` has one a
    /// head.
    ///
    /// # Errors
    /// [`Error::Shape`] for another number of seeds; [`Error::InvalidPlan`] where a head keeps
    /// fewer slots than it has recents, for a replace rate below 1 and a slack above
    /// [`Self::MOST_SLACK`].
    pub fn new(
        heads: Vec<SketchHead>,
        tokens: usize,
        head_dim: usize,
        seeds: &[[u32; 2]],
        options: SketchOptions,
        device: &Device,
    ) -> Result<Self> {
        expect_shape("seeds", &[seeds.len()], &[heads.len()])?;
        let rate = options.replace_rate.unwrap_or(f32::INFINITY);
        if rate.is_nan() || rate < 1.0 || options.slack > Self::MOST_SLACK {
            let SketchOptions { slack, .. } = options;
            let most = Self::MOST_SLACK;
            let reason = format!(
                "a replace rate of {rate}, expected at least 1, or a slack of {slack}, expected at \
                 most {most}"
            );
            return Err(Error::InvalidPlan { what: "sketch", reason });
        }
        if let Some(at) = heads.iter().position(|head| head.recents > head.limit) {
            let SketchHead { limit, recents, .. } = heads[at];
            let kept = counted(limit, "slot");
            let reason = format!("head {at} keeps {kept}, of which {recents} are recents");
            return Err(Error::InvalidPlan { what: "sketch", reason });
        }
        let entries = heads.iter().map(|head| head.entries * options.buckets).sum::<usize>().max(1);
        let zeros = || zero_rows(entries, head_dim, device, DType::F32);
        let counters = Tensor::<1, Int>::zeros([heads.len() * 2], (device, DType::I32));
        Ok(Self {
            options,
            tokens,
            seen: 0,
            keys: zeros(),
            values: zeros(),
            scores: Tensor::full([heads.len() * tokens.max(1)], ABSENT, (device, DType::F32)),
            counters: counters.reshape([heads.len(), 2]),
            table: table(&heads, tokens, options.buckets, device),
            hashes: SketchHashes::seeded(seeds, options.buckets, device),
            seeds: seeds.to_vec(),
            heads,
        })
    }

    /// The sketches' options.
    pub fn options(&self) -> SketchOptions {
        self.options
    }

    /// Every head range's sizes, `[B * Hkv]`.
    pub fn heads(&self) -> &[SketchHead] {
        &self.heads
    }

    /// Tokens that every head has room for: positions from 0 on.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Puts a prompt's tokens into the sketches, except the tokens that are kept exactly.
    ///
    /// # Shapes
    /// `keys`, `values` `[B, Hkv, T, D]`; `scores` `[B, Hkv, T]`, f32: each token's accumulated
    /// attention, 0 or more.
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::CapacityExhausted`] for more tokens than there is room for.
    pub fn fill(
        &mut self,
        keys: &Tensor<4>,
        values: &Tensor<4>,
        scores: Tensor<3>,
        kept: &Selection,
    ) -> Result<()> {
        let [batch, kv_heads, count, head_dim] = keys.dims();
        let total_kv_heads = self.heads.len();
        expect_shape("scores", &scores.dims(), &[batch, kv_heads, count])?;
        expect_shape("values", &values.dims(), &keys.dims())?;
        expect_shape(
            "keys",
            &[batch * kv_heads, head_dim],
            &[total_kv_heads, self.keys.dims()[1]],
        )?;
        self.make_room(count, false)?;
        self.seen = count;
        if count == 0 {
            return Ok(());
        }
        kept.check(&vec![count; total_kv_heads])?;
        let device = self.keys.device();
        // A copy: it is written in place.
        let mut scores = scores.cast(DType::F32).reshape([total_kv_heads * count]).mul_scalar(1.0);
        if kept.total() > 0 {
            let firsts: Vec<usize> = (0..total_kv_heads).map(|range| range * count).collect();
            let exact = kept.lists(&firsts, &device)?.slots.flatten::<1>(0, 1);
            let absent = Tensor::full(exact.dims(), ABSENT, (&device, DType::F32));
            scatter_scalars(&mut scores, exact, absent)?;
        }
        let scores = scores.reshape([total_kv_heads, count]);
        let goes = scores.clone().greater_equal_scalar(0.0);
        let tokens = Tensor::<1, Int>::arange(0..count as i64, (&device, DType::I32));
        let tokens = tokens.unsqueeze_dim::<2>(0).expand([total_kv_heads, count]);
        let listed = tokens.mask_fill(goes.clone().bool_not(), NO_SLOT);
        let rows = |tensor: &Tensor<4>| tensor.clone().reshape([total_kv_heads, count, head_dim]);
        let own = scores.mask_fill(goes.bool_not(), ABSENT);
        let padded = match self.tokens - count {
            0 => own,
            more => {
                let absent = Tensor::full([total_kv_heads, more], ABSENT, (&device, DType::F32));
                Tensor::cat(vec![own, absent], 1)
            }
        };
        self.scores = padded.reshape([total_kv_heads * self.tokens]);
        self.add(listed, rows(keys), rows(values), 1.0)
    }

    /// Adds tokens to the entries, `sign` times each: 1 puts them in, −1 takes them out. The
    /// scores, which say what a sketch holds, stay as they are.
    ///
    /// # Shapes
    /// `tokens` `[B * Hkv, M]`, 32-bit, negative for none; `keys`, `values` `[B * Hkv, M, D]`.
    ///
    /// # Errors
    /// The errors of [`sketch_insert`].
    pub fn add(
        &mut self,
        tokens: Tensor<2, Int>,
        keys: Tensor<3>,
        values: Tensor<3>,
        sign: f32,
    ) -> Result<()> {
        Ok(sketch_insert(self.parts().pool, tokens, keys, values, sign)?)
    }

    /// Estimates tokens, whether they are in the sketch or not: keys and values `[B * Hkv, M, D]`
    /// of `dtype`; zeros for negative ones.
    ///
    /// # Shapes
    /// `tokens` `[B * Hkv, M]`, 32-bit.
    ///
    /// # Errors
    /// The errors of [`sketch_query`].
    pub fn query(&self, tokens: Tensor<2, Int>, dtype: DType) -> Result<[Tensor<3>; 2]> {
        Ok(sketch_query(self.source(), tokens, dtype)?)
    }

    /// The accumulated attention of every token, read to the host, `[B * Hkv, tokens]`; negative
    /// for tokens that are not in the sketch.
    ///
    /// # Errors
    /// [`Error::Read`].
    pub fn read_scores(&self) -> Result<Vec<Vec<f32>>> {
        let scores = read_f32("scores of a sketch", self.scores.clone())?;
        Ok(scores.chunks(self.tokens.max(1)).map(<[f32]>::to_vec).collect())
    }

    /// Tokens that decode steps moved into the sketch, and that changed places with slots, per
    /// head, read to the host, `[B * Hkv]`.
    ///
    /// # Errors
    /// [`Error::Read`].
    pub fn read_counters(&self) -> Result<Vec<[usize; 2]>> {
        let counters = read_i32("moves of a sketch", self.counters.clone())?;
        Ok(counters.chunks(2).map(|pair| [pair[0] as usize, pair[1] as usize]).collect())
    }

    /// Bytes of entries.
    pub fn entry_bytes(&self) -> usize {
        let [entries, head_dim] = self.keys.dims();
        2 * entries * head_dim * size_of::<f32>()
    }

    /// Bytes of entries, of the tokens' scores and of tables.
    pub fn bytes(&self) -> usize {
        let hashes = self.heads.len() * self.options.buckets * 4;
        let words = self.scores.dims()[0] + self.heads.len() * (HEAD_FIELDS + 2) + hashes;
        self.entry_bytes() + words * size_of::<f32>()
    }

    /// Bytes of scratch that attention takes.
    fn scratch_bytes(&self, dtype: DType) -> usize {
        match self.options.rebuild {
            true => 2 * self.heads.len() * self.tokens * self.keys.dims()[1] * dtype.size(),
            false => 0,
        }
    }

    /// A head's length after a step, if it is `length` once the step has appended its token.
    pub(super) fn length_after(&self, range: usize, length: usize) -> usize {
        let SketchHead { entries, limit, .. } = self.heads[range];
        if entries > 0 && length > limit + self.options.slack { limit } else { length }
    }

    /// Makes sure that there is room for `more` more tokens of every sequence.
    fn make_room(&mut self, more: usize, growable: bool) -> Result<()> {
        PolicyState::check_room(self, more, growable)?;
        let (capacity, requested) = (self.tokens, self.seen + more);
        if requested > capacity {
            self.grow(requested.max(2 * capacity));
        }
        Ok(())
    }

    /// Makes room for at least `tokens` tokens.
    pub(super) fn grow(&mut self, tokens: usize) {
        if tokens <= self.tokens {
            return;
        }
        let (total_kv_heads, device) = (self.heads.len(), self.keys.device());
        let more =
            Tensor::full([total_kv_heads, tokens - self.tokens], ABSENT, (&device, DType::F32));
        let scores = match self.tokens {
            0 => more,
            old => Tensor::cat(vec![self.scores.clone().reshape([total_kv_heads, old]), more], 1),
        };
        self.scores = scores.reshape([total_kv_heads * tokens]);
        self.tokens = tokens;
        self.table = table(&self.heads, tokens, self.options.buckets, &device);
    }

    pub(super) fn source(&self) -> SketchSource<'_> {
        SketchSource {
            keys: &self.keys,
            values: &self.values,
            heads: &self.table,
            most_entries: self.most_entries(),
            hashes: &self.hashes,
            signed_keys: self.options.signed_keys,
        }
    }

    pub(super) fn scores(&self) -> &Tensor<1> {
        &self.scores
    }

    /// Where each head's tokens begin among all, `[B * Hkv]`, on the device.
    pub(super) fn first_tokens(&self) -> Tensor<1, Int> {
        self.table.clone().narrow(1, 2, 1).reshape([self.heads.len()])
    }

    pub(super) fn parts(&mut self) -> SketchParts<'_> {
        let most_entries = self.most_entries();
        SketchParts {
            pool: SketchPool {
                keys: &mut self.keys,
                values: &mut self.values,
                heads: &self.table,
                most_entries,
                hashes: &self.hashes,
                signed_keys: self.options.signed_keys,
            },
            scores: &mut self.scores,
            counters: &mut self.counters,
        }
    }

    fn most_entries(&self) -> usize {
        let entries = self.heads.iter().map(|head| head.entries);
        entries.max().unwrap_or_default() * self.options.buckets
    }

    /// The sketches of several caches of one layer, batched.
    fn concat(mut parts: Vec<Self>) -> Result<Self> {
        let options = parts[0].options;
        if let Some(other) = parts.iter().find(|part| part.options != options) {
            let reason = format!("sketches are of {:?} and of {options:?}", other.options);
            return Err(Error::InvalidPlan { what: "concat", reason });
        }
        let tokens = parts.iter().map(|part| part.tokens).max().unwrap_or_default();
        let seen = parts.iter().map(|part| part.seen).max().unwrap_or_default();
        parts.iter_mut().for_each(|part| part.grow(tokens));
        let device = parts[0].keys.device();
        let heads: Vec<SketchHead> = parts.iter().flat_map(|part| part.heads.clone()).collect();
        // A cache without entries has one unused entry.
        let entries = |of: fn(&Self) -> &Tensor<2>| {
            let own = parts.iter().map(|part| {
                let count = part.heads.iter().map(|head| head.entries * options.buckets).sum();
                (of(part).clone(), count)
            });
            let own = own.filter(|(_, count)| *count > 0);
            let own: Vec<_> = own.map(|(all, count)| all.narrow(0, 0, count)).collect();
            if own.is_empty() { of(&parts[0]).clone() } else { packed(Tensor::cat(own, 0)) }
        };
        let seeds: Vec<[u32; 2]> = parts.iter().flat_map(|part| part.seeds.clone()).collect();
        Ok(Self {
            options,
            tokens,
            seen,
            keys: entries(|part| &part.keys),
            values: entries(|part| &part.values),
            scores: Tensor::cat(parts.iter().map(|part| part.scores.clone()).collect(), 0),
            counters: Tensor::cat(parts.iter().map(|part| part.counters.clone()).collect(), 0),
            table: table(&heads, tokens, options.buckets, &device),
            hashes: SketchHashes::seeded(&seeds, options.buckets, &device),
            seeds,
            heads,
        })
    }

    /// The sketches on another device.
    fn moved_to(&self, device: &Device) -> Self {
        let ints = |tensor: &Tensor<2, Int>| tensor.clone().to_device(device);
        Self {
            options: self.options,
            heads: self.heads.clone(),
            seeds: self.seeds.clone(),
            tokens: self.tokens,
            seen: self.seen,
            keys: packed(self.keys.clone().to_device(device)),
            values: packed(self.values.clone().to_device(device)),
            scores: self.scores.clone().to_device(device),
            counters: ints(&self.counters),
            table: table(&self.heads, self.tokens, self.options.buckets, device),
            hashes: SketchHashes::seeded(&self.seeds, self.options.buckets, device),
        }
    }
}

impl Clone for Sketch {
    /// Copies every tensor: a kernel that wrote through a shared one would write into both.
    fn clone(&self) -> Self {
        let rows = |tensor: &Tensor<2>| packed(tensor.clone().mul_scalar(1.0));
        Self {
            options: self.options,
            heads: self.heads.clone(),
            seeds: self.seeds.clone(),
            tokens: self.tokens,
            seen: self.seen,
            keys: rows(&self.keys),
            values: rows(&self.values),
            scores: self.scores.clone().mul_scalar(1.0),
            counters: self.counters.clone().add_scalar(0),
            table: self.table.clone(),
            hashes: self.hashes.clone(),
        }
    }
}

impl PolicyState for Sketch {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn copied(&self) -> Option<Box<dyn PolicyState>> {
        Some(Box::new(self.clone()))
    }

    fn to_device(&self, device: &Device) -> Option<Box<dyn PolicyState>> {
        Some(Box::new(self.moved_to(device)))
    }

    fn joined(&self, others: &[&dyn PolicyState]) -> Result<Box<dyn PolicyState>> {
        let parts = kv_core::states_of::<Self>(self, others)?;
        Ok(Box::new(Self::concat(parts.into_iter().cloned().collect())?))
    }

    fn to_host(&self) -> Result<Option<HostState>> {
        saved::save(self).map(|saved| Some(HostState::Saved(saved)))
    }

    fn bytes(&self, cache: &LayerCache) -> StateBytes {
        let scratch = self.scratch_bytes(cache.options().dtype);
        StateBytes { device: self.bytes(), host: 0, scratch }
    }

    fn check_room(&self, more: usize, growable: bool) -> Result<()> {
        let (capacity, requested) = (self.tokens, self.seen + more);
        if requested <= capacity || growable {
            return Ok(());
        }
        Err(Error::CapacityExhausted { sequence: 0, head: 0, capacity, requested })
    }

    fn reserve(&mut self, more: usize, growable: bool) -> Result<()> {
        self.make_room(more, growable)
    }

    fn appended(&mut self, tokens: usize) {
        self.seen += tokens;
    }

    /// Counts tokens as being in the sketch, without adding their keys and values.
    fn assume(&mut self, more: usize) -> Result<()> {
        self.make_room(more, false)?;
        let (total_kv_heads, end) = (self.heads.len(), self.seen + more);
        let scores = self.scores.clone().reshape([total_kv_heads, self.tokens]);
        let zeros = Tensor::zeros([total_kv_heads, more], (&scores.device(), DType::F32));
        let scores = scores.slice_assign([0..total_kv_heads, self.seen..end], zeros);
        self.scores = scores.reshape([total_kv_heads * self.tokens]);
        self.seen = end;
        Ok(())
    }

    /// A step appends before it gives up slots.
    fn lengths_of_step(&self, head: usize, before: usize) -> Option<StepLengths> {
        let within = before + 1;
        Some(StepLengths { within, behind: self.length_after(head, within) })
    }

    fn sets_track(&self, track: &str) -> bool {
        track == Self::SCORES
    }

    fn counter(&self) -> usize {
        self.seen
    }

    fn set_counter(&mut self, seen: usize) {
        self.seen = seen;
    }
}

impl LoadState for Sketch {
    const NAME: &'static str = "sketch";

    fn load(saved: SavedState, cache: &LayerCache, seen: &[usize]) -> Result<Self> {
        saved::load(saved, cache, seen)
    }
}

/// The kernels' table of heads.
fn table(heads: &[SketchHead], tokens: usize, buckets: usize, device: &Device) -> Tensor<2, Int> {
    let mut first_entry = 0;
    let fields = heads.iter().enumerate().flat_map(|(at, head)| {
        let SketchHead { entries, limit, recents } = *head;
        let first = first_entry;
        first_entry += entries * buckets;
        [first, entries, at * tokens, tokens, limit, recents]
    });
    let fields: Vec<i32> = fields.map(|field| i32::try_from(field).unwrap_or(i32::MAX)).collect();
    // Flat first: some devices pad the rows of what they are given as a matrix.
    let flat = Tensor::<1, Int>::from_data(fields.as_slice(), (device, DType::I32));
    flat.reshape([heads.len(), HEAD_FIELDS])
}
