//! `quantized_attention` in plain loops: the CPU path, and the oracle of the kernel's tests.

use std::ops::Range;

use crate::attention::continued::reference::State;
use crate::quantized::layout::host::{minimum_of, step_of};
use crate::quantized::layout::{BLOCK, codes_of_word, shift, words};
use crate::quantized::pool::QuantizedBits;

/// The buffers of a pool.
pub(crate) struct CodedSlots<'a> {
    pub(crate) key_codes: &'a [i32],
    pub(crate) key_scales: &'a [i32],
    pub(crate) value_codes: &'a [i32],
    pub(crate) value_scales: &'a [i32],
    pub(crate) bits: QuantizedBits,
    pub(crate) head_dim: usize,
}

impl CodedSlots<'_> {
    /// Attends to a range of slots with all query heads that read it, `[G, D]`. A block is read
    /// once for all of them.
    pub(crate) fn attend(
        &self,
        queries: &[f32],
        scale: f32,
        slots: Range<usize>,
        states: &mut [State],
    ) {
        let size = self.head_dim;
        let (mut keys, mut values) = (vec![0.0; BLOCK * size], vec![0.0; BLOCK * size]);
        for block in slots.start / BLOCK..slots.end.div_ceil(BLOCK) {
            self.read_keys(block, &mut keys);
            self.read_values(block, &mut values);
            let first = block * BLOCK;
            let live = slots.start.max(first) - first..slots.end.min(first + BLOCK) - first;
            for (query, state) in queries.chunks(size).zip(&mut *states) {
                for slot in live.clone() {
                    let row = slot * size..(slot + 1) * size;
                    let dot: f32 = query.iter().zip(&keys[row.clone()]).map(|(q, k)| q * k).sum();
                    state.add(dot * scale, values[row].iter().copied());
                }
            }
        }
    }

    /// The keys of a block, `[BLOCK, D]`.
    fn read_keys(&self, block: usize, keys: &mut [f32]) {
        let (bits, size) = (self.bits.keys, self.head_dim);
        let (words, each) = (words(size, bits), codes_of_word(bits));
        for channel in 0..size {
            let (word, i) = (channel / each, channel % each);
            let codes = &self.key_codes[(block * words + word) * BLOCK..][..BLOCK];
            let number = Numbers::new(self.key_scales[block * size + channel], i, bits);
            for (slot, &code) in codes.iter().enumerate() {
                keys[slot * size + channel] = number.of(code);
            }
        }
    }

    /// The values of a block, `[BLOCK, D]`.
    fn read_values(&self, block: usize, values: &mut [f32]) {
        let (bits, size) = (self.bits.values, self.head_dim);
        let (words, each) = (words(BLOCK, bits), codes_of_word(bits));
        for (slot, row) in values.chunks_mut(size).enumerate() {
            let (word, i) = (slot / each, slot % each);
            let codes = &self.value_codes[(block * words + word) * size..][..size];
            let number = Numbers::new(self.value_scales[block * BLOCK + slot], i, bits);
            row.iter_mut().zip(codes).for_each(|(value, &code)| *value = number.of(code));
        }
    }
}

/// The numbers that the `i`-th codes of words stand for.
struct Numbers {
    minimum: f32,
    step: f32,
    shift: usize,
    mask: u32,
}

impl Numbers {
    fn new(scale: i32, i: usize, bits: usize) -> Self {
        let (minimum, step) = (minimum_of(scale as u32), step_of(scale as u32));
        Self { minimum, step, shift: shift(i, bits), mask: (1 << bits) - 1 }
    }

    fn of(&self, word: i32) -> f32 {
        self.minimum + self.step * ((word as u32 >> self.shift) & self.mask) as f32
    }
}
