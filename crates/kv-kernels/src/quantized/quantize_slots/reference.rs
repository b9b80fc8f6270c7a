//! `quantize_slots` in plain loops: the CPU path, and the oracle of the kernel's tests.

use crate::quantized::layout::host::{code_of, scale};
use crate::quantized::layout::{BLOCK, codes_of_word, shift, words};
use crate::quantized::pool::QuantizedBits;

/// The buffers of a pool.
pub(crate) struct HostPool<'a> {
    pub(crate) key_codes: &'a mut [i32],
    pub(crate) key_scales: &'a mut [i32],
    pub(crate) value_codes: &'a mut [i32],
    pub(crate) value_scales: &'a mut [i32],
    pub(crate) bits: QuantizedBits,
}

/// The slots that are quantised.
pub(crate) struct Source<'a> {
    pub(crate) keys: &'a [f32],
    pub(crate) values: &'a [f32],
    pub(crate) head_dim: usize,
}

impl HostPool<'_> {
    /// Quantises the lists of `from`, of `count` slots each, into blocks from `to` on.
    pub(crate) fn quantize(&mut self, source: &Source<'_>, from: &[i32], to: &[i32], count: usize) {
        for (list, first) in from.chunks(count).zip(to) {
            let Ok(first) = usize::try_from(*first) else { continue };
            for (at, slots) in list.chunks(BLOCK).enumerate() {
                self.quantize_block(source, slots, first + at);
            }
        }
    }

    fn quantize_block(&mut self, source: &Source<'_>, slots: &[i32], block: usize) {
        let head_dim = source.head_dim;
        let QuantizedBits { keys: key_bits, values: value_bits } = self.bits;
        let row = |slot: i32| usize::try_from(slot).ok().map(|slot| slot * head_dim);
        let scales = &mut self.key_scales[block * head_dim..][..head_dim];
        for (channel, key_scale) in scales.iter_mut().enumerate() {
            let keys = slots.iter().filter_map(|&slot| row(slot));
            *key_scale = scale(keys.map(|row| source.keys[row + channel]), key_bits) as i32;
        }
        let (key_each, value_each) = (codes_of_word(key_bits), codes_of_word(value_bits));
        let key_words = words(head_dim, key_bits) * BLOCK;
        let key_codes = &mut self.key_codes[block * key_words..][..key_words];
        let value_words = words(BLOCK, value_bits) * head_dim;
        let value_codes = &mut self.value_codes[block * value_words..][..value_words];
        key_codes.fill(0);
        value_codes.fill(0);
        for (at, &slot) in slots.iter().enumerate() {
            let value_scale = &mut self.value_scales[block * BLOCK + at];
            *value_scale = 0;
            let Some(row) = row(slot) else { continue };
            let values = &source.values[row..][..head_dim];
            let own = scale(values.iter().copied(), value_bits);
            *value_scale = own as i32;
            for channel in 0..head_dim {
                let code = code_of(source.keys[row + channel], scales[channel] as u32, key_bits);
                let (word, i) = (channel / key_each, channel % key_each);
                key_codes[word * BLOCK + at] |= (code << shift(i, key_bits)) as i32;
                let code = code_of(values[channel], own, value_bits);
                let (word, i) = (at / value_each, at % value_each);
                value_codes[word * head_dim + channel] |= (code << shift(i, value_bits)) as i32;
            }
        }
    }
}
