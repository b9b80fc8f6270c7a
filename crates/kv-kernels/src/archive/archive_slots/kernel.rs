//! The kernel of `archive_slots`: one cube a block. The units first leave the channels' means in
//! shared memory, and then make the words of signatures and rows.

use cubecl::prelude::*;

use crate::archive::layout::kernel::{nearest, pair};
use crate::archive::layout::{BLOCK, SIGNS, row_words, signature_words};
use crate::archive::pool::kernel::ArchivedSlots;

/// Units of a cube.
pub(super) const UNITS: usize = 128;

/// Comptime configuration of the generated code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Blueprint {
    pub(super) head_dim: usize,
    /// Bytes of a number.
    pub(super) size: usize,
    /// Whether signatures and rows are written, beside means and spreads.
    pub(super) keeps_slots: bool,
}

/// The slots that are copied.
#[derive(CubeType, CubeLaunch)]
pub(super) struct SourceSlots<F: Float> {
    /// `[S, D]`
    keys: Box<[F]>,
    /// `[S, D]`
    values: Box<[F]>,
    /// The keys' words.
    key_words: Box<[u32]>,
    /// The values' words.
    value_words: Box<[u32]>,
    /// `[P, M]`
    from: Box<[i32]>,
    /// First blocks `[P]`, negative for lists that are not written.
    to: Box<[i32]>,
    /// `P`
    lists: usize,
    /// Blocks of a list.
    blocks: usize,
}

#[cube(launch_unchecked)]
pub(super) fn archive_kernel<F: Float>(
    source: &SourceSlots<F>,
    pool: &mut ArchivedSlots,
    #[comptime] blueprint: Blueprint,
    #[define(F)] _dtype: ElemType,
) {
    let Blueprint { head_dim, keeps_slots, .. } = blueprint;
    let cube = CUBE_POS;
    if cube >= source.lists * source.blocks {
        terminate!();
    }
    let first = source.to[cube / source.blocks];
    if first < 0 {
        terminate!();
    }
    let block = first as usize + cube % source.blocks;
    let unit = UNIT_POS as usize;

    let mut slots = Shared::<[u32]>::new_slice(BLOCK);
    if unit < BLOCK {
        let slot = source.from[cube * BLOCK.comptime() + unit];
        slots[unit] = max(slot, 0) as u32;
    }
    let mut key_means = Shared::<[f32]>::new_slice(head_dim);
    let mut value_means = Shared::<[f32]>::new_slice(comptime!(head_dim.next_multiple_of(2)));
    if unit == 0 {
        value_means[comptime!(head_dim.next_multiple_of(2) - 1)] = 0.0f32;
    }
    sync_cube();

    let mut channel = unit;
    while channel < head_dim {
        let mut key_sum = 0.0f32;
        let mut value_sum = 0.0f32;
        for at in 0..BLOCK.comptime() {
            let from = slots[at] as usize * head_dim + channel;
            key_sum += f32::cast_from(source.keys[from]);
            value_sum += f32::cast_from(source.values[from]);
        }
        let mean = nearest(key_sum / f32::new(comptime!(BLOCK as f32)));
        let mut distances = 0.0f32;
        for at in 0..BLOCK.comptime() {
            let key = f32::cast_from(source.keys[slots[at] as usize * head_dim + channel]);
            distances += (key - mean).abs();
        }
        let spread = distances / f32::new(comptime!(BLOCK as f32));
        key_means[channel] = mean;
        value_means[channel] = value_sum / f32::new(comptime!(BLOCK as f32));
        pool.key_statistics[block * head_dim + channel] = pair(mean, spread);
        channel += UNITS.comptime();
    }
    sync_cube();

    let mean_words = comptime!(head_dim.div_ceil(2));
    let mut word = unit;
    while word < mean_words {
        pool.value_means[block * mean_words + word] =
            pair(value_means[2 * word], value_means[2 * word + 1]);
        word += UNITS.comptime();
    }

    if comptime!(keeps_slots) {
        write_slots(source, pool, &slots, &key_means, block, blueprint);
    }
}

/// Writes the signatures and the rows of a block.
#[cube]
fn write_slots<F: Float>(
    source: &SourceSlots<F>,
    pool: &mut ArchivedSlots,
    slots: &Shared<[u32]>,
    key_means: &Shared<[f32]>,
    block: usize,
    #[comptime] blueprint: Blueprint,
) {
    let Blueprint { head_dim, size, .. } = blueprint;
    let unit = UNIT_POS as usize;
    let signature = comptime!(signature_words(head_dim) * BLOCK);
    let mut at = unit;
    while at < signature {
        let (first, slot) = (at / BLOCK.comptime() * SIGNS.comptime(), at % BLOCK.comptime());
        let row = slots[slot] as usize * head_dim;
        let mut signs = 0u32;
        for i in 0..SIGNS.comptime() {
            let channel = first + i;
            if channel < head_dim {
                let key = f32::cast_from(source.keys[row + channel]);
                if key > key_means[channel] {
                    signs |= 1u32 << i as u32;
                }
            }
        }
        pool.signatures[block * signature + at] = signs;
        at += UNITS.comptime();
    }

    // Neighbouring units copy neighbouring words.
    let words = comptime!(row_words(head_dim, size));
    let mut at = unit;
    while at < comptime!(2 * BLOCK * words) {
        let (slot, word) = (at / comptime!(2 * words), at % comptime!(2 * words));
        let row = slots[slot] as usize * words;
        let copied = if word < words {
            source.key_words[row + word]
        } else {
            source.value_words[row + word - words]
        };
        pool.rows.write(block * comptime!(2 * BLOCK * words) + at, copied);
        at += UNITS.comptime();
    }
}
