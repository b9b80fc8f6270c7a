//! Rotary position embedding, in the half-split (`rotate_half`) convention of Hugging Face.

use std::f64::consts::TAU;
use std::ops::Range;

use burn::tensor::{DType, Device, Int, Tensor, TensorData};

use crate::config::{ModelConfig, RopeScaling};

/// The `D / 2` inverse frequencies, in radians per token, scaled as the configuration says.
///
/// The `llama3` scaling is that of Llama 3.1 (`_compute_llama3_parameters` of `transformers`).
pub fn inverse_frequencies(config: &ModelConfig) -> Vec<f64> {
    let frequency = |pair: usize| {
        let exponent = (2 * pair) as f64 / config.head_dim as f64;
        scaled(config.rope_theta.powf(-exponent), config.rope_scaling)
    };
    (0..config.head_dim / 2).map(frequency).collect()
}

fn scaled(frequency: f64, scaling: RopeScaling) -> f64 {
    match scaling {
        RopeScaling::None => frequency,
        RopeScaling::Linear { factor } => frequency / factor,
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_positions,
        } => {
            // How often the wave fits into the original context.
            let turns = original_max_positions as f64 * frequency / TAU;
            let kept = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
            let kept = kept.clamp(0.0, 1.0);
            (1.0 - kept) * frequency / factor + kept * frequency
        }
    }
}

/// Cosines and sines of every position, `[P, D]` each, in f32 (computed in f64 on the host).
///
/// Both halves of a row hold the same `D / 2` angles. The sines carry the sign of `rotate_half`:
/// the first half of a row is negated.
#[derive(Debug, Clone)]
pub struct RopeTable {
    cos: Tensor<2>,
    signed_sin: Tensor<2>,
}

impl RopeTable {
    /// Computes the table for the positions `0..positions`.
    pub fn new(config: &ModelConfig, positions: usize, device: &Device) -> Self {
        let frequencies = inverse_frequencies(config);
        let half = frequencies.len();
        let mut cos = Vec::with_capacity(2 * positions * half);
        let mut signed_sin = Vec::with_capacity(2 * positions * half);
        for position in 0..positions {
            let angles = frequencies.iter().map(|frequency| position as f64 * frequency);
            let row: Vec<(f64, f64)> = angles.map(f64::sin_cos).collect();
            for sign in [-1.0, 1.0] {
                cos.extend(row.iter().map(|(_, cos)| *cos as f32));
                signed_sin.extend(row.iter().map(|(sin, _)| (sign * sin) as f32));
            }
        }
        let tensor = |values: Vec<f32>| {
            let data = TensorData::new(values, [positions, 2 * half]);
            Tensor::<2>::from_data(data, (device, DType::F32))
        };
        Self { cos: tensor(cos), signed_sin: tensor(signed_sin) }
    }

    /// Number of positions `P`.
    pub fn positions(&self) -> usize {
        self.cos.dims()[0]
    }

    /// Cosines `[P, D]`, f32.
    pub fn cos(&self) -> &Tensor<2> {
        &self.cos
    }

    /// Sines `[P, D]`, f32, the first half of each row negated.
    pub fn signed_sin(&self) -> &Tensor<2> {
        &self.signed_sin
    }

    /// The rotation of `tokens` consecutive positions from `start`, the same for every sequence.
    ///
    /// # Panics
    /// If the table has fewer than `start + tokens` positions.
    pub fn rotation(&self, start: usize, tokens: usize) -> Rotation {
        let positions = self.positions();
        let end = start + tokens;
        assert!(end <= positions, "rotation up to position {end} of {positions}");
        let rows = |table: &Tensor<2>| table.clone().slice_dim(0, start..end).unsqueeze::<4>();
        Rotation { cos: rows(&self.cos), signed_sin: rows(&self.signed_sin) }
    }

    /// The rotation of each sequence's own positions.
    ///
    /// # Shapes
    /// - `positions`: `[B, T]`, each below [`Self::positions`] (not checked: that would read
    ///   them back from the device)
    pub fn rotation_at(&self, positions: Tensor<2, Int>) -> Rotation {
        let [batch, tokens] = positions.dims();
        let positions = positions.reshape([batch * tokens]);
        let rows = |table: &Tensor<2>| {
            let [_, dim] = table.dims();
            table.clone().select(0, positions.clone()).reshape([batch, 1, tokens, dim])
        };
        Rotation { cos: rows(&self.cos), signed_sin: rows(&self.signed_sin) }
    }

    /// Rotates `x` at the positions from `start` on; see [`Self::rotation`].
    ///
    /// # Shapes
    /// - `x`, result: `[B, H, T, D]`
    ///
    /// # Panics
    /// If the table has fewer than `start + T` positions or another head dimension.
    pub fn apply(&self, x: Tensor<4>, start: usize) -> Tensor<4> {
        self.rotation(start, x.dims()[2]).apply(x)
    }

    /// Rotates `x` at each sequence's own positions; see [`Self::rotation_at`].
    ///
    /// # Shapes
    /// - `x`, result: `[B, H, T, D]`
    /// - `positions`: `[B, T]`
    ///
    /// # Panics
    /// If the shapes disagree.
    pub fn apply_at(&self, x: Tensor<4>, positions: Tensor<2, Int>) -> Tensor<4> {
        self.rotation_at(positions).apply(x)
    }
}

/// The rows of a [`RopeTable`] that one step uses: looked up once, applied to the queries and keys
/// of every layer.
#[derive(Debug, Clone)]
pub struct Rotation {
    cos: Tensor<4>,
    signed_sin: Tensor<4>,
}

impl Rotation {
    /// Rotates `x`, in f32, and returns it in its own type.
    ///
    /// # Shapes
    /// - `x`, result: `[B, H, T, D]`, with the `B` (or any, for [`RopeTable::rotation`]), `T` and
    ///   `D` of this rotation
    ///
    /// # Panics
    /// If the shapes disagree.
    pub fn apply(&self, x: Tensor<4>) -> Tensor<4> {
        let ([batch, _, tokens, dim], own) = (x.dims(), self.cos.dims());
        let fits = (own[0] == 1 || own[0] == batch) && own[2] == tokens && own[3] == dim;
        assert!(fits, "rotation of shape {own:?} applied to {:?}", x.dims());
        let dtype = x.dtype();
        let x = x.cast(DType::F32);
        let halves = |range: Range<usize>| x.clone().slice_dim(3, range);
        let swapped = Tensor::cat(vec![halves(dim / 2..dim), halves(0..dim / 2)], 3);
        (x * self.cos.clone() + swapped * self.signed_sin.clone()).cast(dtype)
    }
}

#[cfg(test)]
mod tests;
