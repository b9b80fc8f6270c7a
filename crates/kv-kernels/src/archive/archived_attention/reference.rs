//! `archived_attention` in plain loops: the CPU path, and the oracle of the kernel's tests.

use std::ops::Range;

use burn::tensor::DType;
use half::{bf16, f16};

use crate::archive::layout::host::both;
use crate::archive::layout::{BLOCK, row_words};
use crate::attention::continued::reference::State;

/// The buffers of a pool that attention takes.
pub(crate) struct ArchivedSlots<'a> {
    pub(crate) rows: &'a [i32],
    pub(crate) key_statistics: &'a [i32],
    pub(crate) value_means: &'a [i32],
    pub(crate) head_dim: usize,
    /// The dtype of the rows' numbers.
    pub(crate) dtype: DType,
    /// The factor of logits.
    pub(crate) scale: f32,
}

impl ArchivedSlots<'_> {
    /// Attends to a range of slots: to the `chosen` ones, counted from its first, and to the means
    /// of the others.
    pub(crate) fn attend(
        &self,
        query: &[f32],
        slots: Range<usize>,
        chosen: &[i32],
        state: &mut State,
    ) {
        let logit =
            |key: &[f32]| self.scale * query.iter().zip(key).map(|(q, k)| q * k).sum::<f32>();
        for &slot in chosen {
            let [key, value] = self.row(slots.start + slot as usize);
            state.add(logit(&key), value.into_iter());
        }
        for block in slots.start / BLOCK..slots.end / BLOCK {
            let back =
                chosen.iter().filter(|&&slot| slots.start / BLOCK + slot as usize / BLOCK == block);
            let others = BLOCK - back.count();
            if others == 0 {
                continue;
            }
            let statistics = &self.key_statistics[block * self.head_dim..][..self.head_dim];
            let key: Vec<f32> = statistics.iter().map(|word| both(*word)[0]).collect();
            let words = self.head_dim.div_ceil(2);
            let means = &self.value_means[block * words..][..words];
            let value = means.iter().flat_map(|word| both(*word)).take(self.head_dim);
            state.add(logit(&key) + (others as f32).ln(), value);
        }
    }

    /// A slot's key and value.
    fn row(&self, slot: usize) -> [Vec<f32>; 2] {
        let words = row_words(self.head_dim, self.dtype.size());
        [0, 1].map(|of| {
            let words = &self.rows[(2 * slot + of) * words..][..words];
            let halves = |word: &i32| [*word as u16, (*word as u32 >> 16) as u16];
            match self.dtype {
                DType::F16 => {
                    let halves = words.iter().flat_map(halves);
                    halves.map(|bits| f16::from_bits(bits).to_f32()).collect()
                }
                DType::BF16 => {
                    let halves = words.iter().flat_map(halves);
                    halves.map(|bits| bf16::from_bits(bits).to_f32()).collect()
                }
                _ => words.iter().map(|word| f32::from_bits(*word as u32)).collect(),
            }
        })
    }
}
