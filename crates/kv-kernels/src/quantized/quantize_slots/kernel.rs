//! The kernel of `quantize_slots`: one cube a block, one unit a slot. The units first find the
//! minima and maxima of the keys' channels, each of every 64th channel, and leave the scales in
//! shared memory. Then each unit makes the codes of its slot.

use cubecl::prelude::*;

use crate::components::softmax::is_number;
use crate::quantized::layout::kernel::{code_of, packed};
use crate::quantized::layout::{BLOCK, codes_of_word, words};
use crate::quantized::pool::QuantizedBits;
use crate::quantized::pool::kernel::QuantizedSlots;

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

    let mut scales = Shared::<[u32]>::new_slice(head_dim);
    let mut channel = unit;
    while channel < head_dim {
        let mut low = f32::new(f32::MAX);
        let mut high = f32::new(f32::MIN);
        let mut finite = true;
        for at in 0..BLOCK.comptime() {
            let slot = source.from[from + at];
            if slot >= 0 {
                let x = f32::cast_from(source.keys[slot as usize * head_dim + channel]);
                low = select(x < low, x, low);
                high = select(x > high, x, high);
                finite = finite && is_finite(x);
            }
        }
        let word = packed(low, high, finite, comptime!(bits.keys));
        scales[channel] = word;
        pool.key_scales[block * head_dim + channel] = word;
        channel += BLOCK.comptime();
    }
    sync_cube();

    let slot = source.from[from + unit];
    let to = block * BLOCK.comptime() + unit;
    let row = max(slot, 0) as usize * head_dim;
    let there = slot >= 0;

    let key_words = comptime!(words(head_dim, bits.keys));
    let key_codes = comptime!(codes_of_word(bits.keys));
    for w in 0..key_words {
        let mut word = 0u32;
        for i in 0..key_codes {
            let channel = w * key_codes + i;
            if there && channel < head_dim {
                let x = f32::cast_from(source.keys[row + channel]);
                let code = code_of(x, scales[channel], comptime!(bits.keys));
                word |= code << (i * comptime!(bits.keys)) as u32;
            }
        }
        pool.key_codes[to * key_words + w] = word;
    }

    let mut low = f32::new(f32::MAX);
    let mut high = f32::new(f32::MIN);
    let mut finite = true;
    if there {
        for channel in 0..head_dim {
            let x = f32::cast_from(source.values[row + channel]);
            low = select(x < low, x, low);
            high = select(x > high, x, high);
            finite = finite && is_finite(x);
        }
    }
    let scale = packed(low, high, finite, comptime!(bits.values));
    pool.value_scales[to] = scale;
    let value_words = comptime!(words(head_dim, bits.values));
    let value_codes = comptime!(codes_of_word(bits.values));
    for w in 0..value_words {
        let mut word = 0u32;
        for i in 0..value_codes {
            let channel = w * value_codes + i;
            if there && channel < head_dim {
                let x = f32::cast_from(source.values[row + channel]);
                let code = code_of(x, scale, comptime!(bits.values));
                word |= code << (i * comptime!(bits.values)) as u32;
            }
        }
        pool.value_codes[to * value_words + w] = word;
    }
}

/// Whether a number is neither NaN nor infinite.
#[cube]
fn is_finite(x: f32) -> bool {
    is_number(x) && u32::reinterpret(x) & 0x7f80_0000u32 != 0x7f80_0000u32
}
