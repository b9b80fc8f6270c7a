//! Positions without gaps, and keys re-rotated to these positions.

use burn::tensor::{DType, Tensor};

use crate::tensors::{floats, ints, packed};
use crate::{Error, LayerCache, Result};

impl LayerCache {
    /// Renumbers each head's tokens from 0 without gaps, in the order of their positions, and
    /// rotates their keys by the difference (half-split RoPE). Reads the positions to the host.
    ///
    /// `inverse_frequencies` are the inverse frequencies of RoPE, `[D / 2]`.
    ///
    /// # Errors
    /// [`Error::Shape`] for another number of frequencies, [`Error::Read`].
    pub fn rerotate(&mut self, inverse_frequencies: &[f64]) -> Result<()> {
        let half = self.head_dim() / 2;
        if inverse_frequencies.len() != half {
            return Err(Error::Shape {
                what: "inverse_frequencies",
                expected: vec![half],
                actual: vec![inverse_frequencies.len()],
            });
        }
        let old = self.read_positions()?;
        let mut new = old.clone();
        for range in 0..self.layout.head_ranges() {
            let mut order: Vec<usize> = self.layout.live(range).collect();
            order.sort_by_key(|&slot| old[slot]);
            for (position, slot) in order.into_iter().enumerate() {
                new[slot] = position as i32;
            }
        }
        if new == old {
            return Ok(());
        }
        let slots = old.len();
        let angles = old.iter().zip(&new).flat_map(|(old, new)| {
            inverse_frequencies.iter().map(move |frequency| f64::from(new - old) * frequency)
        });
        let (sin, cos): (Vec<f32>, Vec<f32>) =
            angles.map(|angle| (angle.sin() as f32, angle.cos() as f32)).unzip();
        let device = self.options.device.clone();
        let (sin, cos) = (floats(sin, [slots, half], &device), floats(cos, [slots, half], &device));
        let keys = self.keys.clone().cast(DType::F32);
        let (first, second) = (keys.clone().narrow(1, 0, half), keys.narrow(1, half, half));
        let rotated = vec![
            first.clone() * cos.clone() - second.clone() * sin.clone(),
            second * cos + first * sin,
        ];
        self.keys = packed(Tensor::cat(rotated, 1).cast(self.options.dtype));
        self.positions = ints(new, [slots], &device);
        Ok(())
    }
}
