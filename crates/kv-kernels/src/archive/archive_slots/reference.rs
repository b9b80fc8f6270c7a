//! `archive_slots` in plain loops: the CPU path, and the oracle of the kernel's tests.

use crate::archive::layout::host::{Number, nearest, pair};
use crate::archive::layout::{BLOCK, SIGNS, row_words, signature_words};

/// The buffers of a pool.
pub(crate) struct HostPool<'a> {
    pub(crate) rows: &'a mut [i32],
    pub(crate) signatures: &'a mut [i32],
    pub(crate) key_statistics: &'a mut [i32],
    pub(crate) value_means: &'a mut [i32],
    /// Whether signatures and rows are written, beside means and spreads.
    pub(crate) keeps_slots: bool,
    pub(crate) head_dim: usize,
}

impl HostPool<'_> {
    /// Copies the lists of `from`, of `count` slots each, into blocks from `to` on.
    pub(crate) fn archive<E: Number>(
        &mut self,
        source: [&[E]; 2],
        from: &[i32],
        to: &[i32],
        count: usize,
    ) {
        for (list, first) in from.chunks(count).zip(to) {
            let Ok(first) = usize::try_from(*first) else { continue };
            for (at, slots) in list.chunks(BLOCK).enumerate() {
                self.archive_block(source, slots, first + at);
            }
        }
    }

    fn archive_block<E: Number>(&mut self, source: [&[E]; 2], slots: &[i32], block: usize) {
        let head_dim = self.head_dim;
        let words = row_words(head_dim, size_of::<E>());
        let row = |of: usize, slot: i32| &source[of][slot.max(0) as usize * head_dim..][..head_dim];
        let kept = if self.keeps_slots { slots } else { &[] };
        for (at, &slot) in kept.iter().enumerate() {
            for of in 0..2 {
                let to = ((block * BLOCK + at) * 2 + of) * words;
                let numbers = row(of, slot).chunks(4 / size_of::<E>());
                let written = self.rows[to..to + words].iter_mut();
                written.zip(numbers).for_each(|(word, numbers)| *word = E::word(numbers) as i32);
            }
        }
        let mean = |of: usize, channel: usize| {
            let sum: f32 = slots.iter().map(|&slot| row(of, slot)[channel].wide()).sum();
            nearest(sum / BLOCK as f32)
        };
        let signatures = signature_words(head_dim) * BLOCK;
        let signatures = match self.keeps_slots {
            true => &mut self.signatures[block * signatures..][..signatures],
            false => &mut [],
        };
        signatures.fill(0);
        for channel in 0..head_dim {
            let centre = mean(0, channel);
            let keys = slots.iter().map(|&slot| row(0, slot)[channel].wide());
            let spread: f32 = keys.clone().map(|key| (key - centre).abs()).sum();
            let statistics = pair([centre, spread / BLOCK as f32]);
            self.key_statistics[block * head_dim + channel] = statistics as i32;
            let above = keys.enumerate().filter(|(_, key)| self.keeps_slots && *key > centre);
            for (at, _) in above {
                signatures[channel / SIGNS * BLOCK + at] |= (1u32 << (channel % SIGNS)) as i32;
            }
        }
        let means = head_dim.div_ceil(2);
        for (word, own) in self.value_means[block * means..][..means].iter_mut().enumerate() {
            let second = if 2 * word + 1 < head_dim { mean(1, 2 * word + 1) } else { 0.0 };
            *own = pair([mean(1, 2 * word), second]) as i32;
        }
    }
}
