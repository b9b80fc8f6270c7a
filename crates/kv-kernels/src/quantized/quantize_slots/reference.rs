//! `quantize_slots` in plain loops: the CPU path, and the oracle of the kernel's tests.

use crate::quantized::layout::host::{code_of, packed};
use crate::quantized::layout::{BLOCK, codes_of_word, words};
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
        for (channel, scale) in scales.iter_mut().enumerate() {
            let keys = slots.iter().filter_map(|&slot| row(slot));
            *scale = packed(keys.map(|row| source.keys[row + channel]), key_bits) as i32;
        }
        for (at, &slot) in slots.iter().enumerate() {
            let to = block * BLOCK + at;
            let width = words(head_dim, key_bits);
            let key_codes = &mut self.key_codes[to * width..][..width];
            let width = words(head_dim, value_bits);
            let value_codes = &mut self.value_codes[to * width..][..width];
            key_codes.fill(0);
            value_codes.fill(0);
            self.value_scales[to] = 0;
            let Some(row) = row(slot) else { continue };
            let values = &source.values[row..][..head_dim];
            let scale = packed(values.iter().copied(), value_bits);
            self.value_scales[to] = scale as i32;
            for channel in 0..head_dim {
                let key_scale = scales[channel] as u32;
                put(
                    key_codes,
                    channel,
                    code_of(source.keys[row + channel], key_scale, key_bits),
                    key_bits,
                );
                put(value_codes, channel, code_of(values[channel], scale, value_bits), value_bits);
            }
        }
    }
}

/// Puts a code into its row.
fn put(row: &mut [i32], channel: usize, code: u32, bits: usize) {
    let each = codes_of_word(bits);
    row[channel / each] |= (code << (channel % each * bits)) as i32;
}
