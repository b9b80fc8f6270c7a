//! The kernel of `quantize_slots`: one cube a block. The units first leave the scales of values and
//! of keys' channels in shared memory, and then make the words of codes.

use cubecl::prelude::*;

use crate::quantized::layout::kernel::{Range, code_of};
use crate::quantized::layout::{BLOCK, codes_of_word, shift, words};
use crate::quantized::pool::QuantizedBits;
use crate::quantized::pool::kernel::QuantizedSlots;

/// Units of a cube.
pub(super) const UNITS: usize = 128;

/// Numbers that a unit reads before it waits for the first of them.
const AHEAD: usize = 8;

/// Comptime configuration of the generated code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Blueprint {
    pub(super) head_dim: usize,
    pub(super) bits: QuantizedBits,
}

/// The slots that are quantised.
#[derive(CubeType, CubeLaunch)]
pub(super) struct SourceSlots<F: Float> {
    /// `[S, D]`
    keys: Box<[F]>,
    /// `[S, D]`
    values: Box<[F]>,
    /// `[P, M]`, negative for none.
    from: Box<[i32]>,
    /// First blocks `[P]`, negative for lists that are not written.
    to: Box<[i32]>,
    /// `P`
    lists: usize,
    /// Blocks of a list.
    blocks: usize,
}

#[cube(launch_unchecked)]
pub(super) fn quantize_kernel<F: Float>(
    source: &SourceSlots<F>,
    pool: &mut QuantizedSlots,
    #[comptime] blueprint: Blueprint,
    #[define(F)] _dtype: ElemType,
) {
    let Blueprint { head_dim, bits } = blueprint;
    let cube = CUBE_POS;
    if cube >= source.lists * source.blocks {
        terminate!();
    }
    let list = cube / source.blocks;
    let first = source.to[list];
    if first < 0 {
        terminate!();
    }
    let block = first as usize + cube % source.blocks;
    let from = cube * BLOCK.comptime();
    let unit = UNIT_POS as usize;

    let key_bits = comptime!(bits.keys);
    let value_bits = comptime!(bits.values);

    // Of every slot: its row among the source slots, or none; and its value's scale.
    let mut slots = Shared::<[i32]>::new_slice(BLOCK);
    let mut value_scales = Shared::<[u32]>::new_slice(BLOCK);
    if unit < BLOCK {
        let slot = source.from[from + unit];
        let mut range = Range::none();
        if slot >= 0 {
            let row = slot as usize * head_dim;
            let whole = comptime!(head_dim / AHEAD);
            for piece in 0..whole {
                #[unroll]
                for i in 0..AHEAD.comptime() {
                    let at = row + piece * AHEAD.comptime() + i;
                    range.add(f32::cast_from(source.values[at]));
                }
            }
            for channel in comptime!(whole * AHEAD)..head_dim {
                range.add(f32::cast_from(source.values[row + channel]));
            }
        }
        let scale = range.scale(value_bits);
        slots[unit] = slot;
        value_scales[unit] = scale;
        pool.value_scales[block * BLOCK.comptime() + unit] = scale;
    }
    let mut key_scales = Shared::<[u32]>::new_slice(head_dim);
    sync_cube();

    let mut channel = unit;
    while channel < head_dim {
        let mut range = Range::none();
        for piece in 0..comptime!(BLOCK / AHEAD) {
            #[unroll]
            for i in 0..AHEAD.comptime() {
                let slot = slots[piece * AHEAD.comptime() + i];
                // A read that does not wait for a branch can go ahead of others.
                let x = source.keys[max(slot, 0) as usize * head_dim + channel];
                if slot >= 0 {
                    range.add(f32::cast_from(x));
                }
            }
        }
        let scale = range.scale(key_bits);
        key_scales[channel] = scale;
        pool.key_scales[block * head_dim + channel] = scale;
        channel += UNITS.comptime();
    }
    sync_cube();

    let key_words = comptime!(words(head_dim, key_bits));
    let key_codes = comptime!(codes_of_word(key_bits));
    let mut at = unit;
    while at < comptime!(key_words * BLOCK) {
        let (first, slot) = (at / BLOCK.comptime() * key_codes, slots[at % BLOCK.comptime()]);
        let row = max(slot, 0) as usize * head_dim;
        let mut word = 0u32;
        #[unroll]
        for i in 0..key_codes {
            let channel = first + i;
            if slot >= 0 && channel < head_dim {
                let x = f32::cast_from(source.keys[row + channel]);
                let code = code_of(x, key_scales[channel], key_bits);
                word |= code << comptime!(shift(i, key_bits) as u32);
            }
        }
        pool.key_codes[block * comptime!(key_words * BLOCK) + at] = word;
        at += UNITS.comptime();
    }

    let value_words = comptime!(words(BLOCK, value_bits));
    let value_codes = comptime!(codes_of_word(value_bits));
    let mut at = unit;
    while at < comptime!(value_words * head_dim) {
        let (first, channel) = (at / head_dim * value_codes, at % head_dim);
        let mut word = 0u32;
        #[unroll]
        for i in 0..value_codes {
            let within = first + i;
            let slot = slots[min(within, comptime!(BLOCK - 1))];
            if slot >= 0 && within < BLOCK.comptime() {
                let x = f32::cast_from(source.values[slot as usize * head_dim + channel]);
                let code = code_of(x, value_scales[within], value_bits);
                word |= code << comptime!(shift(i, value_bits) as u32);
            }
        }
        pool.value_codes[block * comptime!(value_words * head_dim) + at] = word;
        at += UNITS.comptime();
    }
}
