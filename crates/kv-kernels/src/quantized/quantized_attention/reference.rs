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
    /// Attends to a range of slots.
    pub(crate) fn attend(&self, query: &[f32], scale: f32, slots: Range<usize>, state: &mut State) {
        for slot in slots {
            let key = (0..self.head_dim).map(|channel| self.key(slot, channel));
            let dot: f32 = query.iter().zip(key).map(|(q, k)| q * k).sum();
            state.add(dot * scale, (0..self.head_dim).map(|channel| self.value(slot, channel)));
        }
    }

    /// A number of a slot's key.
    fn key(&self, slot: usize, channel: usize) -> f32 {
        let (block, at, bits) = (slot / BLOCK, slot % BLOCK, self.bits.keys);
        let (word, i) = (channel / codes_of_word(bits), channel % codes_of_word(bits));
        let word = self.key_codes[(block * words(self.head_dim, bits) + word) * BLOCK + at];
        number(self.key_scales[block * self.head_dim + channel], word, i, bits)
    }

    /// A number of a slot's value.
    fn value(&self, slot: usize, channel: usize) -> f32 {
        let (block, at, bits) = (slot / BLOCK, slot % BLOCK, self.bits.values);
        let (word, i) = (at / codes_of_word(bits), at % codes_of_word(bits));
        let word = self.value_codes[(block * words(BLOCK, bits) + word) * self.head_dim + channel];
        number(self.value_scales[slot], word, i, bits)
    }
}

/// The number of a word's `i`-th code.
fn number(scale: i32, word: i32, i: usize, bits: usize) -> f32 {
    let code = (word as u32 >> shift(i, bits)) & ((1 << bits) - 1);
    minimum_of(scale as u32) + step_of(scale as u32) * code as f32
}
