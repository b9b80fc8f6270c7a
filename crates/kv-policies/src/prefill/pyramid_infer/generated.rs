//! Generated tokens under PyramidInfer: block after block shrinks behind the recents.

use burn::tensor::{DType, Int, Tensor};
use kv_core::{LayerCache, Selection, read_f32, read_i32, top};

use super::PyramidInfer;
use crate::policy::state_tensors::int_numbers;
use crate::{LayerContext, PolicyError, Result};

/// Generated tokens that shrink together.
const BLOCK: usize = 16;
/// The share of a block that the first layer keeps.
const SHARE: f64 = 0.9;
/// How far the schedule of blocks falls.
const GAMMA: f64 = 0.1;

/// Track of each slot's attention, summed over the queries behind its block.
const ATTENTION: &str = "attention";
/// Track of each slot's attention times the query's age in steps, summed over these queries.
const AGED: &str = "aged-attention";
/// State of each sequence, integers `[B, 1, 3]`: prompt tokens, slots of them in the first layer,
/// blocks shrunk so far.
pub(super) const BLOCKS: &str = "blocks";

/// One sequence's generated tokens.
#[derive(Debug, Clone, Copy)]
pub(super) struct Generated {
    prompt: usize,
    /// Slots that the first layer keeps of the prompt: recents are a share of its length.
    first_layer: usize,
    shrunk: usize,
}

impl PyramidInfer {
    /// Slots that layer `layer` keeps of a block.
    pub(super) fn of_block(&self, layer: LayerContext) -> usize {
        let ratio = super::cosine(GAMMA, layer);
        ((BLOCK as f64 * SHARE * ratio) as usize).max(1)
    }

    /// Recents while `whole` generated tokens are not shrunk yet.
    fn recents_beside(&self, generated: Generated, whole: usize) -> usize {
        let first = LayerContext { index: 0, count: 1 };
        let length = generated.first_layer + generated.shrunk * self.of_block(first) + whole;
        (length as f64 * self.recent_ratio) as usize
    }

    /// Whole generated tokens at which the next block has left the recents; `None` if recents grow
    /// as fast as the text.
    fn due_at(&self, generated: Generated) -> Option<usize> {
        if self.recent_ratio >= 1.0 {
            return None;
        }
        let is_due = |whole: &usize| *whole > BLOCK + self.recents_beside(generated, *whole);
        // The solution in real numbers, less one for rounding.
        let others = self.recents_beside(generated, 0) as f64;
        let about = (BLOCK as f64 + others) / (1.0 - self.recent_ratio);
        ((about as usize).saturating_sub(1)..).find(is_due)
    }

    /// The most slots that a head holds at once beyond the prompt's, over `new_tokens` steps.
    pub(super) fn most_slots(
        &self,
        layer: LayerContext,
        [prompt, first_layer]: [usize; 2],
        new_tokens: usize,
    ) -> usize {
        let mut generated = Generated { prompt, first_layer, shrunk: 0 };
        let mut most = 0;
        let (mut whole, mut left) = (0, new_tokens);
        loop {
            let steps = match self.due_at(generated) {
                Some(due) => due.saturating_sub(whole).min(left),
                None => left,
            };
            whole += steps;
            left -= steps;
            most = most.max(generated.shrunk * self.of_block(layer) + whole);
            if left == 0 {
                return most;
            }
            generated.shrunk += 1;
            whole -= BLOCK;
        }
    }

    /// Prepares a freshly filled cache for [`Self::record`] and [`Self::shrink`].
    pub(super) fn init_blocks(
        &self,
        cache: &mut LayerCache,
        [prompt, first_layer]: [usize; 2],
    ) -> Result<()> {
        let (batch, slots) = (cache.layout().batch(), cache.positions().dims()[0]);
        let device = cache.options().device.clone();
        let zeros = || Tensor::<1>::zeros([slots], (&device, DType::F32));
        cache.set_track(ATTENTION, zeros(), 0.0)?;
        cache.set_track(AGED, zeros(), 0.0)?;
        let generated = Generated { prompt, first_layer, shrunk: 0 };
        set_blocks(cache, &vec![generated; batch]);
        let due = self.due_at(generated);
        let lengths = cache.layout().lengths().iter();
        let limits = lengths.map(|length| limit(*length, 0, due)).collect();
        Ok(cache.set_limits(limits)?)
    }

    /// Adds one step's attention, `[S, G]`, to the tokens of the blocks before the step's own.
    pub(super) fn record(
        &self,
        cache: &mut LayerCache,
        probabilities: &Tensor<2>,
        position: &Tensor<1, Int>,
    ) -> Result<()> {
        let state = cache.int_state(BLOCKS).ok_or_else(not_filled)?;
        let (batch, heads) = (cache.layout().batch(), cache.layout().kv_heads());
        let prompt = state.clone().narrow(2, 0, 1).reshape([batch]);
        let generated = position.clone().cast(DType::I32) - prompt.clone();
        // Blocks begin at multiples of a power of 2.
        let own_block = prompt + generated.bitwise_and_scalar(-(BLOCK as i32));
        let own_block = own_block.unsqueeze_dim::<2>(1).expand([batch, heads]);
        let own_block = own_block.reshape([batch * heads]).select(0, cache.slot_ranges().clone());
        let excluded = cache.positions().clone().greater_equal(own_block);
        let row = probabilities.clone().mean_dim(1).squeeze_dim::<1>(1).mask_fill(excluded, 0.0);
        let track = |name: &str| cache.track(name).cloned().ok_or_else(not_filled);
        let (attention, aged) = (track(ATTENTION)?, track(AGED)?);
        // All earlier queries grow older by one step.
        cache.set_track(AGED, aged + attention.clone(), 0.0)?;
        Ok(cache.set_track(ATTENTION, attention + row, 0.0)?)
    }

    /// Shrinks the blocks that have left the recents.
    pub(super) fn shrink(&self, layer: LayerContext, cache: &mut LayerCache) -> Result<()> {
        if !is_due(cache, 0) {
            return Ok(());
        }
        let heads = cache.layout().kv_heads();
        let limits = cache.limits().ok_or_else(not_filled)?.to_vec();
        let lengths = cache.layout().lengths().to_vec();
        let is_due = |row: usize| lengths[row * heads] > limits[row * heads];
        let batch = cache.layout().batch();
        let mut sequences = blocks(cache)?;
        let read = |name: &str| {
            let track = cache.track(name).cloned().ok_or_else(not_filled)?;
            Ok::<_, PolicyError>(read_f32("scores", track)?)
        };
        let (attention, aged) = (read(ATTENTION)?, read(AGED)?);
        let mut kept: Vec<Vec<u32>> =
            lengths.iter().map(|&length| (0..length as u32).collect()).collect();
        let mut next = limits.clone();
        for row in (0..batch).filter(|&row| is_due(row)) {
            let Some(whole) = self.due_at(sequences[row]) else { continue };
            let recents = self.recents_beside(sequences[row], whole) as f32;
            let ranges = row * heads..(row + 1) * heads;
            // A block's tokens lie at the same distance from the end in every head.
            let scores: Vec<f32> = (0..BLOCK)
                .map(|token| {
                    let of_head = |range: usize| {
                        let slot = cache.layout().live(range).end - whole + token;
                        let newest = 1.0 + 0.2 * recents / recents.max(1.0);
                        newest * attention[slot] - 0.2 / recents.max(1.0) * aged[slot]
                    };
                    ranges.clone().map(of_head).sum()
                })
                .collect();
            let chosen = top(&scores, self.of_block(layer));
            sequences[row].shrunk += 1;
            let due = self.due_at(sequences[row]);
            for range in ranges {
                let block = lengths[range] - whole;
                kept[range].drain(block..block + BLOCK);
                let survivors = chosen.iter().map(|token| block as u32 + token);
                kept[range].splice(block..block, survivors);
                next[range] = limit(kept[range].len(), whole - BLOCK, due);
            }
        }
        cache.retain(&Selection::new(kept)?)?;
        set_blocks(cache, &sequences);
        Ok(cache.set_limits(next)?)
    }
}

/// Whether a block has left the recents once every head holds `more` slots more.
pub(super) fn is_due(cache: &LayerCache, more: usize) -> bool {
    let lengths = cache.layout().lengths().iter();
    lengths.zip(cache.limits().unwrap_or_default()).any(|(length, limit)| length + more > *limit)
}

/// The last length before the next block shrinks, of a head whose `length` slots end with `whole`
/// generated tokens.
fn limit(length: usize, whole: usize, due: Option<usize>) -> usize {
    due.map_or(usize::MAX, |due| length - whole + due - 1)
}

fn blocks(cache: &LayerCache) -> Result<Vec<Generated>> {
    let state = cache.int_state(BLOCKS).ok_or_else(not_filled)?;
    let numbers = read_i32("blocks", state.clone())?;
    let sequences = numbers.chunks(3).map(|of| Generated {
        prompt: of[0] as usize,
        first_layer: of[1] as usize,
        shrunk: of[2] as usize,
    });
    Ok(sequences.collect())
}

fn set_blocks(cache: &mut LayerCache, sequences: &[Generated]) {
    let numbers = sequences.iter().flat_map(|of| [of.prompt, of.first_layer, of.shrunk]);
    let state = int_numbers(numbers, [sequences.len(), 1, 3], &cache.options().device);
    cache.set_int_state(BLOCKS, state);
}

fn not_filled() -> PolicyError {
    PolicyError::MissingObservation {
        policy: "pyramidinfer",
        what: "a cache that this policy filled",
    }
}
