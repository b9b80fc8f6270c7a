//! Rotary position embedding, in the half-split (`rotate_half`) convention of Hugging Face.

use std::borrow::Cow;
use std::f64::consts::TAU;

use burn::tensor::{DType, Device, Tensor, TensorData};
use kv_kernels::RotaryTable;

use crate::config::{ModelConfig, RopeScaling};

/// The `D / 2` inverse frequencies, in radians per token, scaled as the configuration says. Where
/// the scaling depends on the length, they are for sequences within the trained context.
///
/// The scalings follow `transformers` (`modeling_rope_utils.py`): `llama3` of Llama 3.1, `yarn` of
/// [2309.00071](https://arxiv.org/abs/2309.00071), section 3.
pub fn inverse_frequencies(config: &ModelConfig) -> Vec<f64> {
    inverse_frequencies_of(config, 0)
}

/// The inverse frequencies of a sequence of `tokens` tokens, `[D / 2]`.
///
/// They depend on the length under dynamic NTK alone ([`RopeScaling::Dynamic`]). As in
/// `transformers`, a key keeps the rotation that it was cached with. All of a prompt's tokens have
/// the frequencies of the prompt's length. Each later token has the frequencies of the length that
/// the sequence has with it. Unlike in `transformers`, a sequence changes the frequencies of no
/// other sequence, neither in its batch nor later.
pub(crate) fn inverse_frequencies_of(config: &ModelConfig, tokens: usize) -> Vec<f64> {
    let dim = config.head_dim as f64;
    let theta = match config.rope_scaling {
        RopeScaling::Dynamic { factor, original_max_positions } => {
            let contexts = (tokens as f64 / original_max_positions as f64).max(1.0);
            config.rope_theta * (factor * contexts - (factor - 1.0)).powf(dim / (dim - 2.0))
        }
        _ => config.rope_theta,
    };
    let frequencies = (0..config.head_dim / 2).map(|pair| theta.powf(-((2 * pair) as f64) / dim));
    let scaled = frequencies.enumerate().map(|(pair, frequency)| match config.rope_scaling {
        RopeScaling::None | RopeScaling::Dynamic { .. } => frequency,
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
            interpolated(frequency, factor, kept)
        }
        RopeScaling::Yarn {
            factor,
            original_max_positions,
            beta_fast,
            beta_slow,
            truncate,
            ..
        } => {
            // The (fractional) index of the pair that turns `turns` times within the original
            // context.
            let pair_of = |turns: f64| {
                dim * (original_max_positions as f64 / (turns * TAU)).ln() / (2.0 * theta.ln())
            };
            let (mut low, mut high) = (pair_of(beta_fast), pair_of(beta_slow));
            if truncate {
                (low, high) = (low.floor(), high.ceil());
            }
            (low, high) = (low.max(0.0), high.min(dim - 1.0));
            // As in `transformers`, so that nothing is divided by 0.
            let width = if low == high { 0.001 } else { high - low };
            interpolated(frequency, factor, 1.0 - (pair as f64 - low) / width)
        }
    });
    scaled.collect()
}

/// A frequency of which a share from 0 to 1 is kept, the rest divided by `factor`.
fn interpolated(frequency: f64, factor: f64, kept: f64) -> f64 {
    let kept = kept.clamp(0.0, 1.0);
    (1.0 - kept) * frequency / factor + kept * frequency
}

/// Cosines and sines of the positions `0..positions` of tokens that follow each other one by one,
/// in f32 (computed in f64 on the host). Under dynamic NTK, prompts beyond the trained context have
/// other ones, by [`inverse_frequencies_of`] their length.
pub(crate) fn rotary_table(config: &ModelConfig, positions: usize, device: &Device) -> RotaryTable {
    let usual = inverse_frequencies(config);
    let trained = trained_context(config).unwrap_or(positions);
    let rows = (0..positions).map(|position| match position < trained {
        true => Cow::Borrowed(usual.as_slice()),
        false => Cow::Owned(inverse_frequencies_of(config, position + 1)),
    });
    table(config, rows, device)
}

/// Cosines and sines of a prompt's positions, where they differ from [`rotary_table`]'s.
pub(crate) fn prompt_table(
    config: &ModelConfig,
    tokens: usize,
    device: &Device,
) -> Option<RotaryTable> {
    if tokens <= trained_context(config)? {
        return None;
    }
    let frequencies = inverse_frequencies_of(config, tokens);
    Some(table(config, (0..tokens).map(|_| Cow::Borrowed(frequencies.as_slice())), device))
}

/// The length beyond which frequencies depend on it, if they do.
pub(crate) fn trained_context(config: &ModelConfig) -> Option<usize> {
    match config.rope_scaling {
        RopeScaling::Dynamic { original_max_positions, .. } => Some(original_max_positions),
        _ => None,
    }
}

/// One row for each position's frequencies.
fn table<'a>(
    config: &ModelConfig,
    rows: impl ExactSizeIterator<Item = Cow<'a, [f64]>>,
    device: &Device,
) -> RotaryTable {
    let (positions, half) = (rows.len(), config.head_dim / 2);
    let factor = config.rope_scaling.attention_factor();
    let (mut cos, mut sin) =
        (Vec::with_capacity(positions * half), Vec::with_capacity(positions * half));
    for (position, frequencies) in rows.enumerate() {
        for frequency in frequencies.iter() {
            let angle = position as f64 * frequency;
            cos.push((factor * angle.cos()) as f32);
            sin.push((factor * angle.sin()) as f32);
        }
    }
    // Flat first: CUDA pads the rows of some matrices.
    let tensor = |values: Vec<f32>| {
        let flat = TensorData::new(values, [positions * half]);
        Tensor::<1>::from_data(flat, (device, DType::F32)).reshape([positions, half])
    };
    RotaryTable { cos: tensor(cos), sin: tensor(sin) }
}

#[cfg(test)]
mod tests;
