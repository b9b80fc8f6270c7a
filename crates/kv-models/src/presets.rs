//! The shapes of published models, for speed work with random weights.

use burn::tensor::DType;

use crate::config::{Architecture, ModelConfig, RopeScaling};
use crate::error::{ModelError, Result};

/// The names that [`preset`] knows.
pub const PRESETS: &[&str] = &[
    "llama-2-7b",
    "llama-3.1-8b",
    "llama-3-70b",
    "mistral-7b",
    "qwen2.5-14b",
    "qwen2.5-32b",
    "qwen3-0.6b",
    "qwen3-1.7b",
    "qwen3-4b",
    "qwen3-8b",
    "deepseek-r1-distill-llama-8b",
];

/// The configuration that was published under a name, ignoring case.
///
/// `mistral-7b` is version 0.3 (no sliding window).
///
/// # Errors
/// [`ModelError::UnknownPreset`], which lists the names and suggests the nearest.
pub fn preset(name: &str) -> Result<ModelConfig> {
    let config = match name.to_ascii_lowercase().as_str() {
        "llama-2-7b" => ModelConfig {
            vocab_size: 32_000,
            intermediate_size: 11_008,
            num_kv_heads: 32,
            max_positions: 4096,
            rope_theta: 10_000.0,
            bos_token_id: Some(1),
            eos_token_ids: vec![2],
            dtype: Some(DType::F16),
            ..llama3()
        },
        "llama-3.1-8b" | "deepseek-r1-distill-llama-8b" => ModelConfig {
            max_positions: 131_072,
            rope_scaling: RopeScaling::Llama3 {
                factor: 8.0,
                low_freq_factor: 1.0,
                high_freq_factor: 4.0,
                original_max_positions: 8192,
            },
            ..llama3()
        },
        "llama-3-70b" => ModelConfig {
            hidden_size: 8192,
            intermediate_size: 28_672,
            num_layers: 80,
            num_query_heads: 64,
            ..llama3()
        },
        "mistral-7b" => ModelConfig {
            architecture: Architecture::Mistral,
            vocab_size: 32_768,
            max_positions: 32_768,
            rope_theta: 1_000_000.0,
            bos_token_id: Some(1),
            eos_token_ids: vec![2],
            ..llama3()
        },
        "qwen2.5-14b" => qwen2_5(13_824, 48),
        "qwen2.5-32b" => qwen2_5(27_648, 64),
        "qwen3-0.6b" => qwen3(1024, 3072, 28, 16),
        "qwen3-1.7b" => qwen3(2048, 6144, 28, 16),
        "qwen3-4b" => qwen3(2560, 9728, 36, 32),
        "qwen3-8b" => ModelConfig { tie_embeddings: false, ..qwen3(4096, 12_288, 36, 32) },
        _ => return Err(unknown(name)),
    };
    Ok(config)
}

/// Llama-3-8B.
fn llama3() -> ModelConfig {
    ModelConfig {
        architecture: Architecture::Llama,
        vocab_size: 128_256,
        hidden_size: 4096,
        intermediate_size: 14_336,
        num_layers: 32,
        num_query_heads: 32,
        num_kv_heads: 8,
        head_dim: 128,
        max_positions: 8192,
        sliding_window: None,
        rms_norm_eps: 1e-5,
        rope_theta: 500_000.0,
        rope_scaling: RopeScaling::None,
        tie_embeddings: false,
        qkv_bias: false,
        output_bias: false,
        mlp_bias: false,
        qk_norm: false,
        bos_token_id: Some(128_000),
        eos_token_ids: vec![128_001],
        dtype: Some(DType::BF16),
    }
}

fn qwen2_5(intermediate_size: usize, num_layers: usize) -> ModelConfig {
    ModelConfig {
        architecture: Architecture::Qwen2,
        vocab_size: 152_064,
        hidden_size: 5120,
        intermediate_size,
        num_layers,
        num_query_heads: 40,
        max_positions: 131_072,
        sliding_window: None,
        rope_theta: 1_000_000.0,
        qkv_bias: true,
        bos_token_id: Some(151_643),
        eos_token_ids: vec![151_643],
        ..llama3()
    }
}

fn qwen3(
    hidden_size: usize,
    intermediate_size: usize,
    num_layers: usize,
    num_query_heads: usize,
) -> ModelConfig {
    ModelConfig {
        architecture: Architecture::Qwen3,
        vocab_size: 151_936,
        hidden_size,
        intermediate_size,
        num_layers,
        num_query_heads,
        max_positions: 40_960,
        sliding_window: None,
        rms_norm_eps: 1e-6,
        rope_theta: 1_000_000.0,
        tie_embeddings: true,
        qk_norm: true,
        bos_token_id: Some(151_643),
        eos_token_ids: vec![151_645],
        ..llama3()
    }
}

fn unknown(name: &str) -> ModelError {
    // Below this similarity a suggestion is noise.
    const SIMILAR: f64 = 0.6;
    let nearest = PRESETS
        .iter()
        .map(|preset| (strsim::normalized_damerau_levenshtein(name, preset), *preset))
        .filter(|(similarity, _)| *similarity >= SIMILAR)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, preset)| preset);
    ModelError::UnknownPreset { name: name.to_string(), nearest, presets: PRESETS }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameter_counts_are_the_published_ones() {
        for (name, expected) in [
            ("llama-2-7b", 6_738_415_616),
            ("llama-3.1-8b", 8_030_261_248),
            ("deepseek-r1-distill-llama-8b", 8_030_261_248),
            ("llama-3-70b", 70_553_706_496),
            ("mistral-7b", 7_248_023_552),
            ("qwen2.5-14b", 14_770_033_664),
            ("qwen2.5-32b", 32_763_876_352),
            ("qwen3-0.6b", 596_049_920),
            ("qwen3-1.7b", 1_720_574_976),
            ("qwen3-4b", 4_022_468_096),
            ("qwen3-8b", 8_190_735_360),
        ] {
            assert_eq!(preset(name).unwrap().parameter_count(), expected, "{name}");
        }
    }

    #[test]
    fn every_name_is_a_preset() {
        for name in PRESETS {
            let config = preset(&name.to_uppercase()).unwrap();
            assert_eq!(config.num_query_heads % config.num_kv_heads, 0);
        }
    }

    #[test]
    fn an_unknown_name_suggests_the_nearest() {
        let text = preset("qwen3-1.7").unwrap_err().to_string();
        assert!(text.contains("did you mean `qwen3-1.7b`"), "{text}");
        assert!(text.contains("llama-2-7b"), "{text}");
        let text = preset("zzz").unwrap_err().to_string();
        assert!(!text.contains("did you mean"), "{text}");
    }
}
