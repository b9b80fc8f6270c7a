//! Rotary position embedding, in the half-split (`rotate_half`) convention of Hugging Face.

use std::f64::consts::TAU;

use burn::tensor::{DType, Device, Tensor, TensorData};
use kv_kernels::RotaryTable;

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

/// Cosines and sines of the positions `0..positions`, in f32 (computed in f64 on the host).
pub fn rotary_table(config: &ModelConfig, positions: usize, device: &Device) -> RotaryTable {
    let frequencies = inverse_frequencies(config);
    let half = frequencies.len();
    let angles = (0..positions).flat_map(|position| {
        frequencies.iter().map(move |frequency| (position as f64 * frequency).sin_cos())
    });
    let (sin, cos): (Vec<f32>, Vec<f32>) =
        angles.map(|(sin, cos)| (sin as f32, cos as f32)).unzip();
    // Flat first: CUDA pads the rows of some matrices.
    let tensor = |values: Vec<f32>| {
        let flat = TensorData::new(values, [positions * half]);
        Tensor::<1>::from_data(flat, (device, DType::F32)).reshape([positions, half])
    };
    RotaryTable { cos: tensor(cos), sin: tensor(sin) }
}

#[cfg(test)]
mod tests;
